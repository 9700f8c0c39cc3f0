//! Identical huge pages become one huge page of the store.

use std::time::{Duration, Instant};

use vmm_dedup::{Config, DedupService, Policy, ServiceStats};
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, huge_kib, huge_kib_of_store};
use vmm_dedup_integration_tests::huge_pages_or_skip;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;

const CHUNKS: usize = 4;
const HUGE_KIB: usize = 2048;

fn config(huge_policy: Policy) -> Config {
    Config {
        cpu_percent: 100,
        pass_period_ms: 10,
        monitor_interval_ms: 100,
        huge_policy,
        ..Config::default()
    }
}

/// Every content in each of the huge pages.
fn id(page: usize) -> u64 {
    (page % HUGE_PAGES) as u64 + 1
}

fn wait(service: &DedupService, what: &str, mut done: impl FnMut(&ServiceStats) -> bool) {
    let start = Instant::now();
    while !done(&service.stats()) {
        let stats = service.stats();
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: {stats:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn all_share_one_huge_page(policy: Policy) {
    let store = StoreThread::start();
    let pages = Pages::map_huge(CHUNKS * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
    huge_pages_or_skip!(&pages);
    let service = pages
        .serve(&store.socket(), config(policy))
        .expect("dedup starts");
    wait(&service, "sharing", |s| s.pages_mapped == pages.count() as u64);
    (0..pages.count()).for_each(|page| assert!(pages.holds(page, id(page)), "page {page}"));
    assert_eq!(
        (huge_kib(&pages), huge_kib_of_store(&pages)),
        (0, CHUNKS * HUGE_KIB),
        "{policy}"
    );

    // Who writes has small pages again, the others go on.
    pages.store(HUGE_PAGES + 7, 9, 1);
    for page in 0..pages.count() {
        let same = pages.holds(page, id(page));
        assert_eq!(same, page != HUGE_PAGES + 7, "page {page}");
    }
    assert_eq!(pages.load(HUGE_PAGES + 7, 9), 1);
    assert_eq!(huge_kib_of_store(&pages), (CHUNKS - 1) * HUGE_KIB);
    service.stop(true).expect("it stops");
    assert_eq!(huge_kib_of_store(&pages), 0);
    assert!((0..pages.count()).all(|page| page == HUGE_PAGES + 7 || pages.holds(page, id(page))));
}

#[test]
fn whatever_is_split_for_sharing() {
    need_userfaultfd!();
    all_share_one_huge_page(Policy::Ksm);
}

#[test]
fn nothing_is_split() {
    need_userfaultfd!();
    all_share_one_huge_page(Policy::NoSplitting);
}

/// No page is kept private to sample the use of such a huge page.
#[test]
fn what_is_cold_is_split() {
    need_userfaultfd!();
    all_share_one_huge_page(Policy::Smartmd);
}
