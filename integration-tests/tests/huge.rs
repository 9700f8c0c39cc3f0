//! Huge pages: busy ones stay, cold ones with twins are split.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::Config;
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, huge_kib};
use vmm_dedup_integration_tests::huge_pages_or_skip;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;

const CHUNKS: usize = 16;
/// The first half is written all the time; the third quarter is unique and cold, the last has twins.
const BUSY: usize = CHUNKS / 2;
const COLD: usize = CHUNKS * 3 / 4;

#[test]
fn huge_pages_of_a_busy_guest_stay_huge() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map_huge(CHUNKS * HUGE_PAGES);
    for page in 0..pages.count() {
        let id = if page < COLD * HUGE_PAGES {
            page as u64 + 1000
        } else {
            page as u64 % 256 + 1
        };
        pages.fill(page, id);
    }
    let before = huge_kib(&pages);
    huge_pages_or_skip!(&pages);
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 20,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let stop = AtomicBool::new(false);
    // Four pages of each stay private, to sample its use.
    let twins = ((CHUNKS - COLD) * (HUGE_PAGES - 4)) as u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Words all over the page, so that some lie in its key lines.
            for n in 0usize.. {
                for page in 0..BUSY * HUGE_PAGES {
                    pages.store(page, (page * 7 + n * 24) % 512, n as u64);
                }
                if stop.load(Ordering::Acquire) {
                    break;
                }
            }
        });
        let start = Instant::now();
        while service.stats().pages_mapped < twins {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "not merged: {:?}",
                service.stats()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Release);
    });
    let after = huge_kib(&pages);
    assert_eq!(
        after,
        COLD * 2048,
        "busy and unique huge pages must stay: {before} KiB before, {after} KiB after"
    );
    service.stop(true).expect("it stops");
}
