//! Content that fills long stretches: many pages of one content in few mappings.

use std::sync::atomic::{AtomicBool, Ordering};
use vmm_dedup::{Config, DedupService, Policy, ServiceStats};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::SERIES;

const PAGES: usize = 4096;
/// What most pages hold.
const POISON: u64 = 0xcccc;
/// Every page of this many is another one.
const PERIOD: usize = 600;

fn id(guest: usize, page: usize) -> u64 {
    match page % PERIOD {
        0 => ((guest * PAGES + page) as u64 + 1) << 20,
        _ => POISON,
    }
}

struct Guest {
    pages: Pages,
    service: DedupService,
}

fn start(store: &StoreThread, pages: Pages, guest: usize) -> Guest {
    (0..PAGES).for_each(|page| pages.fill(page, id(guest, page)));
    let config = Config {
        name: format!("guest-{guest}"),
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        // What is merged depends on passes, not on time.
        huge_policy: Policy::Ksm,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    Guest { pages, service }
}

fn pass_all(guests: &[Guest], passes: usize) -> Vec<ServiceStats> {
    let pass = |g: &Guest| g.service.pass().expect("passes run");
    let mut stats = Vec::new();
    for _ in 0..passes {
        stats = guests.iter().map(pass).collect();
    }
    stats
}

fn poisoned() -> u64 {
    (PAGES - PAGES.div_ceil(PERIOD)) as u64
}

#[test]
fn stretches_of_one_content_take_few_mappings() {
    need_userfaultfd!();
    for huge in [false, true] {
        let store = StoreThread::start();
        let map = if huge { Pages::map_huge } else { Pages::map };
        let guests: Vec<Guest> = (0..2).map(|n| start(&store, map(PAGES), n)).collect();
        for stats in pass_all(&guests, 16) {
            assert_eq!(stats.pages_mapped, poisoned(), "{stats:?}");
            // A mapping for each series' worth of pages, and some where stretches and messages begin and end.
            let most = poisoned() / u64::from(SERIES) + 80;
            assert!(stats.vmas <= most, "{} mappings, huge pages: {huge}", stats.vmas);
        }
        // What is written in one guest shows there alone.
        for page in (0..PAGES).step_by(7) {
            guests[0].pages.fill(page, 5_000_000 + page as u64);
        }
        pass_all(&guests, 20);
        for page in 0..PAGES {
            let written = page % 7 == 0;
            let expected = if written {
                5_000_000 + page as u64
            } else {
                id(0, page)
            };
            assert!(guests[0].pages.holds(page, expected), "page {page}");
            assert!(guests[1].pages.holds(page, id(1, page)), "page {page}");
        }
        // Whoever made the series goes; the other one's pages stay shared, and whole.
        let mut guests = guests.into_iter();
        let (first, second) = (guests.next().expect("two"), guests.next().expect("two"));
        assert_eq!(first.service.stop(true).expect("it stops").pages_mapped, 0);
        let stats = pass_all(std::slice::from_ref(&second), 8).remove(0);
        assert_eq!(stats.pages_mapped, poisoned(), "{stats:?}");
        second.service.stop(true).expect("it stops");
        assert!((0..PAGES).all(|page| second.pages.holds(page, id(1, page))));
    }
}

#[test]
fn writers_lose_nothing_while_series_are_made_and_left() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let guests: Vec<Guest> = (0..2).map(|n| start(&store, Pages::map(PAGES), n)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (n, guest) in guests.iter().enumerate() {
            let (pages, stop) = (guest.pages, &stop);
            scope.spawn(move || {
                let mut at = n;
                while !stop.load(Ordering::Acquire) {
                    at = (at * 5 + 1) % PAGES;
                    pages.fill(at, 9_000_000 + at as u64);
                    std::thread::yield_now();
                    assert!(
                        pages.holds(at, 9_000_000 + at as u64),
                        "a write to page {at} is lost"
                    );
                    pages.fill(at, id(n, at));
                    assert!(pages.holds(at, id(n, at)), "a write to page {at} is lost");
                }
            });
        }
        for _ in 0..60 {
            pass_all(&guests, 1);
            std::thread::sleep(std::time::Duration::from_millis(3));
        }
        stop.store(true, Ordering::Release);
    });
    for (n, guest) in guests.into_iter().enumerate() {
        let stats = guest.service.stop(true).expect("it stops");
        assert!(stats.merges_total > 0, "{stats:?}");
        assert!((0..PAGES).all(|page| guest.pages.holds(page, id(n, page))));
    }
}
