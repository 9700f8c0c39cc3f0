//! Shortages as the kernel makes them: a swap device that fails, swap that is full, a limit on memory, no mappings left. Guests
//! that write and check their memory all the time go on with the right bytes.

use std::time::{Duration, Instant};
use vmm_dedup::ServiceStats;
use vmm_dedup_integration_tests::guests::Size;
use vmm_dedup_integration_tests::logged::Logged;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::{huge_chaos, need_kvm, swap_chaos};
use vmm_dedup_trouble::{MemoryGroup, Swap, UsedUp, Watchdog, or_skip, swap_or_skip};

const SIZE: Size = Size {
    merges: 3000,
    patience: Duration::from_secs(120),
    common_mib: 8,
    zero_mib: 4,
};

/// How long memory is short.
const PRESSED: Duration = Duration::from_secs(3);

/// The device has room for 4 MiB: whatever else goes there fails to be written, and stays in memory.
#[test]
fn a_swap_device_that_fails_to_write_loses_nothing() {
    need_kvm!();
    let swap = or_skip!(Swap::that_fails(4 << 20));
    let out = swap_chaos::chaos(SIZE, &swap);
    assert!(out.outcome.merges > 0 && out.pages_out > 0, "{out:?}");
    eprintln!("{out:?}");
}

#[test]
fn swap_that_is_full_loses_nothing() {
    need_kvm!();
    let swap = or_skip!(Swap::of_size(4 << 20));
    let out = swap_chaos::chaos(SIZE, &swap);
    assert!(out.outcome.merges > 0 && out.pages_out > 0, "{out:?}");
    eprintln!("{out:?}");
}

/// Guests, services and store have two thirds of the memory that they use (memory.high): the kernel reclaims it from them, and
/// swaps, while they allocate. Without the second version of cgroups it reclaims what it can, again and again.
#[test]
fn a_limit_on_memory_loses_nothing() {
    need_kvm!();
    let swap = swap_or_skip!();
    let group = or_skip!(MemoryGroup::new());
    let last = swap.clone();
    let _watchdog = Watchdog::start(SIZE.patience, move || last.off());
    group.within(|| {
        let store = StoreThread::start();
        let guests = huge_chaos::boot(&store, SIZE);
        let used = group.used().expect("it is told");
        let (start, mut merges) = (Instant::now(), 0);
        while merges < SIZE.merges || start.elapsed() < PRESSED {
            group.press(used * 2 / 3).expect("memory is reclaimed");
            std::thread::sleep(Duration::from_millis(20));
            merges = guests.iter().map(|guest| guest.stats().merges_total).sum();
            assert!(start.elapsed() < SIZE.patience, "only {merges} merges");
        }
        let pressed = group.used().expect("it is told");
        eprintln!("{used} bytes used before, {pressed} after");
        let out = huge_chaos::outcome(guests);
        eprintln!("{out:?}");
    });
}

#[test]
fn a_process_without_mappings_goes_on() {
    need_kvm!();
    let log = Logged::begin();
    let store = StoreThread::start();
    let guests = huge_chaos::boot(&store, SIZE);
    let sum = |field: fn(&ServiceStats) -> u64| {
        let stats = guests.iter().map(Guest::stats);
        stats.map(|s| field(&s)).sum::<u64>()
    };
    let until = |what: &str, is: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !is() {
            assert!(start.elapsed() < SIZE.patience, "waiting for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    until("merges", &|| sum(|s| s.merges_total) > SIZE.merges);
    // Before: a thread needs mappings.
    let watchdog = Watchdog::start(SIZE.patience, || ());
    let used_up = or_skip!(UsedUp::begin());
    let (failures, progress) = (sum(|s| s.window_failures_total), guests[0].progress());
    until("failures to be told", &|| {
        sum(|s| s.window_failures_total) > failures
    });
    until("the guest to go on", &|| guests[0].progress() > progress);
    until("it to be logged", &|| log.names(libc::ENOMEM));
    drop(used_up);
    let merges = sum(|s| s.merges_total);
    until("merging to go on", &|| sum(|s| s.merges_total) > merges);
    drop(watchdog);
    let out = huge_chaos::outcome(guests);
    eprintln!("{out:?}");
}
