//! What merging costs a neighbour on the same core.
//!
//! A co-runner reads memory at random, on the core on which KSM's algorithm runs, at the same rate of pages for all: that at
//! which cpu-ksm takes half of the core. The slowdown is what merging takes of the core, times what it takes of the
//! co-runner's speed by its use of the caches. A model's work is left out of the first; it does use the caches, so that the
//! second is an upper bound for the device's.

use super::device::Device;
use super::ksm::By;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::compare::ksm::Ksm;
use vmm_dedup::compare::{Arena, Engine, PageId, Stopwatch};
use vmm_dedup_host::Failure;

/// How long each is measured.
const TIME: Duration = Duration::from_millis(1500);
/// Words that the co-runner reads: more than a core's own caches hold.
const WORDS: usize = 1 << 20;

/// One way of merging.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    pub(super) by: By,
    /// Pages looked at in a second.
    pub(super) pages_per_s: f64,
    /// Part of the core that merging took.
    pub(super) core: f64,
    /// The co-runner's slowdown.
    pub(super) slowdown: f64,
}

pub(super) fn measure(arena: &Arena, device: &Device) -> Result<Vec<Figures>, Failure> {
    let core = first_core()?;
    let mut all: Vec<Figures> = Vec::new();
    let mut period = None;
    for by in [By::CpuKsm, By::DsaKsm, By::DsaKsmAsync, By::ParaKsm] {
        // Right before, since the machine's other work changes the speed of memory.
        let alone = run(core, |stop, _| {
            std::thread::sleep(TIME);
            stop.store(true, Ordering::Relaxed);
            Ok(Merging::default())
        })?;
        let beside = run(core, |stop, start| {
            let merged = merge(by, arena, device, &mut period, start);
            stop.store(true, Ordering::Relaxed);
            merged
        })?;
        let (own, merging) = (beside.cpu_ns as f64, beside.merging.cpu_ns as f64);
        let speed = |run: &Run| run.reads as f64 / run.cpu_ns as f64;
        all.push(Figures {
            by,
            pages_per_s: beside.merging.pages as f64 / beside.merging.s,
            core: merging / (own + merging),
            slowdown: (own + merging) / own * speed(&alone) / speed(&beside),
        });
    }
    Ok(all)
}

#[derive(Clone, Copy, Debug, Default)]
struct Merging {
    cpu_ns: u64,
    pages: u64,
    /// Time without that of a model, s.
    s: f64,
}

struct Run {
    reads: u64,
    cpu_ns: u64,
    merging: Merging,
}

/// Runs the co-runner beside something, both on one core. What runs beside it begins when the co-runner does.
fn run(
    core: CpuSet,
    beside: impl FnOnce(&AtomicBool, Instant) -> Result<Merging, Failure> + Send,
) -> Result<Run, Failure> {
    let stop = AtomicBool::new(false);
    let memory: Vec<AtomicU64> = (0..WORDS as u64).map(AtomicU64::new).collect();
    let pin = || sched_setaffinity(None, &core).map_err(|errno| Failure::new(format!("cannot pin: {errno}")));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let pinned = pin();
            let merging = pinned.and_then(|()| beside(&stop, Instant::now()));
            stop.store(true, Ordering::Relaxed);
            merging
        });
        let reader = scope.spawn(|| {
            pin()?;
            let (watch, mut reads, mut at) = (Stopwatch::start(), 0, 1usize);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..4096 {
                    let word = memory[at % WORDS].fetch_add(1, Ordering::Relaxed);
                    at = at
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1 | (word & 1) as usize)
                        >> 3;
                }
                reads += 4096;
            }
            Ok::<_, Failure>((reads, watch.stop_cpu()))
        });
        let gone = |_| Failure::new("a thread of the measurement panicked");
        let (reads, cpu_ns) = reader.join().map_err(gone)??;
        let merging = other.join().map_err(gone)??;
        Ok(Run {
            reads,
            cpu_ns,
            merging,
        })
    })
}

/// Merges until the time is over, at a rate of pages that the first one sets.
fn merge(
    by: By,
    arena: &Arena,
    device: &Device,
    period: &mut Option<Duration>,
    start: Instant,
) -> Result<Merging, Failure> {
    let mut engine = by.engine(device)?;
    engine
        .map(PageId(0), arena.pages(), arena.file())
        .map_err(Failure::from_error)?;
    let (watch, mut pages) = (Stopwatch::start(), 0);
    let own = |engine: &dyn Engine| engine.account().device_cpu_ns;
    let mut passes = 0;
    let mut ksm = Ksm::new(arena.pages());
    while start.elapsed() < TIME + Duration::from_nanos(own(&*engine)) {
        if passes == 3 {
            (ksm, passes) = (Ksm::new(arena.pages()), 0);
        }
        let pass = ksm.pass(&mut *engine, arena).map_err(Failure::from_error)?;
        passes += 1;
        pages += pass.candidates;
        if let Some(period) = period {
            // The rate is kept over passes: sleeping after each batch would measure the kernel's sleep.
            let due = start + Duration::from_nanos(own(&*engine)) + period.mul_f64(pages as f64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        } else {
            std::thread::yield_now();
        }
    }
    let model = own(&*engine);
    let cpu_ns = watch.stop_cpu().saturating_sub(model);
    let s = start.elapsed().as_secs_f64() - model as f64 / 1e9;
    let per_page = Duration::from_nanos(2 * cpu_ns / pages.max(1));
    period.get_or_insert(per_page);
    Ok(Merging { cpu_ns, pages, s })
}

/// One of the cores that this process may use.
fn first_core() -> Result<CpuSet, Failure> {
    let all = sched_getaffinity(None).map_err(|errno| Failure::new(format!("no affinity: {errno}")))?;
    let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
    let mut one = CpuSet::new();
    one.set(first.ok_or_else(|| Failure::new("this process may use no core"))?);
    Ok(one)
}
