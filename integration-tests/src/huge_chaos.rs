//! Chaos with huge pages: guests write, restore and rest, while what stands still is split and shared and what is used
//! is built again, all the time.

pub use crate::guests::Outcome;
use crate::guests::{Size, add, payload};
use crate::store::StoreThread;
use crate::vm::Guest;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, Policy, ServiceStats};
use vmm_dedup_refvmm::ThpMode;

/// Splits and rebuilds, in subpages (512 for each huge page).
fn conversions(stats: &ServiceStats) -> u64 {
    512 * (stats.huge_splits_total + stats.huge_rebuilt_total + stats.huge_zero_total)
}

/// Two guests with the same pages and zero pages, until `size.merges` subpages were split or rebuilt, and huge pages
/// both ways.
///
/// # Panics
/// If a guest reports a wrong byte or the wanted number is not reached in time.
#[must_use]
pub fn chaos(size: Size) -> Outcome {
    let store = StoreThread::start();
    let guests = boot(&store, size);
    let start = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let stats: Vec<ServiceStats> = guests.iter().map(Guest::stats).collect();
        let done: u64 = stats.iter().map(conversions).sum();
        if done >= size.merges && stats.iter().any(|s| s.huge_rebuilt_total > 0) {
            break;
        }
        assert!(
            start.elapsed() < size.patience,
            "only {done} splits and rebuilds of {} in time: {stats:?}",
            size.merges,
        );
    }
    outcome(guests)
}

/// Two guests on huge pages, whose services sample, split and build them all the time, with managed breaks.
///
/// # Panics
/// If a guest does not boot.
#[must_use]
pub fn boot(store: &StoreThread, size: Size) -> Vec<Guest> {
    vmm_dedup::share_whatever_it_costs(true);
    let config = |name: &str| Config {
        name: name.into(),
        pass_period_ms: 10,
        cpu_percent: 90,
        huge_policy: Policy::Smartmd,
        sampling: vmm_dedup::Sampling {
            interval_ms: 20,
            window_us: 1000,
        },
        breaks: Breaks::managed(4096, 256 << 20),
        ..Config::default()
    };
    let memory = size.common_mib + size.zero_mib + 16;
    let boot = |n: u64| {
        let payload = payload(n, size).rest_ms(150).report_ms(100);
        let config = config(&format!("huge-{n}"));
        Guest::boot(payload, memory, ThpMode::Always, Some((&store.socket(), config)))
    };
    (1..3).map(boot).collect()
}

/// Lets the guests verify their memory, and sums up what happened.
///
/// # Panics
/// If a guest reports a wrong byte.
#[must_use]
pub fn outcome(guests: Vec<Guest>) -> Outcome {
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
        outcome.conversions += conversions(&stats);
        outcome.rebuilt += stats.huge_rebuilt_total;
        outcome.samples += stats.samples_total;
        outcome.breaks += stats.breaks_managed_total + stats.breaks_kernel_total;
        outcome.mismatches += stats.mismatches_total;
        outcome.put_off += stats.refused_swapped_total;
        add(&mut outcome.stop, &stats.stop);
        add(&mut outcome.rebuild, &stats.rebuild);
    }
    outcome
}
