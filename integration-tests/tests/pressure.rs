//! Managed copy-on-write with nothing left: the writer waits, nobody dies.

use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;

const PAGES: usize = 512;
const RESERVE: usize = 16;

#[test]
fn a_writer_waits_for_the_reserve_and_goes_on_when_there_is_one() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    (0..PAGES).for_each(|page| pages.fill(page, 5));
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        breaks: Breaks::managed(RESERVE, 0),
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    while service.pass().expect("a pass").pages_mapped < PAGES as u64 {}
    while service.pass().expect("a pass").reserve_pages < RESERVE as u64 {}
    service.set_reserve(RESERVE, u64::MAX); // as if the host had no memory left

    let writer = std::thread::spawn(move || (0..PAGES).for_each(|page| pages.store(page, 9, page as u64)));
    let start = Instant::now();
    let mut stats = service.pass().expect("a pass");
    while stats.waiting_writers == 0 {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "nobody waits: {stats:?}"
        );
        stats = service.pass().expect("a pass");
    }
    std::thread::sleep(Duration::from_millis(200));
    let stats = service.pass().expect("a pass");
    assert!(!writer.is_finished(), "the writer went on without a page");
    assert!(stats.reserve_waits_total > 0);
    assert_eq!(
        (stats.reserve_pages, stats.breaks_managed_total),
        (0, RESERVE as u64)
    );

    service.set_reserve(RESERVE, 0);
    writer.join().expect("the writer ends");
    let stats = service.pass().expect("a pass");
    // What was broken ahead of the writer may have been merged again before he came.
    let breaks = stats.breaks_managed_total;
    assert!(
        (PAGES as u64..=(PAGES + RESERVE) as u64).contains(&breaks),
        "{stats:?}"
    );
    for page in 0..PAGES {
        assert_eq!(
            (pages.load(page, 9), pages.load(page, 10)),
            (page as u64, expected(10)),
            "page {page}"
        );
    }
    service.stop(true).expect("it stops");
}

fn expected(word: u64) -> u64 {
    5u64.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_mul(word * 2 + 1)
}
