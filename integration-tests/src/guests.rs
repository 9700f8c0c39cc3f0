//! Chaos with guests: they write all the time while everything that is equal is merged.

use crate::store::StoreThread;
use crate::vm::Guest;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, Histogram, ServiceStats};
use vmm_dedup_payload::{PayloadConfig, Rewrite, WorkingSet};
use vmm_dedup_refvmm::ThpMode;

/// How long and how hard.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Ends after this many merges (or conversions of subpages) in all guests together ...
    pub merges: u64,
    /// ... or fails after this time.
    pub patience: Duration,
    /// Memory areas of each guest that are the same in all, MiB.
    pub common_mib: u64,
    /// Memory areas that are zero, MiB.
    pub zero_mib: u64,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Pages merged with slots and with the zero page.
    pub merges: u64,
    /// Sharing broken for writers.
    pub breaks: u64,
    /// Taken, found different, put back.
    pub mismatches: u64,
    /// Merges put off since the pages were swapped out.
    pub put_off: u64,
    /// Writes that the guests did.
    pub writes: u64,
    /// Wrong words that the guests found.
    pub errors: u64,
    /// How long merge batches held pages away.
    pub stop: Histogram,
    /// Subpages of huge pages split, built again, or given up as zeros.
    pub conversions: u64,
    /// Huge pages built again.
    pub rebuilt: u64,
    /// Ranges of 2 MiB that were taken to learn whether they are used.
    pub samples: u64,
    /// How long building a huge page held its pages away.
    pub rebuild: Histogram,
}

/// Two guests write, restore and rest, over and over, with the same pages and zero pages in both; the services merge
/// whatever stands still for two passes, and break it for the next writes.
///
/// # Panics
/// If a guest reports a wrong byte or the wanted number of merges is not reached in time.
#[must_use]
pub fn chaos(size: Size) -> Outcome {
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::start();
    let config = |name: &str| Config {
        name: name.into(),
        pass_period_ms: 20,
        cpu_percent: 90,
        breaks: Breaks::managed(4096, 256 << 20),
        ..Config::default()
    };
    let memory = size.common_mib + size.zero_mib + 16;
    let guests: Vec<Guest> = (0..2)
        .map(|n| {
            let name = format!("chaos-{n}");
            Guest::boot(
                payload(n + 1, size),
                memory,
                ThpMode::Never,
                Some((&store.socket(), config(&name))),
            )
        })
        .collect();
    let start = Instant::now();
    let mut shown = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let merges: u64 = guests
            .iter()
            .map(|g| g.stats())
            .map(|s| s.merges_total + s.zero_merges_total)
            .sum();
        if merges >= size.merges {
            break;
        }
        assert!(
            start.elapsed() < size.patience,
            "only {merges} merges of {} in time",
            size.merges
        );
        if shown.elapsed() > Duration::from_secs(10) {
            eprintln!(
                "{merges} merges of {} after {} s",
                size.merges,
                start.elapsed().as_secs()
            );
            shown = Instant::now();
        }
    }
    let mut outcome = Outcome::default();
    for guest in guests {
        let (verdict, stats) = guest.finish();
        assert!(
            verdict.ok && verdict.errors == 0,
            "a guest found wrong bytes: {verdict:?}"
        );
        outcome.errors += verdict.errors;
        outcome.writes += verdict.writes;
        outcome.merges += stats.merges_total + stats.zero_merges_total;
        outcome.breaks += stats.breaks_managed_total + stats.breaks_kernel_total;
        outcome.mismatches += stats.mismatches_total;
        add(&mut outcome.stop, &stats.stop);
    }
    outcome
}

/// What happened while runs with exceptions were made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exceptions {
    /// Pages merged with slots and with the zero page.
    pub merges: u64,
    /// Pages that were exceptions at one time, at least.
    pub exceptions: u64,
    /// Shared pages that the kernel copied for a writer.
    pub breaks: u64,
    /// Writes that the guests did.
    pub writes: u64,
    /// Most mappings that one guest's sharing took.
    pub vmas: u64,
    /// How long merge batches held pages away.
    pub stop: Histogram,
}

/// Two guests whose common pages have pages of their own between them, with kernel breaks: runs with exceptions are made
/// while the guests write, and restore, shared pages and exceptions alike.
///
/// # Panics
/// If a guest reports a wrong byte, or nothing is merged in time.
#[must_use]
pub fn exceptions(seed: u64) -> Exceptions {
    exceptions_beside(seed, |_| ())
}

/// The same with something else going on, from when the guests run until they have verified their memory.
///
/// # Panics
/// As there.
#[must_use]
pub fn exceptions_beside<T>(seed: u64, begin: impl FnOnce(&[Guest]) -> T) -> Exceptions {
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::start();
    let guests: Vec<Guest> = (1..3)
        .map(|n| {
            let config = Config {
                name: format!("exceptions-{n}"),
                pass_period_ms: 20,
                cpu_percent: 90,
                ..Config::default()
            };
            let payload = PayloadConfig::default()
                .seed(seed * 2 + n)
                .private_mib(2)
                .zero_mib(2)
                .common_mib(16)
                .own_every(3)
                .ws_pages(1 << 20)
                .ws_area(WorkingSet::All)
                .rate(3000)
                .rewrite(Rewrite::Restore)
                .rest_ms(300)
                .seconds(1_000_000);
            Guest::boot(payload, 40, ThpMode::Never, Some((&store.socket(), config)))
        })
        .collect();
    let _beside = begin(&guests);
    let mut vmas = 0;
    let start = Instant::now();
    let broken = |guest: &Guest| guest.stats().breaks_kernel_total > 1000;
    let mut most = 0;
    while most == 0 || !guests.iter().all(broken) {
        most = guests
            .iter()
            .map(|guest| exceptions_of(&guest.stats()))
            .sum::<u64>()
            .max(most);
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "nothing happens: {:?}",
            guests[0].stats()
        );
        std::thread::sleep(Duration::from_millis(50));
        vmas = guests.iter().map(|g| g.stats().vmas).fold(vmas, u64::max);
    }
    let mut outcome = Exceptions {
        vmas,
        exceptions: most,
        ..Exceptions::default()
    };
    for guest in guests {
        let (verdict, stats) = guest.finish();
        assert!(
            verdict.ok && verdict.errors == 0,
            "a guest found wrong bytes: {verdict:?}"
        );
        outcome.merges += stats.merges_total + stats.zero_merges_total;
        outcome.breaks += stats.breaks_kernel_total;
        outcome.writes += verdict.writes;
        add(&mut outcome.stop, &stats.stop);
    }
    outcome
}

/// Pages that became exceptions, at least: what lies as a copy in a mapping of the store, or was merged again, and was not
/// broken.
fn exceptions_of(stats: &ServiceStats) -> u64 {
    (stats.pages_broken + stats.heals_total).saturating_sub(stats.breaks_kernel_total)
}

/// What happened to pages that the kernel had copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heals {
    /// Merged again.
    pub heals: u64,
    /// Copied by the kernel.
    pub breaks: u64,
    /// Left alone since somebody waited to write.
    pub wanted: u64,
    /// Writes that the guests did.
    pub writes: u64,
    /// Wrong words that the guests found.
    pub errors: u64,
    /// How long writers may have waited.
    pub stall: Histogram,
}

/// Two guests write, restore and rest, with kernel breaks, until `size.merges` copies were merged again.
///
/// # Panics
/// If a guest reports a wrong byte, or it is not reached in time.
#[must_use]
pub fn heals(size: Size) -> Heals {
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::start();
    let guests: Vec<Guest> = (1..3)
        .map(|n| {
            let config = Config {
                name: format!("heals-{n}"),
                pass_period_ms: 20,
                cpu_percent: 90,
                ..Config::default()
            };
            let payload = payload(n, size).rate(10_000);
            let memory = size.common_mib + size.zero_mib + 16;
            Guest::boot(payload, memory, ThpMode::Never, Some((&store.socket(), config)))
        })
        .collect();
    let start = Instant::now();
    let healed = || guests.iter().map(|guest| guest.stats().heals_total).sum::<u64>();
    while healed() < size.merges {
        assert!(
            start.elapsed() < size.patience,
            "only {} heals in time: {:?}",
            healed(),
            guests[0].stats()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut all = Heals::default();
    for guest in guests {
        let (verdict, stats) = guest.finish();
        assert!(
            verdict.ok && verdict.errors == 0,
            "a guest found wrong bytes: {verdict:?}"
        );
        all.heals += stats.heals_total;
        all.breaks += stats.breaks_kernel_total;
        all.wanted += stats.heal_contended_total;
        all.writes += verdict.writes;
        all.errors += verdict.errors;
        add(&mut all.stall, &stats.heal);
    }
    all
}

/// All pages are written, restored, and rest.
pub(crate) fn payload(seed: u64, size: Size) -> PayloadConfig {
    PayloadConfig::default()
        .seed(seed)
        .private_mib(2)
        .zero_mib(size.zero_mib)
        .common_mib(size.common_mib)
        .ws_pages(1 << 20)
        .ws_area(WorkingSet::All)
        .rate(0)
        .reads(0)
        .rewrite(Rewrite::Restore)
        .rest_ms(120)
        .seconds(1_000_000)
}

pub(crate) fn add(sum: &mut Histogram, more: &Histogram) {
    sum.buckets
        .iter_mut()
        .zip(more.buckets)
        .for_each(|(a, b)| *a += b);
    sum.sum_ns += more.sum_ns;
    sum.max_ns = sum.max_ns.max(more.max_ns);
}
