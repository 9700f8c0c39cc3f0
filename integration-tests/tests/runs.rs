//! Runs with private exceptions: one mapping over shared and private pages.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::ThreadId;
use std::time::Duration;
use vmm_dedup::{Breaks, Call, Config, DedupService, Observer, ServiceStats, Site};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;

const PAGES: usize = 4096;
/// Every third page is another one in each guest.
const PERIOD: usize = 3;
/// Pages written at a time.
const BURST: usize = 8;
const SHARED: u64 = (PAGES - PAGES / PERIOD) as u64;

fn is_private(page: usize) -> bool {
    page % PERIOD == PERIOD - 1
}

/// What a page of a guest holds.
fn id(guest: usize, page: usize) -> u64 {
    let number = page as u64 + 1;
    if is_private(page) {
        number + (guest as u64 + 1) * 1_000_000
    } else {
        number
    }
}

struct Guest {
    pages: Pages,
    service: DedupService,
}

fn guests(store: &StoreThread, breaks: Breaks) -> Vec<Guest> {
    (0..2)
        .map(|guest| {
            let pages = Pages::map(PAGES);
            (0..PAGES).for_each(|page| pages.fill(page, id(guest, page)));
            let config = Config {
                name: format!("guest-{guest}"),
                cpu_percent: 100,
                pass_period_ms: 3_600_000,
                breaks,
                ..Config::default()
            };
            let service = pages.serve(&store.socket(), config).expect("dedup starts");
            Guest { pages, service }
        })
        .collect()
}

fn pass_all(guests: &[Guest], passes: usize) -> Vec<ServiceStats> {
    let mut stats = Vec::new();
    for _ in 0..passes {
        stats = guests
            .iter()
            .map(|g| g.service.pass().expect("passes run"))
            .collect();
    }
    stats
}

/// Mappings that a guest's memory consists of.
fn mappings(pages: &Pages) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let inside = pages.address(0)..=pages.address(PAGES - 1);
    let starts = maps
        .lines()
        .filter_map(|line| usize::from_str_radix(line.split('-').next()?, 16).ok());
    starts.filter(|start| inside.contains(start)).count()
}

#[test]
fn scattered_twins_of_one_layout_become_one_mapping() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let guests = guests(&store, Breaks::KERNEL);
    for stats in pass_all(&guests, 16) {
        assert_eq!(stats.pages_mapped, SHARED, "{stats:?}");
        // Where one message to the store ends and the next begins, the layout may have a seam.
        let exceptions = PAGES as u64 - SHARED - stats.pages_unshared;
        assert_eq!(stats.pages_broken, exceptions, "{stats:?}");
        assert!(stats.pages_unshared <= 16, "{stats:?}");
        assert!(stats.vmas <= 40, "{} mappings", stats.vmas);
    }
    for guest in &guests {
        let mappings = mappings(&guest.pages);
        assert!(mappings <= 40, "{mappings} mappings");
    }
    for (n, guest) in guests.iter().enumerate() {
        assert!((0..PAGES).all(|page| guest.pages.holds(page, id(n, page))));
    }
    // Both kinds can be written, and neither write shows in the other guest.
    for page in 0..PAGES {
        guests[0].pages.fill(page, 7_000_000 + page as u64);
    }
    pass_all(&guests, 20);
    for page in 0..PAGES {
        assert!(guests[0].pages.holds(page, 7_000_000 + page as u64));
        assert!(guests[1].pages.holds(page, id(1, page)));
    }
    for guest in guests {
        let stats = guest.service.stop(true).expect("it stops");
        assert_eq!(stats.pages_mapped, 0);
    }
}

/// What needs memory may wait for reclaim, and then whoever waits for a page that is away waits as well.
#[test]
fn runs_are_built_before_pages_are_taken() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let guests = guests(&store, Breaks::KERNEL);
    let (tell, told) = mpsc::channel();
    let observer = Observer::begin(move |site: Site| _ = tell.send((std::thread::current().id(), site)));
    pass_all(&guests, 16);
    drop(observer);
    let calls: Vec<(ThreadId, Site)> = told.into_iter().collect();
    let of_window = |site: &Site| site.file.ends_with("window/mod.rs");
    let of_builder = |site: &Site| site.file.ends_with("merge/run_builder.rs");
    // Threads that hold pages.
    let mut away = HashSet::new();
    let (mut built, mut moved) = (0, 0);
    for (thread, site) in calls {
        match site.call {
            Call::Move if of_window(&site) => _ = away.insert(thread),
            Call::Wake if of_window(&site) => _ = away.remove(&thread),
            Call::Remap if away.contains(&thread) => moved += 1,
            Call::MapAnonymous | Call::Populate | Call::PopulateRead => {
                assert!(!away.contains(&thread), "{site}, while pages are away");
            }
            _ if of_builder(&site) => {
                assert!(!away.contains(&thread), "{site}, while pages are away");
                built += u64::from(site.call == Call::Copy);
            }
            _ => {}
        }
    }
    assert!(
        built > 0 && moved > 0,
        "{built} places were made, {moved} runs moved"
    );
    for (n, guest) in guests.into_iter().enumerate() {
        guest.service.stop(true).expect("it stops");
        assert!((0..PAGES).all(|page| guest.pages.holds(page, id(n, page))));
    }
}

#[test]
fn managed_breaks_make_no_exceptions() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let breaks = Breaks::managed(64, 0);
    let guests = guests(&store, breaks);
    for stats in pass_all(&guests, 16) {
        assert_eq!((stats.pages_mapped, stats.pages_broken), (SHARED, 0), "{stats:?}");
    }
}

#[test]
fn writers_lose_nothing_while_exceptions_are_made_around_them() {
    need_userfaultfd!();
    let store = StoreThread::start();
    for round in 0..4u64 {
        let guests = guests(&store, Breaks::KERNEL);
        let stop = AtomicBool::new(false);
        let counts: Vec<u64> = std::thread::scope(|scope| {
            let writers: Vec<_> = guests
                .iter()
                .map(|guest| scope.spawn(|| write_and_restore(&guest.pages, round, &stop)))
                .collect();
            for _ in 0..40 {
                pass_all(&guests, 1);
                std::thread::sleep(Duration::from_millis(3));
            }
            stop.store(true, Ordering::Release);
            writers
                .into_iter()
                .map(|w| w.join().expect("no write is lost"))
                .collect()
        });
        for (n, guest) in guests.into_iter().enumerate() {
            let stats = guest.service.stop(round % 2 == 0).expect("it stops");
            assert!(counts[n] > 0 && stats.merges_total > 0, "{stats:?}");
            assert!(stats.pages_broken > 0, "no exception was made: {stats:?}");
            for page in 0..PAGES {
                assert!(guest.pages.holds(page, id(n, page)), "page {page} of guest {n}");
            }
        }
    }
}

/// Writes a few pages at a time, looks whether that is there a moment later, and puts back what was there, so that pages
/// soon are what they were.
fn write_and_restore(pages: &Pages, seed: u64, stop: &AtomicBool) -> u64 {
    let mut total = 0;
    let mut state = seed + 1;
    let mut counters = vec![0u64; PAGES];
    while !stop.load(Ordering::Acquire) {
        let burst: Vec<(usize, u64)> = (0..BURST)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let page = usize::try_from(state >> 40).expect("24 bits") % PAGES;
                (page, pages.load(page, 0))
            })
            .collect();
        for (page, _) in &burst {
            counters[*page] = counters[*page].wrapping_add(state | 1);
            pages.store(*page, 0, counters[*page]);
        }
        std::thread::sleep(Duration::from_micros(state >> 56));
        for (page, _) in &burst {
            assert_eq!(
                pages.load(*page, 0),
                counters[*page],
                "a write to page {page} was lost"
            );
        }
        for (page, before) in burst.iter().rev() {
            pages.store(*page, 0, *before);
        }
        std::thread::sleep(Duration::from_micros(500));
        total += BURST as u64;
    }
    total
}
