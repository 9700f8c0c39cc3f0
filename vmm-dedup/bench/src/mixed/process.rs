//! Plain memory: a thread reads and writes words at random in the hot part, and now and then reads one in the warm part;
//! the service works on all of it. Every other millisecond or so the thread does the same in a control area that no service
//! knows: what slows both down is the machine.

use super::agent::Agent;
use super::churn::{Replaced, churn};
use super::measured::{Access, Churned, Process, RebuildRefused};
use super::parts::Parts;
use super::setup::Setup;
use crate::content::{Area, HUGE_PAGES, words};
use crate::service::{Served, vouched};
use rustix::time::{ClockId, clock_gettime};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;

/// Accesses between two looks at the clock.
const BATCH: u64 = 4096;
/// One access in so many is timed by itself.
const TIMED: u64 = 64;
/// One access in so many writes (the word's own value, so that the content stays known).
const WRITES: u64 = 16;

/// What counts as most of the huge pages that turned hot: such a part. (Some had not been split, and then others are counted.)
const MOST: (u64, u64) = (9, 10);

/// One access in so many reads the warm part.
const WARM: u64 = 200;

/// Accesses, and the time they took.
#[derive(Default)]
struct Done {
    accesses: u64,
    cpu: Duration,
    wall: Duration,
}

impl Done {
    fn add(&mut self, more: &Self) {
        self.accesses += more.accesses;
        self.cpu += more.cpu;
        self.wall += more.wall;
    }

    fn per_cpu_s(&self) -> f64 {
        self.accesses as f64 / self.cpu.as_secs_f64().max(1e-9)
    }

    fn per_s(&self) -> f64 {
        self.accesses as f64 / self.wall.as_secs_f64().max(1e-9)
    }
}

/// What the accessing thread did since it was last asked.
#[derive(Default)]
struct Tally {
    tested: Done,
    control: Done,
    timed_ns: Vec<u32>,
}

/// What the thread is to work on: first page and number of pages, 32 bits each; 0: end.
struct Orders(AtomicU64, Mutex<Tally>);

impl Orders {
    fn set(&self, chunks: &Range<usize>) {
        let (first, count) = (chunks.start * HUGE_PAGES, chunks.len() * HUGE_PAGES);
        self.0
            .store((first as u64) << 32 | count as u64, Ordering::Release);
    }

    /// The pages that are hot; `None` at the end.
    fn hot(&self) -> Option<Range<usize>> {
        let order = self.0.load(Ordering::Acquire);
        #[allow(clippy::cast_possible_truncation)] // two halves of 32 bits
        let (first, count) = ((order >> 32) as usize, (order & 0xffff_ffff) as usize);
        (order != 0).then(|| first..first + count)
    }

    fn tally(&self) -> Tally {
        std::mem::take(&mut self.1.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Speed over some time: the medians of its seconds, since other load comes in bursts.
    fn measure(&self, time: Duration) -> Access {
        self.tally();
        let mut seconds = Vec::new();
        for _ in 0..time.as_secs().max(1) {
            std::thread::sleep(Duration::from_secs(1));
            seconds.push(self.tally());
        }
        let median = |figure: &dyn Fn(&Tally) -> f64| {
            let mut figures: Vec<f64> = seconds.iter().map(figure).collect();
            figures.sort_unstable_by(f64::total_cmp);
            figures[figures.len() / 2]
        };
        let mut timed_ns: Vec<u32> = seconds.iter().flat_map(|s| &s.timed_ns).copied().collect();
        timed_ns.sort_unstable();
        let quantile = |q: usize| timed_ns.get(timed_ns.len() * q / 100).copied().unwrap_or(0);
        Access {
            per_cpu_s: median(&|s| s.tested.per_cpu_s()),
            per_s: median(&|s| s.tested.per_s()),
            of_control: median(&|s| s.tested.per_cpu_s() / s.control.per_cpu_s()),
            of_control_by_clock: median(&|s| s.tested.per_s() / s.control.per_s()),
            p50_ns: quantile(50),
            p99_ns: quantile(99),
        }
    }
}

/// Ends the thread, whatever happens.
struct End<'a>(&'a Orders);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

pub(super) fn measure(setup: &Setup<'_>, mib: u32) -> Result<Process, Failure> {
    let parts = Parts::of(mib as usize / 2);
    let mut area = Area::with_content(true, mib, |page| parts.content(page))?;
    let control = Area::with_content(true, u32::try_from(parts.hot.len() * 2).unwrap_or(mib), |page| {
        page
    })?;
    let orders = Orders(AtomicU64::new(0), Mutex::default());
    orders.set(&parts.hot);
    let agent = Agent::try_new(setup)?;
    std::thread::scope(|scope| {
        let end = End(&orders);
        scope.spawn(|| work(&area, &control, &orders, &parts));
        let undisturbed = orders.measure(setup.seconds);
        let services = start(setup, &area, &agent)?;
        if !services.is_empty() && agent.speaks() {
            scope.spawn(|| agent.tell(setup, area.pages() / HUGE_PAGES, &|| orders.hot(), &parts));
        }
        let measured = phases(setup, &area, &parts, &orders, &services, undisturbed);
        drop(end);
        measured
    })
    .and_then(|(measured, replaced)| {
        for (page, content) in replaced {
            area.expect(page, &words(content));
        }
        match area.wrong() {
            0 => Ok(measured),
            wrong => Err(Failure::new(format!(
                "{wrong} pages do not hold what was written to them"
            ))),
        }
    })
}

fn start(setup: &Setup<'_>, area: &Area, agent: &Agent) -> Result<Vec<Served>, Failure> {
    let (Some(subject), Some(store)) = (setup.subject, setup.store) else {
        return Ok(Vec::new());
    };
    let config = setup.config("mixed", subject);
    let served = Served::area_with_agent(area, store, config, vouched(), agent.socket())?;
    Ok(vec![served])
}

/// The policy's effect on what stands still and, if there is to be churn, after that.
fn phases(
    setup: &Setup<'_>,
    area: &Area,
    parts: &Parts,
    orders: &Orders,
    services: &[Served],
    undisturbed: Access,
) -> Result<(Process, Replaced), Failure> {
    let huge = || services.iter().map(|s| s.stats().huge_ranges).sum::<u64>();
    setup.settle(services);
    let converged = setup.cpu(services)?;
    let steady = orders.measure(setup.seconds);
    let cpu = setup.cpu(services)?;
    let saved_pages = setup.saved_pages(services)?;
    let huge_before = huge();
    let mut replaced = Replaced::new();
    let mut churned = None;
    if setup.churn > 0 {
        replaced = churn(area, parts, setup.churn, Duration::from_millis(setup.interval_ms));
        setup.settle(services);
        let after = setup.cpu(services)?;
        churned = Some(Churned {
            rounds: setup.churn,
            saved_pages: setup.saved_pages(services)?,
            huge_pages: huge(),
            access: orders.measure(setup.seconds),
            monitor_cpu_s: after.0 - cpu.0,
            dedup_cpu_s: after.1 - cpu.1,
        });
    }
    // The roles change: as much memory as was hot, of what was cold and repetitive.
    let turned = parts.cold.start..parts.cold.start + parts.hot.len();
    let rebuilt = |services: &[Served]| services.iter().map(|s| s.stats().huge_rebuilt_total).sum::<u64>();
    let before = rebuilt(services);
    let start = Instant::now();
    orders.set(&turned);
    let (mut last, mut back_after, mut most_after) = (before, None, None);
    let most = turned.len() as u64 * MOST.0 / MOST.1;
    // Until all of it is huge again, or for twenty intervals.
    let patience = Duration::from_millis(setup.interval_ms * 20);
    while last - before < turned.len() as u64 && !services.is_empty() && start.elapsed() < patience {
        let now = rebuilt(services);
        if now > last {
            (last, back_after) = (now, Some(start.elapsed()));
        }
        if last - before >= most {
            most_after = most_after.or(back_after);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let stats = services.first().map(Served::stats).unwrap_or_default();
    let intervals = |after: Duration| after.as_secs_f64() * 1000.0 / setup.interval_ms as f64;
    let measured = Process {
        use_source: stats.use_source_name().to_owned(),
        saved_pages,
        huge_pages: huge_before,
        metadata_bytes: stats.metadata_bytes,
        undisturbed,
        access: steady,
        converge_monitor_cpu_s: converged.0,
        converge_dedup_cpu_s: converged.1,
        steady_monitor_cpu_s: cpu.0 - converged.0,
        steady_dedup_cpu_s: cpu.1 - converged.1,
        churned,
        after_change: orders.measure(setup.seconds),
        rebuilt: last - before,
        turned: turned.len() as u64,
        rebuilt_after_intervals: back_after.map(intervals),
        most_rebuilt_after_intervals: most_after.map(intervals),
        rebuild_p50_us: stats.rebuild.quantile_us(0.5),
        rebuild_p99_us: stats.rebuild.quantile_us(0.99),
        rebuild_refused: RebuildRefused {
            pinned: stats.rebuild_pinned_total,
            memory: stats.rebuild_memory_total,
            other: stats.rebuild_other_total,
        },
        rebuild_max_us: stats.rebuild.max_ns / 1000,
    };
    Ok((measured, replaced))
}

/// The accessing thread.
fn work(area: &Area, control: &Area, orders: &Orders, parts: &Parts) {
    let mut n: u64 = 1;
    let pages = |chunks: &Range<usize>| chunks.start * HUGE_PAGES..chunks.end * HUGE_PAGES;
    let warm = pages(&parts.warm);
    let everything = 0..control.pages();
    let mut unused = Vec::new();
    loop {
        let Some(hot) = orders.hot() else { return };
        let mut timed = Vec::new();
        let tested = access(area, &hot, &warm, &mut n, &mut timed);
        let compared = access(control, &everything, &everything, &mut n, &mut unused);
        unused.clear();
        let mut tally = orders.1.lock().unwrap_or_else(PoisonError::into_inner);
        tally.timed_ns.append(&mut timed);
        tally.tested.add(&tested);
        tally.control.add(&compared);
    }
}

/// Some accesses at random. Each address depends on what was read before, so that accesses do not overlap.
fn access(
    area: &Area,
    pages: &Range<usize>,
    warm: &Range<usize>,
    n: &mut u64,
    timed_ns: &mut Vec<u32>,
) -> Done {
    let cpu = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    let (start, before) = (Instant::now(), cpu());
    for access in 0..BATCH {
        let pages = if access % WARM == 2 { warm } else { pages };
        *n = n
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        #[allow(clippy::cast_possible_truncation)] // below their number
        let page = pages.start + ((u128::from(*n) * pages.len() as u128) >> 64) as usize;
        let word = (*n >> 12) as usize % 512;
        let clock = access.is_multiple_of(TIMED).then(Instant::now);
        let value = area.touch(page, word, access % WRITES == 1);
        if let Some(clock) = clock {
            timed_ns.push(u32::try_from(clock.elapsed().as_nanos()).unwrap_or(u32::MAX));
        }
        *n = n.wrapping_add(value);
    }
    Done {
        accesses: BATCH,
        cpu: cpu().saturating_sub(before),
        wall: start.elapsed(),
    }
}
