//! Pages that the kernel copied on write are merged again.

use io_uring::{IoUring, opcode, types};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Call, Config, DedupService, Injection, ServiceStats, Times};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::pinned::Pinned;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{alone, need_userfaultfd};

const PAGES: usize = 4096;
/// Pages of an extent, 256 KiB.
const EXTENT: usize = 64;
/// Passes that are enough for a page to be found copied, keyed twice, sighted, published and merged.
const ENOUGH: usize = 64;

/// Time for forks of this process, which has all guests' memory.
const FORKS_US: u64 = 200_000;

fn config(name: &str) -> Config {
    Config {
        name: name.into(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        breaks: Breaks::Kernel {
            heal_stall_us: FORKS_US,
            heal_without_fork: true,
        },
        ..Config::default()
    }
}

struct Guest {
    pages: Pages,
    service: DedupService,
}

fn guests(store: &StoreThread, count: usize, config: impl Fn(&str) -> Config) -> Vec<Guest> {
    let guest = |n: usize| {
        let pages = Pages::map(PAGES);
        (0..PAGES).for_each(|page| pages.fill(page, page as u64 + 1));
        let service = pages
            .serve(&store.socket(), config(&format!("guest-{n}")))
            .expect("dedup starts");
        service.vouch_for_pins();
        Guest { pages, service }
    };
    (0..count).map(guest).collect()
}

fn pass_all(guests: &[Guest]) -> Vec<ServiceStats> {
    let pass = |guest: &Guest| guest.service.pass().expect("passes run");
    guests.iter().map(pass).collect()
}

/// Passes until every guest says so; the last account of each.
fn pass_until(guests: &[Guest], done: impl Fn(&ServiceStats) -> bool) -> Vec<ServiceStats> {
    let start = Instant::now();
    let mut passes = 0;
    loop {
        let stats = pass_all(guests);
        passes += 1;
        if stats.iter().all(&done) {
            return stats;
        }
        // On a busy machine the kernel may be slow to tell of pins, pass after pass.
        let long = start.elapsed() > Duration::from_secs(60);
        if long && (passes >= 4 * ENOUGH || start.elapsed() > Duration::from_secs(120)) {
            let explain = |guest: &Guest| guest.service.explain(None).expect("it explains");
            let why: Vec<_> = guests.iter().map(explain).collect();
            panic!("{why:?} {stats:?}");
        }
    }
}

fn mappings(pages: &Pages) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let inside = pages.address(0)..=pages.address(PAGES - 1);
    let starts = maps
        .lines()
        .filter_map(|line| usize::from_str_radix(line.split('-').next()?, 16).ok());
    starts.filter(|start| inside.contains(start)).count()
}

#[test]
fn extents_that_are_replaced_again_and_again_stay_shared() {
    need_userfaultfd!();
    let _alone = alone();
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::start();
    let guests = guests(&store, 3, config);
    let all = |stats: &ServiceStats| stats.pages_mapped == PAGES as u64;
    pass_until(&guests, all);
    let mut ids: Vec<u64> = (1..=PAGES as u64).collect();
    for round in 1..=12u64 {
        let first = usize::try_from(round % 4).expect("small") * EXTENT;
        let replaced = (0..PAGES).filter(|page| page % (4 * EXTENT) / EXTENT * EXTENT == first);
        for page in replaced {
            ids[page] = round << 32 | page as u64;
            guests.iter().for_each(|guest| guest.pages.fill(page, ids[page]));
        }
        let stats = pass_until(&guests, |stats| {
            // A copy whose file went meanwhile came home, and was merged as any private page.
            all(stats) && stats.merges_total >= (4 + round) * PAGES as u64 / 4 && stats.heals_total > 0
        });
        for guest in &guests {
            assert!(
                (0..PAGES).all(|page| guest.pages.holds(page, ids[page])),
                "round {round}"
            );
        }
        let vmas = stats.iter().map(|stats| stats.vmas).max();
        assert!(
            vmas <= Some(3 * PAGES as u64 / EXTENT as u64),
            "{vmas:?} mappings"
        );
    }
    for guest in guests {
        let mappings = mappings(&guest.pages);
        assert!(mappings <= 2 * PAGES / EXTENT, "{mappings} mappings");
        let stats = guest.service.stop(true).expect("it stops");
        assert_eq!((stats.pages_mapped, stats.pages_broken), (0, 0));
        assert!((0..PAGES).all(|page| guest.pages.holds(page, ids[page])));
    }
}

/// Guests of which one was written; and what keeps their copies private.
fn write_all(guests: &[Guest], id: impl Fn(usize) -> u64) {
    for guest in guests {
        (0..PAGES).for_each(|page| guest.pages.fill(page, id(page)));
    }
}

fn with_breaks(breaks: Breaks) -> impl Fn(&str) -> Config {
    move |name| Config {
        breaks,
        ..config(name)
    }
}

#[test]
fn while_pages_are_pinned_a_fork_tells_and_without_a_budget_for_it_copies_stay() {
    need_userfaultfd!();
    let _alone = alone();
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::start();
    let pinned = Pinned::page();
    for heal_stall_us in [FORKS_US, 0] {
        let breaks = Breaks::Kernel {
            heal_stall_us,
            heal_without_fork: true,
        };
        let guests = guests(&store, 2, with_breaks(breaks));
        pass_until(&guests, |stats| stats.pages_mapped == PAGES as u64);
        let published = |guest: &Guest| guest.service.stats().published_total;
        let before: u64 = guests.iter().map(published).sum();
        write_all(&guests, |page| 77_000_000 + page as u64);
        if heal_stall_us > 0 {
            pass_until(&guests, |stats| {
                stats.pages_mapped == PAGES as u64 && stats.heals_total > 0
            });
        } else {
            (0..ENOUGH).for_each(|_| drop(pass_all(&guests)));
            let after: u64 = guests.iter().map(published).sum();
            assert_eq!(after, before, "a slot was made that nobody can map");
            for guest in &guests {
                let stats = guest.service.stats();
                assert_eq!(
                    (stats.pages_broken, stats.heals_total),
                    (PAGES as u64, 0),
                    "{stats:?}"
                );
                let (explanation, why) = guest.service.explain(None).expect("it explains");
                assert_eq!(
                    (explanation.may_be_pinned, explanation.heals),
                    (PAGES as u64, 0),
                    "{explanation:?}"
                );
                assert!(
                    why.contains("registered buffers") && why.contains("heal_stall_us"),
                    "{why}"
                );
            }
        }
        for guest in guests {
            assert!((0..PAGES).all(|page| guest.pages.holds(page, 77_000_000 + page as u64)));
            guest.service.stop(true).expect("it stops");
        }
    }
    drop(pinned);
}

#[test]
fn while_no_page_of_the_host_is_pinned_no_fork_is_needed() {
    need_userfaultfd!();
    let _alone = alone();
    vmm_dedup::share_whatever_it_costs(true);
    if std::fs::File::open("/proc/sys/vm/stat_refresh").is_err() {
        assert!(std::env::var_os("CI").is_none(), "no count of pinned pages in CI");
        return eprintln!("SKIPPED: the kernel's count of pinned pages cannot be read");
    }
    let store = StoreThread::start();
    for breaks in [
        Breaks::Kernel {
            heal_stall_us: 0,
            heal_without_fork: false,
        },
        Breaks::Managed {
            reserve_pages: 1024,
            floor_bytes: 0,
            heal_stall_us: 0,
            heal_without_fork: false,
        },
    ] {
        let guests = guests(&store, 2, with_breaks(breaks));
        pass_until(&guests, |stats| stats.pages_mapped == PAGES as u64);
        let managed = matches!(breaks, Breaks::Managed { .. });
        let id = |page: usize| 66_000_000 + page as u64;
        // With managed breaks the kernel copies what the service cannot.
        let copied = managed.then(|| Injection::begin(Call::Remap, libc::ENOMEM, Times::Always));
        write_all(&guests, id);
        drop(copied);
        let stats = pass_until(&guests, |stats| {
            stats.pages_mapped == PAGES as u64 && stats.heals_total > 0
        });
        assert!(stats.iter().all(|stats| stats.pages_broken == 0), "{stats:?}");
        for guest in guests {
            assert!((0..PAGES).all(|page| guest.pages.holds(page, id(page))));
            guest.service.stop(true).expect("it stops");
        }
    }
}

/// What fails, with what errno, and what `explain` says then.
const FAILURES: [(Call, i32, &str); 3] = [
    (Call::Fork, libc::EAGAIN, "cannot fork"),
    (Call::Fork, libc::ENOMEM, "cannot fork"),
    (Call::PagemapRead, libc::EIO, "the page tables cannot be read"),
];

#[test]
fn when_nothing_tells_of_pins_no_page_changes_and_it_is_tried_again() {
    need_userfaultfd!();
    let _alone = alone();
    vmm_dedup::share_whatever_it_costs(true);
    let pinned = Pinned::page();
    for (call, errno, says) in FAILURES {
        let store = StoreThread::start();
        let guests = guests(&store, 2, config);
        pass_until(&guests, |stats| stats.pages_mapped == PAGES as u64);
        let id = |page: usize| 88_000_000 + page as u64;
        let injection = Injection::begin(call, errno, Times::Always);
        write_all(&guests, id);
        // One publishes, and fails to merge what it has published.
        let fails = |guest: &Guest| guest.service.stats().heal_failed_total > 0;
        pass_until(&guests, |_| guests.iter().any(fails));
        for guest in &guests {
            let stats = guest.service.stats();
            assert_eq!(stats.heals_total, 0, "{call:?}");
            // Nobody had to wait for what was never frozen.
            assert_eq!(
                stats.heal.count() > 0,
                call != Call::Fork && stats.heal_failed_total > 0,
                "{call:?}"
            );
        }
        let tries = injection.failed();
        (0..ENOUGH / 2).for_each(|_| drop(pass_all(&guests)));
        assert!(
            injection.failed() <= tries + 1,
            "{call:?}: {tries} tries, then {}",
            injection.failed()
        );
        let why = |guest: &Guest| guest.service.explain(None).expect("it explains").1;
        let why: Vec<String> = guests.iter().map(why).collect();
        assert!(why.iter().any(|why| why.contains(says)), "{call:?}: {why:?}");
        for guest in &guests {
            assert!((0..PAGES).all(|page| guest.pages.holds(page, id(page))));
        }
        drop(injection);
        pass_until(&guests, |stats| {
            stats.pages_mapped == PAGES as u64 && stats.heals_total > 0
        });
        for guest in guests {
            assert!((0..PAGES).all(|page| guest.pages.holds(page, id(page))));
            guest.service.stop(true).expect("it stops");
        }
    }
    drop(pinned);
}

/// Passes of a window in which merges are counted: several times what sharing must last to pay.
const WINDOW: usize = 128;
/// One page in so many is written, whenever it may have become shared again.
const RESTLESS: usize = 16;

#[test]
fn pages_that_never_rest_are_shared_ever_more_rarely_and_their_neighbours_stay_shared() {
    need_userfaultfd!();
    let _alone = alone();
    vmm_dedup::share_whatever_it_costs(false);
    let store = StoreThread::start();
    let kernel = config("").breaks;
    for breaks in [kernel, Breaks::managed(2048, 0)] {
        let guests = guests(&store, 2, with_breaks(breaks));
        let all = |stats: &ServiceStats| stats.pages_mapped == PAGES as u64;
        pass_until(&guests, all);
        let restless = PAGES / RESTLESS;
        let pass = |number: usize| {
            if number.is_multiple_of(3) {
                (0..PAGES)
                    .step_by(RESTLESS)
                    .for_each(|page| guests[0].pages.fill(page, page as u64 + 1));
            }
            pass_all(&guests).swap_remove(0)
        };
        let mut merges = Vec::new();
        for _ in 0..4 {
            let before = guests[0].service.stats().merges_total;
            for number in 0..WINDOW {
                let stats = pass(number);
                assert!(stats.pages_mapped >= (PAGES - restless) as u64, "{stats:?}");
            }
            merges.push((guests[0].service.stats().merges_total - before) / restless as u64);
        }
        // Found again at once they would be shared in every 16th pass, or in every fourth.
        assert!(merges[0] > 0 && merges[0] <= 4, "{merges:?}");
        assert!(merges[2] + merges[3] <= 2, "{merges:?}");
        // How many of them are shared at one moment is chance.
        let most_rest_not = (0..WINDOW).any(|number| {
            let stats = pass(number);
            let (explanation, _) = guests[0].service.explain(None).expect("it explains");
            assert_eq!(explanation.restless, stats.pages_restless);
            explanation.restless >= restless as u64 / 2
        });
        let stats = guests[0].service.stats();
        assert!(most_rest_not, "{stats:?}");
        assert!(stats.breaks_early_total >= 3 * restless as u64, "{stats:?}");
        // Once they rest they are shared again, after the longest pause at most.
        let shared = (0..600).position(|_| pass_all(&guests).iter().all(all));
        assert!(shared.is_some(), "{:?}", guests[0].service.stats());
        for guest in guests {
            assert!((0..PAGES).all(|page| guest.pages.holds(page, page as u64 + 1)));
            guest.service.stop(true).expect("it stops");
        }
    }
}

#[test]
#[allow(unsafe_code)] // a read into a registered buffer
fn a_read_into_a_buffer_that_is_not_registered_any_more_arrives() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let breaks = Breaks::Kernel {
        heal_stall_us: 0,
        heal_without_fork: true,
    };
    let guests = guests(&store, 2, with_breaks(breaks));
    pass_until(&guests, |stats| stats.pages_mapped == PAGES as u64);
    let id = |page: usize| 55_000_000 + page as u64;
    write_all(&guests, id);
    let (from, mut into) = std::io::pipe().expect("a pipe");
    let mut ring = IoUring::new(4).expect("io_uring");
    let at = guests[0].pages.address(0) as *mut u8;
    let buffer = libc::iovec {
        iov_base: at.cast(),
        iov_len: vmm_dedup_protocol::PAGE_SIZE,
    };
    // SAFETY: the page is never unmapped, and only accessed through raw pointers.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.expect("buffers are registered");
    let read = opcode::ReadFixed::new(types::Fd(from.as_raw_fd()), at, 8, 0)
        .offset(u64::MAX)
        .build();
    // SAFETY: the buffer is registered and stays mapped.
    unsafe { ring.submission().push(&read) }.expect("the ring has room");
    ring.submit().expect("it is submitted");
    ring.submitter()
        .unregister_buffers()
        .expect("buffers are unregistered");
    (0..ENOUGH / 2).for_each(|_| drop(pass_all(&guests)));
    let why = guests[0].service.explain(None).expect("it explains").1;
    assert!(why.contains("io_uring"), "{why}");
    into.write_all(&0x5555_u64.to_ne_bytes())
        .expect("the pipe takes it");
    ring.submit_and_wait(1).expect("the read is done");
    assert_eq!(guests[0].pages.load(0, 0), 0x5555);
    drop(ring);
    for guest in guests {
        guest.service.stop(true).expect("it stops");
        assert!((1..PAGES).all(|page| guest.pages.holds(page, id(page))));
    }
}
