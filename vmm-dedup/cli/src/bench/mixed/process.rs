//! Plain memory: a thread reads and writes words at random in the hot part, and now and then reads one in the warm part;
//! the service works on all of it.
#![allow(unsafe_code)] // the service works on the area's address range

use super::Setup;
use super::report::{Access, Process};
use crate::Failure;
use crate::bench::content::{Area, HUGE_PAGES};
use rustix::time::{ClockId, clock_gettime};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{DedupService, HostRange};

/// Accesses between two looks at the clock.
const BATCH: u64 = 4096;
/// One access in so many is timed by itself.
const TIMED: u64 = 64;
/// One access in so many writes (the word's own value, so that the content stays known).
const WRITES: u64 = 16;

/// One access in so many reads the warm part.
const WARM: u64 = 200;

/// Huge pages of each part.
struct Parts {
    hot: Range<usize>,
    warm: Range<usize>,
    cold: Range<usize>,
}

impl Parts {
    fn of(chunks: usize) -> Self {
        let quarter = chunks / 4 / 2 * 2;
        let cold = chunks * 3 / 8 / 2 * 2;
        Self {
            hot: 0..quarter,
            warm: quarter..2 * quarter,
            cold: 2 * quarter..2 * quarter + cold,
        }
    }

    /// Content of a page: pages with the same number are equal. Neighbouring huge pages have their repeated parts, runs of
    /// eight pages, in common.
    fn content(&self, page: usize) -> usize {
        let (chunk, run) = (page / HUGE_PAGES, page % HUGE_PAGES / 8);
        let repeated = match chunk {
            c if self.hot.contains(&c) => run % 32 == 0,
            c if self.warm.contains(&c) || self.cold.contains(&c) => run % 2 == 0,
            _ => false,
        };
        if repeated {
            chunk / 2 * HUGE_PAGES + page % HUGE_PAGES
        } else {
            page | 1 << 40
        }
    }
}

/// What the accessing thread did since it was last asked.
#[derive(Default)]
struct Tally {
    accesses: u64,
    cpu: Duration,
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

    fn tally(&self) -> Tally {
        std::mem::take(&mut self.1.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Speed over some time: the median of its seconds, since other load comes in bursts.
    fn measure(&self, time: Duration) -> Access {
        self.tally();
        let (mut speeds, mut rates, mut timed_ns) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..time.as_secs().max(1) {
            let clock = Instant::now();
            std::thread::sleep(Duration::from_secs(1));
            let tally = self.tally();
            rates.push(tally.accesses as f64 / clock.elapsed().as_secs_f64());
            speeds.push(tally.accesses as f64 / tally.cpu.as_secs_f64().max(1e-9));
            timed_ns.extend(tally.timed_ns);
        }
        speeds.sort_unstable_by(f64::total_cmp);
        rates.sort_unstable_by(f64::total_cmp);
        timed_ns.sort_unstable();
        let quantile = |q: usize| timed_ns.get(timed_ns.len() * q / 100).copied().unwrap_or(0);
        Access {
            per_cpu_s: speeds[speeds.len() / 2],
            per_s: rates[rates.len() / 2],
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
    let area = Area::with_content(true, mib, |page| parts.content(page))?;
    let orders = Orders(AtomicU64::new(0), Mutex::default());
    orders.set(&parts.hot);
    std::thread::scope(|scope| {
        let end = End(&orders);
        scope.spawn(|| work(&area, &orders, &parts.warm));
        let undisturbed = orders.measure(setup.seconds);
        let services = start(setup, &area)?;
        let measured = phases(setup, &parts, &orders, &services, undisturbed);
        drop(end);
        measured
    })
    .and_then(|measured| match area.wrong() {
        0 => Ok(measured),
        wrong => Err(Failure::new(format!(
            "{wrong} pages do not hold what was written to them"
        ))),
    })
}

fn start(setup: &Setup<'_>, area: &Area) -> Result<Vec<DedupService>, Failure> {
    let (Some(subject), Some(store)) = (setup.subject, setup.store) else {
        return Ok(Vec::new());
    };
    let range = HostRange::try_new(area.address(), area.len()).map_err(Failure::from_error)?;
    // SAFETY: the area stays mapped for the process's lifetime and is only accessed through volatile words.
    let service = unsafe { DedupService::start_on_ranges(&[range], store, setup.config("mixed", subject)) };
    Ok(vec![service.map_err(Failure::from_error)?])
}

fn phases(
    setup: &Setup<'_>,
    parts: &Parts,
    orders: &Orders,
    services: &[DedupService],
    undisturbed: Access,
) -> Result<Process, Failure> {
    let huge = || services.iter().map(|s| s.stats().huge_ranges).sum::<u64>();
    setup.settle(services);
    let converged = setup.cpu(services)?;
    let steady = orders.measure(setup.seconds);
    let cpu = setup.cpu(services)?;
    let saved_pages = setup.saved_pages(services)?;
    let huge_before = huge();
    // The roles change: as much memory as was hot, of what was cold and repetitive.
    let turned = parts.cold.start..parts.cold.start + parts.hot.len();
    let rebuilt =
        |services: &[DedupService]| services.iter().map(|s| s.stats().huge_rebuilt_total).sum::<u64>();
    let before = rebuilt(services);
    let start = Instant::now();
    orders.set(&turned);
    let (mut last, mut back_after) = (before, None);
    // Until all of it is huge again, or for ten intervals.
    let patience = Duration::from_millis(setup.interval_ms * 10);
    while last - before < turned.len() as u64 && !services.is_empty() && start.elapsed() < patience {
        let now = rebuilt(services);
        if now > last {
            (last, back_after) = (now, Some(start.elapsed()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let stats = services.first().map(DedupService::stats).unwrap_or_default();
    Ok(Process {
        saved_pages,
        huge_pages: huge_before,
        metadata_bytes: stats.metadata_bytes,
        undisturbed,
        access: steady,
        converge_monitor_cpu_s: converged.0,
        converge_dedup_cpu_s: converged.1,
        steady_monitor_cpu_s: cpu.0 - converged.0,
        steady_dedup_cpu_s: cpu.1 - converged.1,
        after_change: orders.measure(setup.seconds),
        rebuilt: last - before,
        turned: turned.len() as u64,
        rebuilt_after_intervals: back_after.map(|t| t.as_secs_f64() * 1000.0 / setup.interval_ms as f64),
        rebuild_p50_us: stats.rebuild.quantile_us(0.5),
        rebuild_p99_us: stats.rebuild.quantile_us(0.99),
        rebuild_refused: stats.rebuild_pinned_total + stats.rebuild_memory_total + stats.rebuild_other_total,
        rebuild_max_us: stats.rebuild.max_ns / 1000,
    })
}

/// The accessing thread. Each address depends on what was read before, so that accesses do not overlap.
fn work(area: &Area, orders: &Orders, warm: &Range<usize>) {
    let mut n: u64 = 1;
    let cpu = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    let mut last = cpu();
    let mut timed = Vec::new();
    loop {
        let order = orders.0.load(Ordering::Acquire);
        if order == 0 {
            return;
        }
        #[allow(clippy::cast_possible_truncation)] // two halves of 32 bits
        let ordered = ((order >> 32) as usize, order & 0xffff_ffff);
        let warm = (warm.start * HUGE_PAGES, (warm.len() * HUGE_PAGES) as u64);
        for access in 0..BATCH {
            let to_warm = access % WARM == 2;
            let (first, count) = if to_warm { warm } else { ordered };
            n = n
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            #[allow(clippy::cast_possible_truncation)] // below count
            let page = first + ((u128::from(n) * u128::from(count)) >> 64) as usize;
            let word = (n >> 12) as usize % 512;
            let clock = access.is_multiple_of(TIMED).then(Instant::now);
            let value = area.touch(page, word, access % WRITES == 1);
            if let Some(clock) = clock {
                timed.push(u32::try_from(clock.elapsed().as_nanos()).unwrap_or(u32::MAX));
            }
            n = n.wrapping_add(value);
        }
        let now = cpu();
        let mut tally = orders.1.lock().unwrap_or_else(PoisonError::into_inner);
        tally.accesses += BATCH;
        tally.cpu += now.saturating_sub(last);
        tally.timed_ns.append(&mut timed);
        drop(tally);
        last = cpu();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn parts_repeat_as_the_help_says() {
        let parts = Parts::of(16);
        assert_eq!(
            [parts.hot.clone(), parts.warm.clone(), parts.cold.clone()],
            [0..4, 4..8, 8..14]
        );
        let mut copies: HashMap<usize, usize> = HashMap::new();
        (0..16 * HUGE_PAGES).for_each(|page| *copies.entry(parts.content(page)).or_default() += 1);
        let repeated = |chunk: usize| {
            let pages = chunk * HUGE_PAGES..(chunk + 1) * HUGE_PAGES;
            pages.filter(|page| copies[&parts.content(*page)] == 2).count()
        };
        assert_eq!([0, 5, 9, 15].map(repeated), [16, 256, 256, 0]);
    }
}
