//! Comparisons and CRCs of pages by the CPU and by the device, one at a time and in batches: what a page takes.

use super::device::{Device, Way};
use super::ksm::MANY;
use crate::content::words;
use crate::engines::arenas;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;
use vmm_dedup::compare::{
    Arena, Engine, Keys, PageId, PageView, Pages, Pair, StablePage, Stopwatch, TreeSearch, With,
};
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::key::bytes_of;

/// Times that all pages are gone through; the fastest counts.
const ROUNDS: usize = 3;
/// Pages that are asked for at once where each is submitted alone.
const SINGLE: usize = 1024;

/// What is done with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Operation {
    /// With a page that is equal.
    Compare,
    /// CRC32C of a page.
    Crc,
}

/// By whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum By {
    Cpu,
    /// The device, each page waited for.
    Sync,
    /// The device, each page alone, several on their way.
    Async,
    /// The device, so many in a batch that is waited for.
    Batch(usize),
}

/// What it takes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Figures {
    pub(super) operation: Operation,
    pub(super) by: By,
    /// Time for a page, ns.
    pub(super) ns_per_page: f64,
    /// CPU time of the driver for a page, waiting included, ns.
    pub(super) cpu_ns_per_page: f64,
}

/// The smallest batch with which the device takes less than the CPU; `None` if none does.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Turn {
    pub(super) operation: Operation,
    /// In CPU time.
    pub(super) cpu: Option<usize>,
    /// In time.
    pub(super) time: Option<usize>,
}

pub(super) fn measure(device: &Device, pages: usize) -> Result<(Vec<Figures>, Vec<Turn>), Failure> {
    let arena = arenas::arena(pages + 1)?;
    (0..=pages).for_each(|page| arena.write(page, &words(7)));
    let (mut all, mut turns) = (Vec::new(), Vec::new());
    for operation in [Operation::Compare, Operation::Crc] {
        let cpu = by_cpu(operation, &arena)?;
        let mut of_operation = vec![cpu];
        let batches = (1..=10).map(|shift| By::Batch(1 << shift));
        for by in [By::Sync, By::Async].into_iter().chain(batches) {
            of_operation.push(by_device(operation, by, device, &arena)?);
        }
        let first = |less: &dyn Fn(&Figures) -> bool| {
            of_operation.iter().find_map(|figures| match figures.by {
                By::Batch(size) if less(figures) => Some(size),
                By::Sync if less(figures) => Some(1),
                _ => None,
            })
        };
        turns.push(Turn {
            operation,
            cpu: first(&|figures| figures.cpu_ns_per_page < cpu.cpu_ns_per_page),
            time: first(&|figures| figures.ns_per_page < cpu.ns_per_page),
        });
        all.extend(of_operation);
    }
    Ok((all, turns))
}

/// A page that nobody writes any more.
#[allow(unsafe_code)] // the CPU is to compare as it does in the service
fn stable(view: &PageView) -> StablePage<'_> {
    // SAFETY: the page is mapped for as long as the view, and all pages have been written.
    unsafe { StablePage::at(std::ptr::from_ref(view) as usize) }
}

fn by_cpu(operation: Operation, arena: &Arena) -> Result<Figures, Failure> {
    let missing = || Failure::new("a page is missing");
    let first = stable(arena.view(PageId(0)).ok_or_else(missing)?);
    let pages = arena.pages() - 1;
    let (mut ns, mut cpu_ns) = (u64::MAX, u64::MAX);
    for _ in 0..ROUNDS {
        let (start, watch) = (Instant::now(), Stopwatch::start());
        for page in 1..=pages as u64 {
            let id = PageId(page);
            let page = stable(arena.view(id).ok_or_else(missing)?);
            let with = With::Slot { id, page };
            match operation {
                Operation::Compare => {
                    black_box(Pair { taken: first, with }.equal());
                }
                Operation::Crc => {
                    black_box(crc32c::crc32c(bytes_of(page.words())));
                }
            }
        }
        cpu_ns = cpu_ns.min(watch.stop_cpu());
        ns = ns.min(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    Ok(Figures {
        operation,
        by: By::Cpu,
        ns_per_page: ns as f64 / pages as f64,
        cpu_ns_per_page: cpu_ns as f64 / pages as f64,
    })
}

fn by_device(operation: Operation, by: By, device: &Device, arena: &Arena) -> Result<Figures, Failure> {
    let (way, at_once) = match by {
        By::Cpu | By::Sync => (Way::Alone(1), 1),
        By::Async => (Way::Alone(MANY), SINGLE),
        By::Batch(size) => (Way::Whole(size), size),
    };
    let mut engine = device.engine(way, false)?;
    engine
        .map(PageId(0), arena.pages(), arena.file())
        .map_err(Failure::from_error)?;
    let ids: Vec<PageId> = (1..arena.pages() as u64).map(PageId).collect();
    let (mut ns, mut cpu_ns) = (u64::MAX, u64::MAX);
    for _ in 0..ROUNDS {
        let (watch, start, before) = (Stopwatch::start(), Instant::now(), model_ns(&engine));
        for some in ids.chunks(at_once) {
            match operation {
                Operation::Compare => {
                    let found = engine.among(arena, PageId(0), some);
                    if found.map_err(Failure::from_error)? != Some(0) {
                        return Err(Failure::new("the device calls equal pages different"));
                    }
                }
                Operation::Crc => {
                    for key in engine.keys(arena, some) {
                        key.map_err(Failure::from_error)?;
                    }
                }
            }
        }
        // A model's own work is no time.
        let model = model_ns(&engine) - before;
        let wall = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        ns = ns.min(wall.saturating_sub(model));
        cpu_ns = cpu_ns.min(watch.stop_cpu().saturating_sub(model));
    }
    Ok(Figures {
        operation,
        by,
        ns_per_page: ns as f64 / ids.len() as f64,
        cpu_ns_per_page: cpu_ns as f64 / ids.len() as f64,
    })
}

/// What a model has worked.
fn model_ns(engine: &dyn Engine) -> u64 {
    engine.account().device_cpu_ns
}
