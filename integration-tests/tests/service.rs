//! The service's promises to the VMM that embeds it.

use io_uring::IoUring;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_dedup::{Breaks, Config, DedupService, Error, Observer, Settings};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::suspended::open_what_suspends_at_a_glance;

/// [`ServiceStats::state`](vmm_dedup::ServiceStats) while merging is suspended.
const SUSPENDED: u64 = 5;

#[test]
fn the_cpu_budget_holds_over_ten_seconds() {
    need_userfaultfd!();
    const PERCENT: u32 = 10;
    let store = StoreThread::start();
    let pages = Pages::map(16_384);
    let config = Config {
        cpu_percent: PERCENT,
        pass_period_ms: 10,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let start = Instant::now();
    let mut round = 0;
    // More work than the budget allows: every page changes all the time, half of them to something with twins.
    while start.elapsed() < Duration::from_secs(10) {
        round += 1;
        (0..pages.count())
            .for_each(|page| pages.fill(page, if page % 2 == 0 { round } else { page as u64 + round }));
        std::thread::sleep(Duration::from_millis(200));
    }
    let elapsed = start.elapsed().as_secs_f64();
    let used = service.stats().cpu_ns.total() as f64 / 1e9;
    let share = used / elapsed * 100.0;
    assert!(
        share <= f64::from(PERCENT) * 1.1,
        "used {share:.1} % of a core, budget {PERCENT} %"
    );
    assert!(
        share >= f64::from(PERCENT) * 0.5,
        "used only {share:.1} % although there was work"
    );
    service.stop(true).expect("it stops");
}

#[test]
fn untouched_memory_stays_unpopulated() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(32_768);
    pages.fill(7, 1);
    let service = pages
        .serve(&store.socket(), Config::default())
        .expect("dedup starts");
    for _ in 0..70 {
        service.pass().expect("a pass");
    }
    assert_eq!(service.stats().pages_keyed_total, 1);
    service.stop(true).expect("it stops");
    let pagemap = std::fs::File::open("/proc/self/pagemap").expect("pagemap");
    let mut entry = [0; 8];
    let populated = (0..pages.count()).filter(|page| {
        let offset = pages.address(*page) as u64 / 4096 * 8;
        std::os::unix::fs::FileExt::read_exact_at(&pagemap, &mut entry, offset).expect("an entry");
        u64::from_ne_bytes(entry) >> 62 != 0
    });
    assert_eq!(populated.count(), 1);
}

#[test]
fn a_paused_service_does_not_scan() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    let config = Config {
        pass_period_ms: 10,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    service.pause();
    std::thread::sleep(Duration::from_millis(100));
    let passes = service.stats().passes_total;
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(service.stats().passes_total, passes);
    service.resume();
    let start = Instant::now();
    while service.stats().passes_total == passes {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "no pass after resuming"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Who asks for passes all the time gets none before it is resumed.
#[test]
fn a_paused_service_merges_nothing_when_it_is_asked_for_a_pass() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(4096);
    (0..pages.count()).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    service.pause();
    (0..50).for_each(|_| _ = service.pass().expect("it answers"));
    let stats = service.stats();
    assert_eq!((stats.merges_total, stats.pages_keyed_total), (0, 0), "{stats:?}");
    service.resume();
    while service.pass().expect("it answers").pages_mapped < pages.count() as u64 {}
    service.stop(true).expect("it stops");
}

/// A file is opened that is in the way of merging, while pages are being merged.
#[test]
fn merging_that_is_suspended_in_the_middle_ends_the_pass() {
    const PAGES: usize = 16_384;
    need_userfaultfd!();
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let store = StoreThread::start();
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        ..Config::default()
    };
    let (slow, twin) = (Pages::map(PAGES), Pages::map(PAGES));
    for page in 0..PAGES {
        slow.fill(page, page as u64 + 1);
        // Elsewhere, so that there are many windows.
        twin.fill(PAGES - 1 - page, page as u64 + 1);
    }
    let serve = |pages: &Pages| {
        pages
            .serve(&store.socket(), config.clone())
            .expect("dedup starts")
    };
    let service = serve(&slow);
    (0..4).for_each(|_| _ = service.pass().expect("a pass"));
    let other = serve(&twin);
    (0..6).for_each(|_| _ = other.pass().expect("a pass"));
    let cpu_percent = |percent| Settings {
        cpu_percent: Some(percent),
        ..Settings::default()
    };
    service.set(cpu_percent(3)).expect("it is set");
    let start = Instant::now();
    let Some(file) = std::thread::scope(|scope| {
        let pass = scope.spawn(|| service.pass().expect("a pass"));
        let before = service.stats().merges_total;
        while service.stats().merges_total < before + 20 {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is merged");
            std::thread::sleep(Duration::from_millis(1));
        }
        let file = open_what_suspends_at_a_glance(folder.path());
        while file.is_some() && !pass.is_finished() {
            assert!(start.elapsed() < Duration::from_secs(60), "the pass does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        file
    }) else {
        return;
    };
    let stats = service.stats();
    assert!(
        stats.pages_mapped < PAGES as u64 && stats.state == SUSPENDED,
        "{stats:?}"
    );
    let error = service.direct_io_opened();
    assert!(matches!(error, Err(Error::UnpinnedDirectIo { .. })), "{error:?}");
    service.set(cpu_percent(100)).expect("it is set");
    (0..20).for_each(|_| _ = service.pass().expect("a pass"));
    assert_eq!(
        service.stats().pages_mapped,
        stats.pages_mapped,
        "merging went on"
    );
    drop(file);
    // Line keys are short, so two contents may have one. If the second page of such a key was just published when merging was
    // suspended, its slot is gone again, and the other service must tell of its twin anew.
    while service.pass().expect("a pass").pages_mapped < PAGES as u64 {
        other.pass().expect("a pass");
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{:?}",
            service.stats()
        );
    }
    service.stop(true).expect("it stops");
    other.stop(true).expect("it stops");
    assert!((0..PAGES).all(|page| slow.holds(page, page as u64 + 1)));
}

#[test]
fn files_that_an_io_uring_keeps_open_suspend_merging_until_it_gives_them_up() {
    need_userfaultfd!();
    let ring = match IoUring::new(4) {
        Ok(ring) => ring,
        Err(error) => return eprintln!("SKIPPED: no io_uring: {error}"),
    };
    let register = || {
        let file = tempfile::tempfile().expect("a file");
        // It stays open: the ring has it.
        ring.submitter()
            .register_files(&[file.as_raw_fd()])
            .expect("it is registered");
    };
    let unregister = || ring.submitter().unregister_files().expect("it is given up");
    let store = StoreThread::start();
    let (one, other) = (Pages::map(64), Pages::map(64));
    for page in 0..64 {
        one.fill(page, page as u64 + 1);
        other.fill(page, page as u64 + 1);
    }
    register();
    let refused = one
        .serve(&store.socket(), Config::default())
        .expect_err("refused");
    assert!(matches!(refused, Error::UnpinnedDirectIo { .. }), "{refused:?}");
    assert!(
        refused.to_string().contains("registered with an io_uring"),
        "{refused}"
    );
    unregister();
    let serve = |pages: &Pages| {
        pages
            .serve(&store.socket(), Config::default())
            .expect("dedup starts")
    };
    let (service, twin) = (serve(&one), serve(&other));
    register();
    for _ in 0..10 {
        let merged = service.pass().expect("a pass").pages_mapped + twin.pass().expect("a pass").pages_mapped;
        assert_eq!(merged, 0, "merging went on");
    }
    // One finds a twin and looks. The other has nothing to merge, and looks now and then, so that whoever watches is told.
    let start = Instant::now();
    while [&service, &twin].iter().any(|of| of.stats().state != SUSPENDED) {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", service.stats());
        std::thread::sleep(Duration::from_millis(100));
        let merged = service.pass().expect("a pass").pages_mapped + twin.pass().expect("a pass").pages_mapped;
        assert_eq!(merged, 0, "merging went on");
    }
    unregister();
    let start = Instant::now();
    while service.pass().expect("a pass").pages_mapped < 64 || twin.pass().expect("a pass").pages_mapped < 64
    {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", service.stats());
    }
    service.stop(true).expect("it stops");
    twin.stop(true).expect("it stops");
    assert!((0..64).all(|page| one.holds(page, page as u64 + 1) && other.holds(page, page as u64 + 1)));
}

#[test]
fn the_vma_budget_is_kept() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(4096);
    // Every second page has a twin: each merge would cost two mappings.
    (0..4096).for_each(|page| {
        pages.fill(
            page,
            if page % 2 == 0 {
                page as u64 / 8 + 1
            } else {
                page as u64 + 10_000
            },
        )
    });
    let before = maps();
    let config = Config {
        max_vmas: Some(200),
        cpu_percent: 100,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    for _ in 0..6 {
        service.pass().expect("a pass");
    }
    let stats = service.stats();
    let added = maps() - before;
    assert!(
        stats.pages_mapped > 0 && stats.refused_vmas_total > 0,
        "{stats:?}"
    );
    // A few more are the service's own: stacks, scratch, the store's files.
    assert!(
        added <= 200 + 24,
        "{added} mappings were added, budget 200, own count {}",
        stats.vmas
    );
    let tell = stats.vmas.abs_diff(added as u64);
    assert!(
        tell <= 24,
        "the service counts {} mappings, the kernel {added}",
        stats.vmas
    );
    service.stop(true).expect("it stops");
}

fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .expect("maps")
        .lines()
        .count()
}

#[test]
fn what_cannot_be_deduplicated_is_refused_with_the_reason() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let start = |pages: &Pages, config: Config| pages.serve(&store.socket(), config).expect_err("refused");
    let pages = Pages::map(16);

    let error = pages
        .serve(std::path::Path::new("/nonexistent/store.sock"), Config::default())
        .err();
    assert!(matches!(error, Some(Error::Connect { .. })), "{error:?}");

    let error = start(
        &pages,
        Config {
            cpu_percent: 101,
            ..Config::default()
        },
    );
    assert_eq!(error.to_string(), "cpu_percent is 101, but it must be 1 to 100");

    let (_file, map) = vmm_dedup_protocol::mapping::staging_memfd(16 * 4096).expect("a memfd");
    let range = vmm_dedup::HostRange::try_new(map.address(), map.len()).expect("aligned");
    #[allow(unsafe_code)]
    // SAFETY: the range is a mapping of this test's own that outlives the attempt.
    let error =
        unsafe { vmm_dedup::DedupService::start_on_ranges(&[range], &store.socket(), Config::default()) };
    assert!(error.expect_err("refused").to_string().contains("shared=on"));
}

/// The fault thread copies pages of the VM for writers, and does so for longer than a scanning thread that dies.
#[test]
fn memory_stays_while_the_fault_thread_is_there_although_the_scanning_thread_died() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("memory");
    let memory = Arc::new(memory);
    let kept = Arc::downgrade(&memory);
    let config = Config {
        breaks: Breaks::managed(64, 0),
        ..Config::default()
    };
    let service = DedupService::start(memory, &store.socket(), config).expect("dedup starts");
    let mut died = false;
    let scanner_dies = Observer::begin(move |_| {
        let is_scanner = std::thread::current().name() == Some("dedup-scan");
        let dies = is_scanner && !std::mem::replace(&mut died, true);
        assert!(!dies, "as a bug would have it");
    });
    let start = Instant::now();
    while service.pass().is_ok() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the scanning thread lives"
        );
    }
    drop(scanner_dies);
    assert!(kept.upgrade().is_some(), "the fault thread has it");
    drop(service);
    assert!(kept.upgrade().is_none(), "it is nobody's any more");
}

/// Whoever shares securely packs pages, which an engine without that feature cannot.
#[test]
fn an_engine_that_cannot_pack_shares_the_ordinary_way_and_no_other() {
    need_userfaultfd!();
    const FEATURES: [&str; 2] = ["--no-default-features", "--features=settings"];
    let build = ["build", "--package", "vmm-dedup", "--example", "smallest"];
    vmm_dedup_built::cargo(&[&build[..], &FEATURES].concat());
    let share = |store: &StoreThread| {
        let program = vmm_dedup_built::profile().join("examples/smallest");
        let output = Command::new(program).arg(store.socket()).output();
        let output = output.expect("it runs");
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), text.concat())
    };
    assert_eq!(
        share(&StoreThread::start()),
        (true, "64 of 64 pages share memory\n".into())
    );
    let store = StoreThread::secure();
    let (shared, text) = share(&store);
    assert!(
        !shared && text.contains("shares securely (--secure), which this program cannot"),
        "{text}"
    );
    assert!(
        text.contains("build it with the feature `pack` of vmm-dedup, or name another store"),
        "{text}"
    );
    let left = ["published_total", "pages_shared", "orphans"].map(|name| store.metric(name));
    assert_eq!(left, [0; 3], "what was refused left something");
}
