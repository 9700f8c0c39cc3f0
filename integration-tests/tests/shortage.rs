//! Shortages as the kernel makes them: a swap device that fails, swap that is full, a limit on memory, no mappings left. Guests
//! that write and check their memory all the time go on with the right bytes.

use std::sync::mpsc;
use std::time::{Duration, Instant};
use vmm_dedup::{Call, Config, DedupService, Observer, ServiceStats, Site};
use vmm_dedup_integration_tests::guests::Size;
use vmm_dedup_integration_tests::logged::Logged;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::segments::Segments;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::{huge_chaos, need_kvm, need_userfaultfd, swap_chaos};
use vmm_dedup_trouble::{MemoryGroup, Swap, UsedUp, Watchdog, or_skip, page_out, swap_or_skip, swapped_out};

const SIZE: Size = Size {
    merges: 3000,
    patience: Duration::from_secs(120),
    common_mib: 8,
    zero_mib: 4,
};

/// With little memory there may be no huge page that is built again, and none is asked for in the end.
const LEAST: swap_chaos::AtLeast = swap_chaos::AtLeast {
    rebuilt: 1,
    samples: 1,
    within: Duration::from_secs(20),
};
/// How long memory is short.
const PRESSED: Duration = Duration::from_secs(3);

/// What the log has of merges that were put off.
const PUT_OFF: [&str; 2] = [
    "memory is short: ",
    "merges put off since their pages are swapped out: ",
];

/// The device has room for 4 MiB: whatever else goes there fails to be written, and stays in memory. A service sees that pages
/// are swapped out; of writes that failed only the kernel knows, which logs them.
#[test]
fn a_swap_device_that_fails_to_write_loses_nothing() {
    need_kvm!();
    let log = Logged::begin();
    let swap = or_skip!(Swap::that_fails(4 << 20));
    let out = swap_chaos::chaos(SIZE, LEAST, &swap);
    assert!(out.outcome.merges > 0 && out.pages_out > 0, "{out:?}");
    assert!(swap.failed_writes() > 0, "no write failed: {out:?}");
    assert!(out.outcome.put_off > 0 && log.says(&PUT_OFF), "{out:?}");
    eprintln!("{out:?}");
}

#[test]
fn swap_that_is_full_loses_nothing() {
    need_kvm!();
    let log = Logged::begin();
    let swap = or_skip!(Swap::of_size(4 << 20));
    let out = swap_chaos::chaos(SIZE, LEAST, &swap);
    assert!(out.outcome.merges > 0 && out.pages_out > 0, "{out:?}");
    assert!(out.outcome.put_off > 0 && log.says(&PUT_OFF), "{out:?}");
    assert!(log.says(&["memory is short: ", "swap is full ("]), "{out:?}");
    eprintln!("{out:?}");
}

/// Guests, services and store have two thirds of the memory that they use (memory.high): the kernel reclaims it from them, and
/// swaps, while they allocate. Without the second version of cgroups it reclaims what it can, again and again.
#[test]
fn a_limit_on_memory_loses_nothing() {
    need_kvm!();
    let swap = swap_or_skip!();
    let group = or_skip!(MemoryGroup::new());
    let log = Logged::begin();
    let last = swap.clone();
    let _watchdog = Watchdog::start(SIZE.patience, move || last.off());
    group.within(|| {
        let store = StoreThread::start();
        let guests = huge_chaos::boot(&store, SIZE);
        let used = group.used().expect("it is told");
        let (start, mut merges, mut put_off) = (Instant::now(), 0, 0);
        while merges < SIZE.merges || put_off == 0 || start.elapsed() < PRESSED {
            group.press(used * 2 / 3).expect("memory is reclaimed");
            std::thread::sleep(Duration::from_millis(20));
            merges = guests.iter().map(|guest| guest.stats().merges_total).sum();
            put_off = guests
                .iter()
                .map(|guest| guest.stats().refused_swapped_total)
                .sum::<u64>();
            assert!(
                start.elapsed() < SIZE.patience,
                "only {merges} merges, {put_off} put off"
            );
        }
        let pressed = group.used().expect("it is told");
        eprintln!("{used} bytes used before, {pressed} after");
        let out = huge_chaos::outcome(guests);
        assert!(out.put_off > 0 && log.says(&PUT_OFF), "{out:?}");
        let met = [
            "memory is short: ",
            "times that memory.high of this VMM's cgroups was met: ",
        ];
        assert!(!group.has_high() || log.says(&met), "{out:?}");
        eprintln!("{out:?}");
    });
}

#[test]
fn a_process_without_mappings_goes_on() {
    need_kvm!();
    let log = Logged::begin();
    let store = StoreThread::start();
    let guests = huge_chaos::boot(&store, SIZE);
    let sum = |field: fn(&ServiceStats) -> u64| {
        let stats = guests.iter().map(Guest::stats);
        stats.map(|s| field(&s)).sum::<u64>()
    };
    let until = |what: &str, is: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !is() {
            assert!(start.elapsed() < SIZE.patience, "waiting for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    until("merges", &|| sum(|s| s.merges_total) > SIZE.merges);
    // Before: a thread needs mappings.
    let watchdog = Watchdog::start(SIZE.patience, || ());
    let used_up = or_skip!(UsedUp::begin());
    let (failures, progress) = (sum(|s| s.window_failures_total), guests[0].progress());
    until("failures to be told", &|| {
        sum(|s| s.window_failures_total) > failures
    });
    until("the guest to go on", &|| guests[0].progress() > progress);
    until("it to be logged", &|| log.names(libc::ENOMEM));
    drop(used_up);
    let merges = sum(|s| s.merges_total);
    until("merging to go on", &|| sum(|s| s.merges_total) > merges);
    drop(watchdog);
    let out = huge_chaos::outcome(guests);
    eprintln!("{out:?}");
}

/// To compare a page that is swapped out the service would have to read it in.
#[test]
fn what_is_swapped_out_is_merged_when_it_is_back() {
    need_userfaultfd!();
    let _swap = swap_or_skip!();
    const PAGES: usize = 512;
    let store = StoreThread::start();
    let vms = [Pages::map(PAGES), Pages::map(PAGES)];
    vms.iter()
        .for_each(|vm| (0..PAGES).for_each(|page| vm.fill(page, page as u64 + 1)));
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        ..Config::default()
    };
    let serve = |vm: &Pages| vm.serve(&store.socket(), config.clone()).expect("dedup starts");
    let pass = |service: &DedupService| service.pass().expect("passes run").pages_mapped;
    let out = serve(&vms[0]);
    // Its keys are known then.
    (0..8).for_each(|_| _ = pass(&out));
    let half = vms[0].address(0)..vms[0].address(PAGES / 2);
    // The kernel may leave a page in memory that somebody else looks at just now.
    page_out(&half);
    let before = swapped_out(&half);
    assert!(before > PAGES / 4, "{before} pages are swapped out");
    let twin = serve(&vms[1]);
    for _ in 0..64 {
        _ = (pass(&out), pass(&twin));
    }
    let stats = (pass(&out), swapped_out(&half));
    assert_eq!(stats, ((PAGES - before) as u64, before), "mapped, and still out");
    let (explanation, _) = out.explain(None).expect("an explanation");
    assert_eq!((explanation.swapped, explanation.waiting), (before as u64, 0));
    assert!(out.stats().refused_swapped_total >= before as u64);
    assert!((0..PAGES).all(|page| vms[0].holds(page, page as u64 + 1)));
    let start = Instant::now();
    while pass(&out) < PAGES as u64 || pass(&twin) < PAGES as u64 {
        assert!(start.elapsed() < SIZE.patience, "{:?}", out.stats());
    }
    for service in [out, twin] {
        service.stop(true).expect("it stops");
    }
    assert!((0..PAGES).all(|page| vms[0].holds(page, page as u64 + 1)));
}

/// Who waits for a page that is away would wait for the disk as well.
#[test]
fn slots_that_are_swapped_out_are_read_in_before_pages_are_taken() {
    need_userfaultfd!();
    let _swap = swap_or_skip!();
    // Few enough for one window.
    const PAGES: usize = 8;
    let store = StoreThread::start();
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        ..Config::default()
    };
    let serve = || {
        let vm = Pages::map(PAGES);
        (0..PAGES).for_each(|page| vm.fill(page, page as u64 + 1));
        let service = vm.serve(&store.socket(), config.clone()).expect("dedup starts");
        (vm, service)
    };
    let pass = |service: &DedupService| service.pass().expect("passes run").pages_mapped;
    let merge = |services: &[(Pages, DedupService)]| {
        let start = Instant::now();
        let lack = |service: &DedupService| PAGES as u64 - pass(service);
        while services.iter().map(|(_, service)| lack(service)).sum::<u64>() > 0 {
            assert!(start.elapsed() < SIZE.patience, "{:?}", services[0].1.stats());
        }
    };
    let mut services = vec![serve(), serve()];
    merge(&services);
    Segments::now().page_out();
    let (tell, told) = mpsc::channel();
    let observer = Observer::begin(move |site: Site| {
        if site.call == Call::Move {
            _ = tell.send(Segments::now().resident());
        }
    });
    services.push(serve());
    merge(&services[2..]);
    drop(observer);
    let resident = told.into_iter().next().expect("pages were taken");
    assert!(
        resident >= PAGES,
        "{resident} slots were in memory when their twins were taken"
    );
    for (vm, service) in services {
        service.stop(true).expect("it stops");
        assert!((0..PAGES).all(|page| vm.holds(page, page as u64 + 1)));
    }
}
