//! A long pass does not hold back what others give up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, Policy};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{alone, need_userfaultfd};

/// Pages that two VMs share, and that a third has as well.
const SHARED: usize = 2000;
/// Pages of that one: at 1 % of a CPU they take far more than [`PATIENCE`].
const SLOW: usize = 120_000;
/// What others gave up is free within this.
const PATIENCE: Duration = Duration::from_secs(10);

fn serve(store: &StoreThread, name: &str, pages: &Pages, cpu_percent: u32) -> DedupService {
    let config = Config {
        name: name.into(),
        cpu_percent,
        pass_period_ms: 3_600_000,
        huge_policy: Policy::Ksm,
        ..Config::default()
    };
    pages.serve(&store.socket(), config).expect("dedup starts")
}

#[test]
fn what_others_give_up_does_not_wait_for_the_end_of_a_long_pass() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::with_metrics();
    let fast = [Pages::map(SHARED), Pages::map(SHARED)];
    let fill =
        |pages: &Pages, id: u64| (0..pages.count()).for_each(|page| pages.fill(page, id + page as u64));
    fast.iter().for_each(|pages| fill(pages, 1));
    let services = [0, 1].map(|n| serve(&store, &format!("fast-{n}"), &fast[n], 100));
    let pass = || {
        services
            .iter()
            .for_each(|service| _ = service.pass().expect("passes run"))
    };
    while services
        .iter()
        .any(|service| service.stats().pages_mapped < SHARED as u64)
    {
        pass();
    }
    let long = Pages::map(SLOW);
    fill(&long, 1);
    let slow = serve(&store, "slow", &long, 1);
    // What stands still from here on is keyed in the next pass.
    slow.pass().expect("passes run");
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = slow.pass();
            ended.store(true, Ordering::Relaxed);
        });
        // It has found what the others share.
        let found = Instant::now();
        while slow.stats().pages_keyed_total < SHARED as u64 {
            assert!(found.elapsed() < 6 * PATIENCE, "{:?}", slow.stats());
            std::thread::sleep(Duration::from_millis(20));
        }
        fast.iter()
            .zip([1 << 30, 1 << 31])
            .for_each(|(pages, id)| fill(pages, id));
        pass();
        let (start, mut most) = (Instant::now(), 0);
        loop {
            pass();
            let limbo = store.metric("slots_limbo");
            most = limbo.max(most);
            if limbo == 0 && start.elapsed() > PATIENCE / 10 {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{limbo} slots are in limbo");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(most > 0, "nothing waited at all");
        assert!(!ended.load(Ordering::Relaxed), "the pass was not long");
        println!(
            "{most} slots were in limbo at most, none after {:?}",
            start.elapsed()
        );
        slow.pause();
    });
    let wrong = |page: &usize| !long.holds(*page, 1 + *page as u64);
    assert_eq!((0..SLOW).find(wrong), None, "a page is wrong");
    for service in services.into_iter().chain([slow]) {
        service.stop(true).expect("it stops");
    }
}
