//! What huge pages may meet: no huge pages to be had, no memory to spare, khugepaged, hugetlb memory.
#![allow(unsafe_code)] // raw mappings, prctl

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Call, Config, DedupService, Error, HostRange, Observer, Policy, ServiceStats, Site};
use vmm_dedup_integration_tests::huge::HUGE_PAGES;
use vmm_dedup_integration_tests::huge_pages_or_skip;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_trouble::{page_out, swap_or_skip, swapped_out};

const PATIENCE: Duration = Duration::from_secs(60);
const RESERVE: usize = 1024;

fn config(policy: Policy, floor_bytes: u64) -> Config {
    Config {
        cpu_percent: 100,
        pass_period_ms: 20,
        huge_policy: policy,
        sampling: vmm_dedup::Sampling {
            interval_ms: 100,
            window_us: 5000,
        },
        breaks: Breaks::managed(RESERVE, floor_bytes),
        ..Config::default()
    }
}

/// Two equal huge pages.
fn pair() -> Pages {
    let pages = Pages::map_huge(2 * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
    pages
}

fn id(page: usize) -> u64 {
    (page % HUGE_PAGES) as u64 + 1
}

fn wait(service: &DedupService, what: &str, is: impl Fn(&ServiceStats) -> bool) -> ServiceStats {
    let start = Instant::now();
    loop {
        let stats = service.stats();
        if is(&stats) {
            return stats;
        }
        assert!(start.elapsed() < PATIENCE, "waiting until {what}: {stats:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The same for pages of a pair.
fn while_used<T>(pages: &Pages, then: impl FnOnce() -> T) -> T {
    while_read(pages, &id, then)
}

/// Reads all over the pages, and checks what it reads, while `then` runs.
fn while_read<T>(pages: &Pages, id: &(impl Fn(usize) -> u64 + Sync), then: impl FnOnce() -> T) -> T {
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut n, mut wrong) = (1usize, 0);
            while !stop.load(Ordering::Acquire) {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (page, word) = ((n >> 32) % pages.count(), (n >> 20) % 512);
                wrong += usize::from(pages.load(page, word) != pages.expected(id(page), word));
            }
            wrong
        });
        let end = End(&stop);
        let result = then();
        drop(end);
        assert_eq!(reader.join().expect("the reader ends"), 0, "wrong words");
        result
    })
}

fn check(pages: &Pages) {
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

/// No huge pages for this process while it lives.
struct NoHugePages;

impl NoHugePages {
    fn begin() -> Self {
        // SAFETY: sets a flag of this process.
        let done = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        Self
    }
}

impl Drop for NoHugePages {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0) };
    }
}

#[test]
fn without_huge_pages_small_ones_are_shared_and_stay() {
    need_userfaultfd!();
    let disabled = NoHugePages::begin();
    let store = StoreThread::start();
    let pages = pair();
    let service = pages
        .serve(&store.socket(), config(Policy::Smartmd, 0))
        .expect("dedup starts");
    let stats = wait(&service, "all is shared", |s| {
        s.pages_mapped == 2 * HUGE_PAGES as u64
    });
    assert_eq!((stats.huge_ranges, stats.huge_splits_total), (0, 0));
    assert_eq!(stats.use_source_name(), "fault-sampling");
    service.stop(true).expect("it stops");
    drop(disabled);
    check(&pages);
}

#[test]
fn where_huge_pages_are_switched_off_they_are_not_built_until_there_are_some() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = pair();
    huge_pages_or_skip!(&pages);
    let service = pages
        .serve(&store.socket(), config(Policy::Smartmd, 0))
        .expect("dedup starts");
    wait(&service, "they are split", |s| {
        s.huge_split == 2 && s.pages_mapped > 900
    });
    let disabled = NoHugePages::begin();
    while_used(&pages, || {
        let stats = wait(&service, "that is noticed", |s| s.rebuild_memory_total > 0);
        assert_eq!(stats.huge_rebuilt_total, 0, "{stats:?}");
        drop(disabled);
        wait(&service, "they are huge again", |s| s.huge_rebuilt_total >= 2);
    });
    service.stop(true).expect("it stops");
    check(&pages);
}

#[test]
fn without_memory_to_spare_nothing_is_built_until_there_is_some() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = pair();
    huge_pages_or_skip!(&pages);
    let config = config(Policy::Smartmd, u64::MAX / 2);
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    wait(&service, "they are split", |s| {
        s.huge_split == 2 && s.pages_mapped > 900
    });
    while_used(&pages, || {
        let stats = wait(&service, "it is refused, and tried again", |s| {
            s.rebuild_memory_total > 2
        });
        assert_eq!(stats.huge_rebuilt_total, 0, "{stats:?}");
        service.set_reserve(RESERVE, 0);
        wait(&service, "they are huge again", |s| s.huge_rebuilt_total >= 2);
    });
    service.stop(true).expect("it stops");
    check(&pages);
}

/// Whoever waited for a page that is away would wait for the disk as well.
#[test]
fn what_is_swapped_out_is_read_in_before_pages_are_taken() {
    need_userfaultfd!();
    let _swap = swap_or_skip!();
    let store = StoreThread::start();
    // One half of each has twins, the other one stays private.
    let id = |page: usize| match page % HUGE_PAGES {
        within if within < HUGE_PAGES / 2 => id(page),
        _ => (HUGE_PAGES + page) as u64,
    };
    let pages = Pages::map_huge(2 * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
    huge_pages_or_skip!(&pages);
    let config = config(Policy::Smartmd, u64::MAX / 2);
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    wait(&service, "they are split", |s| {
        s.huge_split == 2 && s.pages_mapped > 450
    });
    let huge_page = |n: usize| {
        let start = pages.address(n * HUGE_PAGES);
        start..start + HUGE_PAGES * PAGE_SIZE
    };
    let both = [huge_page(0), huge_page(1)];
    let (tell, told) = mpsc::channel();
    let observer = Observer::begin(move |site: Site| {
        let looks = site.call == Call::PagemapScan && site.file.ends_with("thp/collapse.rs");
        let takes = site.call == Call::Move && site.file.ends_with("window/mod.rs");
        if looks {
            both.iter().for_each(page_out);
        }
        if looks || takes {
            _ = tell.send((looks, both.each_ref().map(swapped_out)));
        }
    });
    while_read(&pages, &id, || {
        service.set_reserve(RESERVE, 0);
        wait(&service, "they are huge again", |s| s.huge_rebuilt_total >= 2);
    });
    drop(observer);
    let told: Vec<(bool, [usize; 2])> = told.into_iter().collect();
    let taken = told.windows(2).filter(|two| two[0].0 && !two[1].0);
    let out: Vec<([usize; 2], [usize; 2])> = taken.map(|two| (two[0].1, two[1].1)).collect();
    // Whoever reads brings pages back as well, and the kernel may be busy with one just now.
    let read_in = |(before, after): &(usize, usize)| *before >= 16 && after * 8 < *before;
    let mut each = out
        .iter()
        .flat_map(|(before, after)| before.iter().copied().zip(*after));
    assert!(each.any(|one| read_in(&one)), "{out:?}");
    let left = |after: &[usize; 2]| after.iter().min().copied();
    assert!(out.iter().all(|(_, after)| left(after) < Some(10)), "{out:?}");
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

#[test]
fn hugetlb_memory_is_refused_and_not_touched() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_NORESERVE;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which nothing is read from or written to.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), 2 << 20, prot, flags, -1, 0) };
    if raw == libc::MAP_FAILED {
        eprintln!(
            "SKIPPED: no hugetlb mappings here: {}",
            std::io::Error::last_os_error()
        );
        return;
    }
    let range = HostRange::try_new(raw as usize, 2 << 20).expect("a range");
    // SAFETY: the range stays mapped for the process's life.
    let started = unsafe { DedupService::start_on_ranges(&[range], &store.socket(), Config::default()) };
    let error = started.expect_err("hugetlb memory must be refused");
    assert!(matches!(error, Error::NotPrivate { .. }), "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
}

/// Settings of khugepaged, put back in the end.
struct Khugepaged(Vec<(String, String)>);

impl Khugepaged {
    /// Lets it scan without pause; `None`, and says why, where we may not.
    fn hurry() -> Option<Self> {
        let mut old = Self(Vec::new());
        for (name, value) in [
            ("scan_sleep_millisecs", "0"),
            ("alloc_sleep_millisecs", "0"),
            ("pages_to_scan", "65536"),
            ("max_ptes_none", "511"),
        ] {
            let path = format!("/sys/kernel/mm/transparent_hugepage/khugepaged/{name}");
            let set = fs::read_to_string(&path).and_then(|before| {
                fs::write(&path, value)?;
                old.0.push((path.clone(), before));
                Ok(())
            });
            if let Err(error) = set {
                eprintln!("SKIPPED: {path} cannot be set: {error}");
                return None;
            }
        }
        Some(old)
    }
}

impl Drop for Khugepaged {
    fn drop(&mut self) {
        for (path, value) in &self.0 {
            if let Err(error) = fs::write(path, value.trim()) {
                eprintln!("{path} cannot be set back to {}: {error}", value.trim());
            }
        }
    }
}

#[test]
fn khugepaged_may_collapse_what_is_being_split_and_built() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = pair();
    huge_pages_or_skip!(&pages);
    let Some(_hurry) = Khugepaged::hurry() else { return };
    let service = pages
        .serve(&store.socket(), config(Policy::Smartmd, 0))
        .expect("dedup starts");
    // Split, used and built again, left alone and split again, and so on.
    for round in 1..=4 {
        wait(&service, "they are split", |s| {
            s.huge_splits_total >= 2 * round && s.pages_mapped > 900
        });
        while_used(&pages, || {
            wait(&service, "they are huge again", |s| {
                s.huge_rebuilt_total >= 2 * round && s.huge_ranges == 2
            })
        });
    }
    service.stop(true).expect("it stops");
    check(&pages);
}
