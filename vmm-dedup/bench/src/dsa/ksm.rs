//! KSM's algorithm by the CPU and by the device, on the same content: merges for the CPU time that they take.
//!
//! - *cpu-ksm*: comparisons by the CPU, and the keys that Linux makes, XXH64 of whole pages.
//! - *dsa-ksm*: both by the device, a page an offload. Each is waited for; or the next one is submitted while one is on its way
//!   (*dsa-ksm-two*); or many are (*dsa-ksm-async*).
//! - *para-ksm*: both by the device, many pages in a batch.
//!
//! With the device the CPU looks at the first line of two pages itself, and asks if it is equal: comparisons tell no order,
//! so the CPU has to look at a line of each page that differs anyway. Without that, para-ksm compares with two levels
//! of the tree at once.

use super::device::{Device, Way};
use super::order::{Order, Placed};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use std::time::Instant;
use twox_hash::XxHash64;
use vmm_dedup::compare::ksm::Ksm;
use vmm_dedup::compare::{
    Account, Answer, Arena, Cpu, Engine, Error, KeyKind, Keys, PageId, PageView, Pages, Stopwatch, TreeSearch,
};
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, bytes_of};
use vmm_dedup_protocol::tree::TreeReader;

/// Passes: pages are seen, merged, and those that are left found unchanged.
const PASSES: usize = 3;

/// Descriptors that are on their way where many are.
pub(super) const MANY: usize = 16;

/// What keys and comparisons are done by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum By {
    CpuKsm,
    /// Each page waited for.
    DsaKsm,
    /// Each page a descriptor of its own, two on their way.
    DsaKsmTwo,
    /// The same, [`MANY`] on their way.
    DsaKsmAsync,
    ParaKsm,
    /// The CPU does not look at first lines; two levels of the tree at once.
    ParaKsmGuessing,
}

impl By {
    pub(super) const ALL: [Self; 6] = [
        Self::CpuKsm,
        Self::DsaKsm,
        Self::DsaKsmTwo,
        Self::DsaKsmAsync,
        Self::ParaKsm,
        Self::ParaKsmGuessing,
    ];

    pub(super) fn engine(self, device: &Device) -> Result<Box<dyn TreeSearch>, Failure> {
        Ok(match self {
            Self::CpuKsm => Box::new(CpuKsm::new()),
            Self::DsaKsm => Box::new(device.engine(Way::Alone(1), true)?),
            Self::DsaKsmTwo => Box::new(device.engine(Way::Alone(2), true)?),
            Self::DsaKsmAsync => Box::new(device.engine(Way::Alone(MANY), true)?),
            Self::ParaKsm => Box::new(device.engine(Way::Batches(1024), true)?),
            Self::ParaKsmGuessing => Box::new(device.engine(Way::Batches(1024), false)?),
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CpuKsm => "cpu-ksm",
            Self::DsaKsm => "dsa-ksm",
            Self::DsaKsmTwo => "dsa-ksm-two",
            Self::DsaKsmAsync => "dsa-ksm-async",
            Self::ParaKsm => "para-ksm",
            Self::ParaKsmGuessing => "para-ksm-guessing",
        }
    }
}

/// What one of them takes for a content.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) content: String,
    pub(super) by: By,
    pub(super) pages: usize,
    /// Pages that share another's memory: the same for all.
    pub(super) merges: u64,
    /// CPU time of all that the algorithm does, waiting included, ms.
    pub(super) cpu_ms: f64,
    /// Time, ms.
    pub(super) ms: f64,
    /// Merges for a million of this machine's cycles.
    pub(super) merges_per_megacycle: f64,
    /// That, as a multiple of cpu-ksm's.
    pub(super) of_cpu_ksm: f64,
}

/// All ways, each once.
pub(super) fn measure(
    content: &str,
    (arena, order): (&Arena, Order),
    device: &Device,
    mhz: f64,
) -> Result<Vec<Figures>, Failure> {
    let pages = Placed::new(arena, order);
    let mut all: Vec<Figures> = Vec::new();
    for by in By::ALL {
        let mut engine = by.engine(device)?;
        engine
            .map(PageId(0), arena.pages(), arena.file())
            .map_err(Failure::from_error)?;
        let mut ksm = Ksm::new(arena.pages());
        let (start, watch) = (Instant::now(), Stopwatch::start());
        let mut merges = 0;
        for _ in 0..PASSES {
            let pass = ksm.pass(&mut *engine, &pages).map_err(Failure::from_error)?;
            merges += pass.stable_merges + pass.unstable_merges;
        }
        let model = engine.account().device_cpu_ns;
        let cpu_ns = watch.stop_cpu().saturating_sub(model) as f64;
        let ns = start.elapsed().as_nanos() as f64 - model as f64;
        if all.first().is_some_and(|first| first.merges != merges) {
            return Err(Failure::new(format!("{} merges other pages", by.name())));
        }
        let per_megacycle = merges as f64 / (cpu_ns * mhz / 1e9);
        let base = all
            .first()
            .map_or(per_megacycle, |first| first.merges_per_megacycle);
        all.push(Figures {
            content: content.to_owned(),
            by,
            pages: arena.pages(),
            merges,
            cpu_ms: cpu_ns / 1e6,
            ms: ns / 1e6,
            merges_per_megacycle: per_megacycle,
            of_cpu_ksm: per_megacycle / base,
        });
    }
    Ok(all)
}

/// KSM as Linux has it: `memcmp`, and XXH64 of whole pages.
#[derive(Debug)]
pub(super) struct CpuKsm {
    cpu: Cpu,
    keys: Account,
}

impl CpuKsm {
    fn new() -> Self {
        Self {
            cpu: Cpu::new(KeyKind::Jhash2),
            keys: Account::default(),
        }
    }
}

impl Engine for CpuKsm {
    fn name(&self) -> &'static str {
        "cpu-ksm"
    }

    fn account(&self) -> Account {
        let (cpu, keys) = (self.cpu.account(), self.keys);
        Account {
            pages: cpu.pages + keys.pages,
            bytes: cpu.bytes + keys.bytes,
            wall_ns: cpu.wall_ns + keys.wall_ns,
            cpu_ns: cpu.cpu_ns + keys.cpu_ns,
            ..cpu
        }
    }
}

impl Keys for CpuKsm {
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        let watch = Stopwatch::start();
        let key = |page: &PageId| {
            let view = pages.view(*page).ok_or(Error::Fault(*page))?;
            Ok(XxHash64::oneshot(0, bytes_of(&words(view))))
        };
        let keys = of.iter().map(key).collect();
        self.keys.pages += of.len() as u64;
        self.keys.bytes += (of.len() * PAGE_WORDS * 8) as u64;
        watch.stop(&mut self.keys);
        keys
    }
}

fn words(view: &PageView) -> PageWords {
    std::array::from_fn(|word| view[word].load(Ordering::Relaxed))
}

impl TreeSearch for CpuKsm {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        self.cpu.search(pages, tree, candidates)
    }

    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        self.cpu.among(pages, candidate, set)
    }
}
