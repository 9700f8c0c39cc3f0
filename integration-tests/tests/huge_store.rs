//! Identical huge pages become one huge page of the store.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_dedup::{Breaks, Config, Policy};
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, huge_kib, huge_kib_of_store, wait};
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
        sampling: vmm_dedup::Sampling {
            interval_ms: 1000,
            ..vmm_dedup::Sampling::default()
        },
        huge_policy,
        ..Config::default()
    }
}

/// Every content in each of the huge pages.
fn id(page: usize) -> u64 {
    (page % HUGE_PAGES) as u64 + 1
}

/// Huge pages with every content in each.
fn identical(chunks: usize) -> Pages {
    let pages = Pages::map_huge(chunks * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
    pages
}

fn holds_all(pages: &Pages) -> bool {
    (0..pages.count()).all(|page| pages.holds(page, id(page)))
}

/// Files of stores that are mapped, by their inodes.
fn files(pages: &Pages) -> HashSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let range = pages.address(0)..pages.address(pages.count() - 1) + 4096;
    let inside = |line: &&str| {
        let (start, _) = line.split_once('-').expect("a range");
        range.contains(&usize::from_str_radix(start, 16).expect("an address"))
    };
    let inode = |line: &str| line.split_ascii_whitespace().nth(4).map(str::to_owned);
    let lines = maps.lines().filter(inside);
    lines.filter_map(inode).filter(|inode| inode != "0").collect()
}

/// Reads until that many huge pages of the store are mapped: the store makes them once a second.
fn wait_for_huge_pages(pages: &Pages, count: usize) {
    let start = Instant::now();
    while huge_kib_of_store(pages) != count * HUGE_KIB {
        let kib = huge_kib_of_store(pages);
        assert!(start.elapsed() < Duration::from_secs(20), "{kib} KiB");
        std::thread::sleep(Duration::from_millis(20));
        assert!(holds_all(pages));
    }
    assert_eq!(huge_kib(pages), 0);
}

fn all_share_one_huge_page(policy: Policy) {
    let store = StoreThread::start();
    let pages = identical(CHUNKS);
    huge_pages_or_skip!(&pages);
    let service = pages
        .serve(&store.socket(), config(policy))
        .expect("dedup starts");
    wait(&service, "sharing", |s| s.pages_mapped == pages.count() as u64);
    wait_for_huge_pages(&pages, CHUNKS);
    // Some rounds of a monitor, if there is one, change nothing.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(huge_kib_of_store(&pages), CHUNKS * HUGE_KIB);

    // Who writes has small pages again, the others go on.
    pages.store(HUGE_PAGES + 7, 9, 1);
    for page in 0..pages.count() {
        let same = pages.holds(page, id(page));
        assert_eq!(same, page != HUGE_PAGES + 7, "page {page}");
    }
    assert_eq!(pages.load(HUGE_PAGES + 7, 9), 1);
    assert_eq!(huge_kib_of_store(&pages), (CHUNKS - 1) * HUGE_KIB);
    if policy == Policy::Smartmd {
        // It is sampled as others are now, by four private pages.
        let shared = pages.count() as u64 - 1 - 4;
        wait(&service, "probes", |s| s.pages_mapped == shared);
    }
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

/// Half of the pages repeat: too little for whole huge pages, and no reason to publish the others.
#[test]
fn what_repeats_in_part_stays_huge_if_nothing_is_split() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map_huge(CHUNKS * HUGE_PAGES);
    for page in 0..pages.count() {
        pages.fill(
            page,
            if page % 2 == 0 {
                id(page)
            } else {
                page as u64 + 10_000
            },
        );
    }
    huge_pages_or_skip!(&pages);
    let service = pages
        .serve(&store.socket(), config(Policy::NoSplitting))
        .expect("dedup starts");
    // That many found their twins, and were let go again.
    wait(&service, "looks", |s| {
        s.published_total >= (CHUNKS * HUGE_PAGES / 4) as u64
    });
    let passes = service.stats().passes_total + 20;
    wait(&service, "more of them", |s| s.passes_total >= passes);
    assert_eq!(
        (service.stats().pages_mapped, huge_kib(&pages)),
        (0, CHUNKS * HUGE_KIB)
    );
}

#[test]
fn two_vms_share_huge_pages() {
    need_userfaultfd!();
    two_share(Policy::Ksm);
    two_share(Policy::NoSplitting);
    two_share(Policy::Smartmd);
}

fn two_share(policy: Policy) {
    let store = StoreThread::start();
    let (a, b) = (identical(1), identical(1));
    huge_pages_or_skip!(&a);
    let first = a.serve(&store.socket(), config(policy)).expect("dedup starts");
    let second = b.serve(&store.socket(), config(policy)).expect("dedup starts");
    wait(&first, "sharing", |s| s.pages_mapped == HUGE_PAGES as u64);
    wait(&second, "sharing", |s| s.pages_mapped == HUGE_PAGES as u64);
    wait_for_huge_pages(&a, 1);
    wait_for_huge_pages(&b, 1);
    drop(second);
    assert!(holds_all(&a) && holds_all(&b));
}

/// All of it goes over to the next store, also what would be a probe were it split.
#[test]
fn a_lost_store_takes_nothing_along() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = identical(CHUNKS);
    huge_pages_or_skip!(&pages);
    let service = pages
        .serve(&store.socket(), config(Policy::Smartmd))
        .expect("dedup starts");
    wait_for_huge_pages(&pages, CHUNKS);
    let store = store.restart();
    let most = (CHUNKS * HUGE_PAGES - 4 * CHUNKS) as u64;
    wait(&service, "sharing again", |s| {
        s.pages_mapped >= most && files(&pages).len() == 1
    });
    assert!(holds_all(&pages));
    drop(service);
    drop(store);
}

/// Each page is protected for itself then, and the kernel maps none of them as huge: so probes stay, and what turns hot is
/// built again.
#[test]
fn with_managed_breaks_small_pages_are_shared() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = identical(CHUNKS);
    huge_pages_or_skip!(&pages);
    let config = Config {
        breaks: Breaks::managed(1024, 0),
        ..config(Policy::Smartmd)
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let shared = (CHUNKS * (HUGE_PAGES - 4)) as u64;
    wait(&service, "sharing", |s| s.pages_mapped == shared);
    let (stop, hot) = (AtomicBool::new(false), 0..HUGE_PAGES);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                assert!(hot.clone().all(|page| pages.holds(page, id(page))));
            }
        });
        wait(&service, "a huge page again", |s| s.huge_rebuilt_total > 0);
        stop.store(true, Ordering::Release);
    });
    assert_eq!(huge_kib_of_store(&pages), 0);
    assert!(holds_all(&pages));
    service.stop(true).expect("it stops");
}
