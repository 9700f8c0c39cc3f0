//! What sharing securely saves is told as it is, and who touches much keeps less there.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)] // a few pages

use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, Pack};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::{Observer, Vm};

const PATIENCE: Duration = Duration::from_secs(120);

fn config(touches_per_second: u64) -> Config {
    Config {
        pass_period_ms: 20,
        cpu_percent: 100,
        pack: Pack {
            idle_ms: 40,
            touches_per_second,
            ..Pack::default()
        },
        ..Config::default()
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kept(service: &DedupService) -> usize {
    service.stats().packing.pages as usize
}

/// The account of a store that has all pages of one VM.
fn account(count: usize, id: impl Fn(usize) -> u64) -> (StoreStats, Vm) {
    let store = StoreThread::secure();
    let pages = Pages::map(count);
    (0..count).for_each(|page| pages.fill(page, id(page)));
    let service = pages.serve(&store.socket(), config(1000)).expect("dedup starts");
    wait_until("taking part", || kept(&service) == count);
    let mut observer = Observer::connect(&store.socket()).expect("the store answers");
    let mut told = None;
    wait_until("the account", || {
        let (stats, mut vms) = observer.stats().expect("the store answers");
        let vm = vms.remove(0);
        let is_whole = vm.stats.packing.pages as usize == count;
        told = Some((stats, vm));
        is_whole
    });
    let right = |page: usize| pages.holds(page, id(page));
    assert!((0..count).all(right), "a page is wrong");
    service.stop(true).expect("it stops");
    told.expect("an account")
}

fn saved(stats: &StoreStats) -> i64 {
    stats.saved_net_bytes.cast_signed()
}

/// 32 MiB.
const COUNT: usize = 8192;
const BYTES: i64 = (COUNT * PAGE_SIZE) as i64;
/// More than the service, its mappings and the store's tables take, and slots that pages were copied to which the store had
/// already: they are taken for the next pages.
const OVERHEAD: i64 = 12 << 20;

#[test]
fn pages_that_nobody_else_has_save_nothing() {
    need_userfaultfd!();
    let (stats, vm) = account(COUNT, |page| page as u64 + 1);
    eprintln!("{} {stats:?}", saved(&stats));
    assert_eq!((stats.pages_shared, stats.pages_sharing), (COUNT as u64, 0));
    assert!(stats.resident_bytes.cast_signed() >= BYTES);
    assert!((-OVERHEAD..0).contains(&saved(&stats)), "{}", saved(&stats));
    assert!((vm.saved_net_bytes - saved(&stats)).abs() < 8, "{vm:?}");
}

#[test]
fn pages_of_zeros_save_all_but_one() {
    need_userfaultfd!();
    let (stats, vm) = account(COUNT, |_| 0);
    eprintln!("{} {stats:?}", saved(&stats));
    assert_eq!((stats.pages_shared, stats.pages_sharing), (1, COUNT as u64 - 1));
    let most = BYTES - PAGE_SIZE as i64;
    assert!(
        (most - OVERHEAD..most).contains(&saved(&stats)),
        "{}",
        saved(&stats)
    );
    assert!((vm.saved_net_bytes - saved(&stats)).abs() < 8, "{vm:?}");
    assert_eq!(
        vm.stats.pages_zero, 0,
        "they are the store's, not the kernel's page"
    );
}

/// How long pages that are new wait, after a guest has touched 200 of those that lay in the store.
fn waits(touches_per_second: u64) -> Duration {
    const TOUCHED: usize = 200;
    const ALL: usize = TOUCHED + 100;
    let store = StoreThread::secure();
    let pages = Pages::map(ALL);
    (0..TOUCHED).for_each(|page| pages.fill(page, page as u64 + 1));
    let service = pages
        .serve(&store.socket(), config(touches_per_second))
        .expect("dedup starts");
    wait_until("taking part", || kept(&service) == TOUCHED);
    let before = service.stats().packing.packs_total;
    assert!((0..TOUCHED).all(|page| pages.holds(page, page as u64 + 1)));
    let start = Instant::now();
    service.pass().expect("a pass");
    (TOUCHED..ALL).for_each(|page| pages.fill(page, page as u64 + 1));
    wait_until("taking part again", || {
        service.stats().packing.packs_total > before
    });
    let waited = start.elapsed();
    wait_until("all taking part", || kept(&service) == ALL);
    service.stop(true).expect("it stops");
    waited
}

#[test]
fn who_touches_more_than_the_budget_keeps_no_further_pages_there() {
    need_userfaultfd!();
    let (little, much) = (waits(20), waits(1000));
    eprintln!("20 touches a second: {little:?}; 1000: {much:?}");
    // The bucket has 200, and loses 20 a second until it has 20.
    assert!(little >= Duration::from_secs(8), "{little:?}");
    assert!(much < little / 2, "{much:?}");
}
