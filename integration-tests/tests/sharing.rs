//! Payload guests on KVM share, stay right, and get everything back.

use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, Policy};
use vmm_dedup_integration_tests::need_kvm;
use vmm_dedup_integration_tests::pinned::Pinned;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_payload::{PayloadConfig, Rewrite, WorkingSet};
use vmm_dedup_refvmm::ThpMode;

const COMMON_MIB: u64 = 16;
const PAGES_PER_MIB: u64 = 256;

fn config(name: &str) -> Config {
    Config {
        name: name.into(),
        pass_period_ms: 50,
        cpu_percent: 80,
        ..Config::default()
    }
}

fn payload(seed: u64) -> PayloadConfig {
    PayloadConfig::default()
        .seed(seed)
        .private_mib(4)
        .zero_mib(8)
        .common_mib(COMMON_MIB)
        .ws_area(WorkingSet::Private)
        .ws_pages(256)
        .rate(2000)
        .seconds(100_000)
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{what} did not happen within a minute"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn boot_two(
    store: &StoreThread,
    thp: ThpMode,
    payload: impl Fn(u64) -> PayloadConfig,
    breaks: Breaks,
) -> [Guest; 2] {
    [1, 2].map(|n| {
        let config = Config {
            breaks,
            // What is shared does not depend on what is used.
            huge_policy: Policy::Ksm,
            ..config(&format!("guest-{n}"))
        };
        Guest::boot(payload(n), 48, thp, Some((&store.socket(), config)))
    })
}

fn common_is_shared(guests: &[Guest]) -> bool {
    guests
        .iter()
        .all(|g| g.stats().pages_mapped >= COMMON_MIB * PAGES_PER_MIB)
}

#[test]
fn equal_pages_of_two_guests_become_one_and_zero_pages_none() {
    need_kvm!();
    let store = StoreThread::start();
    let guests = boot_two(&store, ThpMode::Never, payload, Breaks::KERNEL);
    wait_until("sharing", || common_is_shared(&guests));
    wait_until("zero pages", || {
        guests.iter().all(|g| g.stats().pages_zero >= 8 * PAGES_PER_MIB)
    });
    for guest in guests {
        let (verdict, stats) = guest.finish();
        assert!(verdict.ok && verdict.writes > 0, "{verdict:?}");
        assert!(
            stats.vmas < stats.pages_mapped / 20,
            "{} mappings for {} pages",
            stats.vmas,
            stats.pages_mapped
        );
    }
}

#[test]
fn huge_pages_of_two_guests_are_split_where_they_are_equal() {
    need_kvm!();
    let store = StoreThread::start();
    let guests = boot_two(&store, ThpMode::Always, payload, Breaks::KERNEL);
    wait_until("sharing", || common_is_shared(&guests));
    for guest in guests {
        assert!(guest.finish().0.ok);
    }
}

fn unmerge_under_a_running_guest(breaks: Breaks, payload: impl Fn(u64) -> PayloadConfig, expected: u64) {
    let store = StoreThread::start();
    let guests = boot_two(&store, ThpMode::Never, payload, breaks);
    wait_until("sharing", || {
        guests.iter().all(|g| g.stats().pages_mapped >= expected)
    });
    for guest in &guests {
        let stats = guest.end_dedup(true).expect("dedup runs");
        assert_eq!(stats.pages_mapped, 0);
    }
    for guest in guests {
        assert!(guest.finish().0.ok);
    }
}

#[test]
fn unmerging_under_a_running_guest_gives_everything_back() {
    need_kvm!();
    unmerge_under_a_running_guest(Breaks::KERNEL, payload, COMMON_MIB * PAGES_PER_MIB);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let private = |line: &&str| line.contains("memfd:vmm-dedup") && line.contains("rw-p");
    assert_eq!(
        maps.lines().filter(private).count(),
        0,
        "guest memory still maps the store"
    );
}

#[test]
fn unmerging_while_the_guest_writes_shared_pages_gives_everything_back() {
    need_kvm!();
    let breaks = Breaks::managed(1024, 0);
    let writing = |seed| {
        payload(seed)
            .ws_area(WorkingSet::Common)
            .ws_pages(1024)
            .rate(3000)
    };
    for _ in 0..3 {
        unmerge_under_a_running_guest(breaks, writing, COMMON_MIB * PAGES_PER_MIB / 2);
    }
}

#[test]
fn managed_breaks_keep_pages_mergeable() {
    need_kvm!();
    let store = StoreThread::start();
    let rewriting = |seed| {
        payload(seed)
            .ws_area(WorkingSet::Common)
            .ws_pages(COMMON_MIB * PAGES_PER_MIB)
            .rate(0)
            .rewrite(Rewrite::Restore)
            .rest_ms(400)
    };
    let breaks = Breaks::managed(1024, 0);
    let guests = boot_two(&store, ThpMode::Never, rewriting, breaks);
    // More merges than pages: what was written and restored was merged again.
    let all = 2 * COMMON_MIB * PAGES_PER_MIB;
    let start = Instant::now();
    while !guests.iter().all(|g| g.stats().merges_total > all) {
        let stats = [guests[0].stats(), guests[1].stats()];
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "not merged again: {stats:#?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    for guest in guests {
        let (verdict, stats) = guest.finish();
        assert!(verdict.ok, "{verdict:?}");
        assert!(stats.breaks_managed_total > 0 && stats.break_latency.count() > 0);
        // A writer may come between the mapping of a page and its protection; that page the kernel copies.
        assert!(
            stats.pages_broken * 100 <= stats.breaks_managed_total,
            "the kernel copied although the service should: {stats:?}"
        );
    }
}

#[test]
fn what_the_kernel_copied_is_not_merged_again_while_nothing_tells_of_pins() {
    need_kvm!();
    let store = StoreThread::start();
    let pinned = Pinned::page();
    let rewriting = |seed| {
        payload(seed)
            .ws_area(WorkingSet::Common)
            .ws_pages(512)
            .rate(0)
            .rewrite(Rewrite::Restore)
            .rest_ms(300)
    };
    let no_healing = Breaks::Kernel {
        heal_stall_us: 0,
        heal_without_fork: false,
    };
    let guests = boot_two(&store, ThpMode::Never, rewriting, no_healing);
    // Both guests together: a page that its guest rewrites just when the service merges it is left
    // out, and once the other guest's page is broken nothing is left to share with.
    let broken = || -> u64 { guests.iter().map(|g| g.stats().pages_broken).sum() };
    wait_until("breaks", || broken() >= 500);
    // The broken pages were restored and rest; they are equal again and must stay as they are.
    std::thread::sleep(Duration::from_secs(1));
    assert!(broken() >= 500);
    for guest in guests {
        let stats = guest.stats();
        assert_eq!(stats.heals_total, 0);
        assert!(stats.merges_total <= COMMON_MIB * PAGES_PER_MIB + 4 * PAGES_PER_MIB + 1024);
        assert!(guest.finish().0.ok);
    }
    drop(pinned);
}
