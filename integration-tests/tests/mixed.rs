//! Huge and small pages side by side: what is split, what stays, what is built again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService, Observer, Policy, ServiceStats, Site, UseSource};
use vmm_dedup_integration_tests::huge::HUGE_PAGES;
use vmm_dedup_integration_tests::huge_pages_or_skip;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::suspended::{open_what_suspends, open_what_suspends_at_a_glance};

/// Pages of each 2 MiB that are kept private to sample its use.
const PROBES: usize = 4;
const PATIENCE: Duration = Duration::from_secs(60);
/// How long what a service saw of the files that are open holds, and more.
const LOOK_HOLDS: Duration = Duration::from_millis(5);

fn config(policy: Policy) -> Config {
    Config {
        cpu_percent: 100,
        pass_period_ms: 20,
        huge_policy: policy,
        sampling: vmm_dedup::Sampling {
            interval_ms: 100,
            window_us: 5000,
        },
        breaks: Breaks::managed(1024, 64 << 20),
        ..Config::default()
    }
}

/// Chunks in pairs of equal ones.
fn pairs(chunks: usize) -> Pages {
    let pages = Pages::map_huge(chunks * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
    pages
}

fn id(page: usize) -> u64 {
    (page / (2 * HUGE_PAGES) * HUGE_PAGES + page % HUGE_PAGES) as u64 + 1
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

/// Ends the reader, or the writer, also when the test fails.
struct EndReader<'a>(&'a AtomicUsize);

impl Drop for EndReader<'_> {
    fn drop(&mut self) {
        self.0.store(usize::MAX, Ordering::Release);
    }
}

/// Runs `then` while a thread reads words all over the first `chunks` chunks that `hot` says, and checks them.
fn while_reading<T>(pages: &Pages, hot: &AtomicUsize, then: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut n, mut wrong) = (1usize, 0);
            loop {
                let count = hot.load(Ordering::Acquire);
                if count == usize::MAX {
                    return wrong;
                }
                if count == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (page, word) = ((n >> 32) % (count * HUGE_PAGES), (n >> 20) % 512);
                wrong += usize::from(pages.load(page, word) != pages.expected(id(page), word));
            }
        });
        let end = EndReader(hot);
        let result = then();
        drop(end);
        assert_eq!(reader.join().expect("the reader ends"), 0, "wrong words");
        result
    })
}

#[test]
fn hot_pages_stay_huge_cold_ones_share_and_come_back_when_they_turn_hot() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = pairs(8);
    huge_pages_or_skip!(&pages);
    let hot = AtomicUsize::new(2);
    let service = pages
        .serve(&store.socket(), config(Policy::Smartmd))
        .expect("dedup starts");
    while_reading(&pages, &hot, || {
        let cold = (6 * (HUGE_PAGES - PROBES)) as u64;
        // A reader that got no CPU time in a sample looks cold; what is hot comes back.
        wait(&service, "the cold pairs are shared", |s| {
            s.pages_mapped == cold && s.huge_ranges == 2 && s.huge_split == 6
        });
        wait(&service, "the hot ones are told", |s| {
            s.huge_kept_hot == 2 && s.pages_given_up > 1000
        });
        hot.store(8, Ordering::Release);
        let stats = wait(&service, "all are huge again", |s| s.huge_ranges == 8);
        assert!(stats.huge_rebuilt_total >= 6, "{stats:?}");
        hot.store(2, Ordering::Release);
        wait(&service, "the cold pairs are shared again", |s| {
            s.pages_mapped == cold && s.huge_ranges == 2
        });
    });
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

#[test]
fn with_kernel_breaks_what_was_copied_comes_back_as_well_unless_nothing_tells_of_pins() {
    need_userfaultfd!();
    let healing = Breaks::Kernel {
        heal_stall_us: 5000,
        heal_without_fork: true,
    };
    let no_healing = Breaks::Kernel {
        heal_stall_us: 0,
        heal_without_fork: false,
    };
    for (breaks, comes_back) in [(healing, 4), (no_healing, 3)] {
        let store = StoreThread::start();
        let pages = pairs(4);
        huge_pages_or_skip!(&pages);
        let hot = AtomicUsize::new(0);
        let config = Config {
            breaks,
            ..config(Policy::Smartmd)
        };
        let service = pages.serve(&store.socket(), config).expect("dedup starts");
        if comes_back == 4 {
            service.vouch_for_pins();
        }
        while_reading(&pages, &hot, || {
            let all = (4 * (HUGE_PAGES - PROBES)) as u64;
            wait(&service, "the pairs are shared", |s| s.pages_mapped == all);
            // Writes that change nothing make the kernel copy all the same.
            let written = [5, 6, 300];
            for page in written {
                pages.store(page, 0, pages.expected(id(page), 0));
            }
            hot.store(4, Ordering::Release);
            let stats = wait(&service, "what can be huge again is", |s| {
                s.huge_ranges == comes_back && (comes_back == 4 || s.rebuild_pinned_total > 0)
            });
            assert!(stats.huge_rebuilt_total >= comes_back, "{stats:?}");
        });
        service.stop(true).expect("it stops");
        assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
    }
}

/// The kernel copies pages for the writer before, while and after those copied earlier are moved out.
#[test]
fn with_kernel_breaks_what_is_written_all_the_time_comes_back_and_loses_nothing() {
    need_userfaultfd!();
    const WORD: usize = 3;
    let store = StoreThread::start();
    let pages = pairs(4);
    huge_pages_or_skip!(&pages);
    let config = Config {
        breaks: Breaks::Kernel {
            heal_stall_us: 5000,
            heal_without_fork: true,
        },
        ..config(Policy::Smartmd)
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    service.vouch_for_pins();
    let all = (4 * (HUGE_PAGES - PROBES)) as u64;
    wait(&service, "the pairs are shared", |s| s.pages_mapped == all);
    let end = AtomicUsize::new(0);
    let turns = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for turn in 1u64.. {
                for page in 0..pages.count() {
                    // Nobody else writes: what is there was written in the turn before.
                    let lost = turn > 1 && pages.load(page, WORD) != turn - 1;
                    assert!(!lost, "page {page} lost what was written in turn {}", turn - 1);
                    pages.store(page, WORD, turn);
                }
                if end.load(Ordering::Acquire) == usize::MAX {
                    return turn;
                }
            }
            0
        });
        let end = EndReader(&end);
        wait(&service, "all are huge again", |s| s.huge_ranges == 4);
        drop(end);
        writer.join().expect("the writer ends")
    });
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.load(page, WORD) == turns));
}

/// What is written in all of a range that was huge is known in the next pass, and a single page after as many passes as the range
/// has parts.
#[test]
fn what_the_kernel_copied_where_pages_were_huge_is_found_at_once() {
    need_userfaultfd!();
    const PARTS: usize = 16;
    let store = StoreThread::start();
    let pages = pairs(4);
    huge_pages_or_skip!(&pages);
    let config = Config {
        // Passes come when they are called for.
        pass_period_ms: 3_600_000,
        breaks: Config::default().breaks,
        ..config(Policy::Smartmd)
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let shared = (4 * (HUGE_PAGES - PROBES)) as u64;
    let start = Instant::now();
    let mut before = service.pass().expect("a pass");
    while before.pages_mapped != shared {
        assert!(start.elapsed() < PATIENCE, "the pairs are not shared: {before:?}");
        std::thread::sleep(Duration::from_millis(10));
        before = service.pass().expect("a pass");
    }
    let write = |page| pages.store(page, 0, pages.expected(id(page), 0));
    let copied = |stats: &ServiceStats| stats.breaks_kernel_total - before.breaks_kernel_total;
    let single = 3 * HUGE_PAGES + 7;
    write(single);
    let mut passes = 0..PARTS;
    let found = passes.any(|_| copied(&service.pass().expect("a pass")) > 0);
    assert!(found, "not within as many passes as there are parts");
    (HUGE_PAGES..2 * HUGE_PAGES).for_each(write);
    let stats = service.pass().expect("a pass");
    assert_eq!(copied(&stats), (1 + HUGE_PAGES - PROBES) as u64, "{stats:?}");
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

#[test]
fn huge_pages_of_zeros_are_given_up_whole() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map_huge(4 * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, 0));
    huge_pages_or_skip!(&pages);
    let service = pages
        .serve(&store.socket(), config(Policy::Smartmd))
        .expect("dedup starts");
    let stats = wait(&service, "all are given up", |s| s.huge_zero_total == 4);
    assert_eq!((stats.pages_zero, stats.vmas), (2048, 0));
    pages.store(700, 3, 9);
    wait(&service, "the one that is written is huge at once", |s| {
        s.huge_ranges == 1
    });
    assert_eq!(pages.load(700, 3), 9);
    assert!(
        (0..pages.count())
            .filter(|page| *page != 700)
            .all(|page| pages.holds(page, 0))
    );
    service.stop(true).expect("it stops");
}

/// Writes a little that changes nothing to some pages, slowly, so that more than one interval has some.
fn write_to_some(pages: &Pages, mut until: impl FnMut() -> bool) {
    for page in (0..HUGE_PAGES).cycle() {
        if until() {
            return;
        }
        pages.store(page, 0, pages.expected(id(page), 0));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A write by a plain reference would go to the page that is replaced, and be lost.
#[test]
fn no_zeros_are_given_up_and_nothing_is_built_while_merging_is_suspended() {
    need_userfaultfd!();
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let store = StoreThread::start();
    let (pages, zeros) = (pairs(4), Pages::map(HUGE_PAGES));
    huge_pages_or_skip!(&pages);
    (0..zeros.count()).for_each(|page| zeros.fill(page, (page as u64 + 1) << 32));
    // Sampling that takes pages rests as well, so that nothing would be built.
    let config = Config {
        use_source: UseSource::Writes,
        ..config(Policy::Smartmd)
    };
    let start = |pages: &Pages| {
        pages
            .serve(&store.socket(), config.clone())
            .expect("dedup starts")
    };
    let (service, giver) = (start(&pages), start(&zeros));
    wait(&service, "the pairs are shared", |s| {
        s.pages_mapped == pages.count() as u64
    });
    let Some(device) = open_what_suspends(folder.path()) else {
        return;
    };
    (0..zeros.count()).for_each(|page| zeros.fill(page, 0));
    let start = Instant::now();
    write_to_some(&pages, || start.elapsed() > Duration::from_secs(3));
    let (stats, given) = (service.stats(), giver.stats().zero_merges_total);
    assert_eq!((stats.huge_rebuilt_total, given), (0, 0), "pages were replaced");
    drop(device);
    wait(&giver, "zeros are given up", |s| {
        s.pages_zero == HUGE_PAGES as u64
    });
    let start = Instant::now();
    write_to_some(&pages, || {
        assert!(start.elapsed() < PATIENCE, "{:?}", service.stats());
        service.stats().huge_rebuilt_total > 0
    });
    service.stop(true).expect("it stops");
    giver.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

/// A file is opened that is in the way of replacing memory, after the pass has looked and before it samples.
#[test]
fn nothing_is_sampled_once_merging_is_suspended_in_the_middle_of_a_pass() {
    need_userfaultfd!();
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let store = StoreThread::start();
    let pages = pairs(2);
    huge_pages_or_skip!(&pages);
    let config = Config {
        pass_period_ms: 3_600_000,
        ..config(Policy::Smartmd)
    };
    let (begin, begun) = mpsc::channel();
    let (open, opened) = mpsc::channel::<()>();
    // The first pass, which samples what it has never sampled, waits where it looks for what was written until the file is open.
    let mut first = Some(());
    let observer = Observer::begin(move |site: Site| {
        if site.file.ends_with("track/dirty.rs") && first.take().is_some() {
            _ = begin.send(());
            _ = opened.recv();
            std::thread::sleep(LOOK_HOLDS);
        }
    });
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let (file, stats) = std::thread::scope(|scope| {
        let pass = scope.spawn(|| service.pass().expect("a pass"));
        begun
            .recv_timeout(PATIENCE)
            .expect("the pass comes to what was written");
        let file = open_what_suspends_at_a_glance(folder.path());
        drop(open);
        (file, pass.join().expect("the pass ends"))
    });
    drop(observer);
    if file.is_none() {
        return;
    }
    assert_eq!((stats.huge_ranges, stats.samples_total), (2, 0), "{stats:?}");
    drop(file);
    let start = Instant::now();
    while service.pass().expect("a pass").samples_total == 0 {
        assert!(start.elapsed() < PATIENCE, "{:?}", service.stats());
    }
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

/// Two hot chunks and two cold ones, in pairs; then two cold ones without twins: what each policy leaves huge and shares.
fn under(policy: Policy, done: impl Fn(&ServiceStats) -> bool) {
    let store = StoreThread::start();
    let pages = Pages::map_huge(6 * HUGE_PAGES);
    for page in 0..pages.count() {
        let unique = page >= 4 * HUGE_PAGES;
        pages.fill(page, id(page) + if unique { (page as u64) << 20 } else { 0 });
    }
    huge_pages_or_skip!(&pages);
    let hot = AtomicUsize::new(2);
    let service = pages
        .serve(&store.socket(), config(policy))
        .expect("dedup starts");
    while_reading(&pages, &hot, || wait(&service, policy.name(), &done));
    service.stop(true).expect("it stops");
}

#[test]
fn policies_do_what_their_names_say() {
    need_userfaultfd!();
    let half = (2 * (HUGE_PAGES - PROBES)) as u64;
    // Hot ones stay, cold ones with twins go.
    under(Policy::Smartmd, |s| s.huge_ranges == 4 && s.pages_mapped == half);
    // Whatever has a twin goes.
    under(Policy::Ksm, |s| s.huge_ranges == 2 && s.pages_mapped == 2048);
    under(Policy::NoSplitting, |s| {
        s.huge_ranges == 2 && s.pages_mapped == 2048
    });
    // Whatever is cold goes, twins or not.
    under(Policy::Ingens, |s| s.huge_ranges == 2 && s.pages_mapped == half);
}

/// Two VMs whose pages have no twins at home, and at other places in the other.
#[test]
fn cold_pages_share_with_those_of_another_vm_at_other_places() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let [one, other] = [0, 1].map(|shift| {
        let pages = Pages::map_huge(2 * HUGE_PAGES);
        (0..pages.count()).for_each(|page| pages.fill(page, (page + shift) as u64 + 1));
        pages
    });
    huge_pages_or_skip!(&one);
    let [first, second] = [one, other].map(|pages| {
        let service = pages.serve(&store.socket(), config(Policy::Smartmd));
        // Probes here are not probes there: these twins stay private in both.
        (service.expect("dedup starts"), 2 * HUGE_PAGES - 1 - 4 * PROBES)
    });
    for (service, twins) in [&first, &second] {
        wait(service, "twins are shared", |s| s.pages_mapped >= *twins as u64);
    }
    for (service, _) in [first, second] {
        service.stop(true).expect("it stops");
    }
    for (pages, shift) in [(one, 0), (other, 1)] {
        assert!((0..pages.count()).all(|page| pages.holds(page, (page + shift) as u64 + 1)));
    }
}

#[test]
fn writes_alone_tell_use_of_what_is_written_and_take_for_idle_what_is_read() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = pairs(4);
    huge_pages_or_skip!(&pages);
    let hot = AtomicUsize::new(4);
    let config = Config {
        use_source: UseSource::Writes,
        ..config(Policy::Smartmd)
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    while_reading(&pages, &hot, || {
        let stats = wait(&service, "what is only read is shared", |s| {
            s.pages_mapped == pages.count() as u64
        });
        assert_eq!((stats.use_source_name(), stats.huge_rebuilt_total), ("writes", 0));
        let start = Instant::now();
        write_to_some(&pages, || {
            assert!(start.elapsed() < PATIENCE, "{:?}", service.stats());
            service.stats().huge_rebuilt_total > 0
        });
    });
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

/// DAMON has one user on a host: here it may be taken, or not be there. Then the next source does, and the reason is told.
#[test]
fn damon_tells_the_use_of_memory_or_why_it_does_not() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = pairs(8);
    huge_pages_or_skip!(&pages);
    let hot = AtomicUsize::new(2);
    let config = Config {
        use_source: UseSource::Damon,
        // DAMON answers every 100 ms.
        sampling: vmm_dedup::Sampling {
            interval_ms: 400,
            ..vmm_dedup::Sampling::default()
        },
        ..config(Policy::Smartmd)
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    while_reading(&pages, &hot, || {
        wait(&service, "the cold pairs are shared", |s| {
            s.pages_mapped >= (6 * (HUGE_PAGES - PROBES)) as u64 && s.huge_ranges == 2
        });
        hot.store(8, Ordering::Release);
        wait(&service, "all are huge again", |s| s.huge_ranges == 8);
    });
    let source = service.stats().use_source_name();
    let (_, note) = service.explain(None).expect("an explanation");
    eprintln!("told by {source}; {note}");
    assert!(
        (source == "damon" && note.is_empty())
            || (source == "fault-sampling" && note.starts_with("the use of memory is not told by damon: ")),
        "{source}: {note}"
    );
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}
