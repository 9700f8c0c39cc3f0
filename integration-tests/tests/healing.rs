//! Pages that the kernel copied on write are merged again.

use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, ServiceStats};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;

const PAGES: usize = 4096;
/// Pages of an extent, 256 KiB.
const EXTENT: usize = 64;
/// Passes that are enough for a page to be found copied, keyed twice, sighted, published and merged.
const ENOUGH: usize = 64;

fn config(name: &str) -> Config {
    Config {
        name: name.into(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        pins_are_visible: true,
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
        assert!(
            passes < 4 * ENOUGH && start.elapsed() < Duration::from_secs(120),
            "{stats:?}"
        );
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
            all(stats) && stats.heals_total >= round * PAGES as u64 / 4
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
