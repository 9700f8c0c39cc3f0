//! The dedup service itself, with its searches and keys by the CPU and by the device: merges for all CPU time that it takes.
//!
//! A store knows half of a guest's pages. The service tracks, copies, searches, keys, takes, verifies and maps: all of
//! that counts, and the model's own work does not. Verification is the CPU's.

use super::device::Device;
use super::ksm::By;
use crate::content::Area;
use crate::engines::service::{mib, serve_with, until};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup::compare::{
    Account, Answer, DeviceWork, Engine, Entry, Error, Keys, Meanwhile, PageId, Pages, Searched, TreeSearch,
};
use vmm_dedup_host::Failure;
use vmm_dedup_host::store::OwnStore;
use vmm_dedup_protocol::tree::TreeReader;

/// The name of the store's folder.
const STORE: &str = "dsa-store";
/// The engine's name in the service's settings.
const NAME: &str = "measured";

/// One way of searching.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) by: By,
    pages: u64,
    pub(super) merges: u64,
    /// CPU time of the service for searching and keying, ms.
    pub(super) search_ms: f64,
    /// All of its CPU time, ms.
    pub(super) cpu_ms: f64,
    /// Merges for a million of this machine's cycles.
    pub(super) merges_per_megacycle: f64,
    /// That, as a multiple of cpu-ksm's.
    pub(super) of_cpu_ksm: f64,
}

/// All ways, each once in each round.
pub(super) fn measure(
    device: &Device,
    pages: usize,
    mhz: f64,
    rounds: usize,
) -> Result<Vec<Vec<Figures>>, Failure> {
    let store = OwnStore::start_with(STORE, &["--ordered", "--metrics", "none"])?;
    // Everything twice in one guest, so that all of it is published.
    let known = Area::with_content(false, mib(pages * 2), |page| page % pages)?;
    let none = vmm_dedup_engines::engines();
    let teacher = serve_with(&known, store.socket(), "known", "index", None, none)?;
    until(&teacher, "the store did not fill", |stats| {
        stats.pages_mapped >= known.pages() as u64
    })?;
    let ways = [
        By::CpuKsm,
        By::DsaKsm,
        By::DsaKsmTwo,
        By::DsaKsmAsync,
        By::ParaKsm,
    ];
    let mut all: Vec<Vec<Figures>> = Vec::new();
    for round in 0..rounds {
        let mut figures: Vec<Figures> = Vec::new();
        for (at, by) in ways.into_iter().enumerate() {
            let number = round * ways.len() + at;
            let base = figures.first().map(|first| first.merges_per_megacycle);
            figures.push(once(device, store.socket(), pages, mhz, (number, by, base))?);
        }
        all.push(figures);
    }
    teacher.stop(false)?;
    Ok(all)
}

/// One way once: its number, which makes pages of its own, and what is 1.
fn once(
    device: &Device,
    store: &Path,
    pages: usize,
    mhz: f64,
    (number, by, base): (usize, By, Option<f64>),
) -> Result<Figures, Failure> {
    // Every second page is in the store, with the same neighbours as there; the others are nowhere else.
    let area = Area::with_content(false, mib(pages), |page| {
        if page / 256 % 2 == 0 {
            page
        } else {
            (page << 12 | 1 << 46) + number
        }
    })?;
    let model_ns = Arc::new(AtomicU64::new(0));
    let (counter, device) = (model_ns.clone(), device.clone());
    let make = move |_: Option<&Path>| {
        let engine = by.engine(&device);
        let engine = engine.map_err(|failure| Error::Device(failure.to_string()))?;
        let model_ns = counter.clone();
        Ok(Box::new(Metered { engine, model_ns }) as Box<dyn TreeSearch>)
    };
    let engines = vmm_dedup_engines::engines().register(NAME, Entry::new().tree_search(make));
    let service = serve_with(&area, store, by.name(), NAME, None, engines)?;
    let stats = until(&service, "nothing was merged", |stats| {
        stats.pages_mapped >= pages as u64 / 2 && stats.pages_keyed_total >= pages as u64
    })?;
    service.stop(true)?;
    if area.wrong() > 0 {
        return Err(Failure::new(format!("{}: pages are wrong", by.name())));
    }
    if stats.search.text() != NAME {
        return Err(Failure::new(format!("{}: the service let go of it", by.name())));
    }
    let model = model_ns.load(Ordering::Relaxed);
    let without = |ns: u64| ns.saturating_sub(model) as f64;
    let cpu_ns = without(stats.cpu_ns.total());
    let per_megacycle = stats.merges_total as f64 / (cpu_ns * mhz / 1e9);
    Ok(Figures {
        by,
        pages: pages as u64,
        merges: stats.merges_total,
        search_ms: without(stats.cpu_ns.search) / 1e6,
        cpu_ms: cpu_ns / 1e6,
        merges_per_megacycle: per_megacycle,
        of_cpu_ksm: per_megacycle / base.unwrap_or(per_megacycle),
    })
}

/// An engine that tells how long its model has worked.
struct Metered {
    engine: Box<dyn TreeSearch>,
    model_ns: Arc<AtomicU64>,
}

impl Metered {
    fn note<T>(&mut self, asked: impl FnOnce(&mut dyn TreeSearch) -> T) -> T {
        let answer = asked(&mut *self.engine);
        self.model_ns
            .store(self.engine.account().device_cpu_ns, Ordering::Relaxed);
        answer
    }
}

impl Engine for Metered {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn map(&mut self, first: PageId, pages: usize, file: std::os::fd::BorrowedFd<'_>) -> Answer<()> {
        self.engine.map(first, pages, file)
    }

    fn unmap(&mut self, first: PageId, pages: usize) -> Answer<()> {
        self.engine.unmap(first, pages)
    }

    fn device_work(&self) -> DeviceWork {
        self.engine.device_work()
    }

    fn account(&self) -> Account {
        self.engine.account()
    }
}

impl Keys for Metered {
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        self.note(|engine| engine.keys(pages, of))
    }
}

impl TreeSearch for Metered {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        self.note(|engine| engine.search(pages, tree, candidates))
    }

    fn search_keyed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        self.note(|engine| engine.search_keyed(pages, tree, candidates, meanwhile))
    }

    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        self.note(|engine| engine.among(pages, candidate, set))
    }
}
