//! Huge pages: busy ones stay, cold ones with twins are split, and taken as a whole if all of their pages have twins.

#![allow(unsafe_code)] // discards raw memory

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Config, Policy};
use vmm_dedup_integration_tests::direct_io;
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, huge_kib, wait};
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
        huge_policy: Policy::Ksm,
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

fn config() -> Config {
    Config {
        cpu_percent: 100,
        pass_period_ms: 10,
        huge_policy: Policy::Ksm,
        ..Config::default()
    }
}

/// Every content in each of the huge pages.
fn fill(pages: &Pages) {
    (0..pages.count()).for_each(|page| pages.fill(page, (page % HUGE_PAGES) as u64 + 1));
}

#[test]
fn a_huge_page_whose_pages_all_have_twins_is_taken_as_one() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map_huge(4 * HUGE_PAGES);
    fill(&pages);
    huge_pages_or_skip!(&pages);
    let service = pages.serve(&store.socket(), config()).expect("dedup starts");
    wait(&service, "sharing", |s| s.pages_mapped == 4 * HUGE_PAGES as u64);
    let stats = service.stats();
    // The first one is published bit by bit.
    assert!(stats.huge_whole_total >= 3, "{stats:?}");
    assert_eq!((huge_kib(&pages), stats.refused_other_total), (0, 0));
    (0..pages.count()).for_each(|page| assert!(pages.holds(page, (page % HUGE_PAGES) as u64 + 1)));
    service.stop(true).expect("it stops");
    (0..pages.count()).for_each(|page| assert!(pages.holds(page, (page % HUGE_PAGES) as u64 + 1)));
}

/// A vCPU that reads a huge page gets it back as soon as it is missed. In the end it is merged nevertheless. (Whether the
/// reader runs just then is chance, so it is tried some times.)
#[test]
fn who_waits_for_a_huge_page_gets_it_back_at_once() {
    need_userfaultfd!();
    let store = StoreThread::start();
    for round in 1..=20 {
        let pages = Pages::map_huge(4 * HUGE_PAGES);
        fill(&pages);
        huge_pages_or_skip!(&pages);
        let service = pages.serve(&store.socket(), config()).expect("dedup starts");
        let stop = AtomicBool::new(false);
        let wrong: u64 = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut wrong = 0;
                for n in 0usize.. {
                    let (page, word) = (n * 37 % pages.count(), n * 11 % 512);
                    let expected = pages.expected((page % HUGE_PAGES) as u64 + 1, word);
                    wrong += u64::from(pages.load(page, word) != expected);
                    if stop.load(Ordering::Acquire) {
                        break;
                    }
                }
                wrong
            });
            wait(&service, "sharing", |s| s.pages_mapped == 4 * HUGE_PAGES as u64);
            stop.store(true, Ordering::Release);
            reader.join().expect("a reader")
        });
        let stats = service.stats();
        assert_eq!(wrong, 0, "{stats:?}");
        if stats.huge_contended_total > 0 {
            // What came back in small pages would not be merged as a whole.
            assert!(stats.huge_whole_total >= 3, "{stats:?}");
            return eprintln!(
                "round {round}: {} times given back, {} merged as a whole, stops p99 {} us",
                stats.huge_contended_total,
                stats.huge_whole_total,
                stats.stop.quantile_us(0.99)
            );
        }
    }
    panic!("no huge page was ever given back");
}

#[test]
fn a_huge_page_that_is_pinned_somewhere_stays() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let (pages, twins) = (Pages::map_huge(HUGE_PAGES), Pages::map_huge(2 * HUGE_PAGES));
    fill(&pages);
    fill(&twins);
    huge_pages_or_skip!(&pages);
    let ring = direct_io::pin(&pages, 1);
    let others = twins.serve(&store.socket(), config()).expect("dedup starts");
    wait(&others, "twins", |s| s.pages_mapped == 2 * HUGE_PAGES as u64);
    let service = pages.serve(&store.socket(), config()).expect("dedup starts");
    wait(&service, "a try", |s| s.refused_pinned_total > 0);
    let stats = service.stats();
    assert_eq!((stats.pages_mapped, stats.huge_splits_total), (0, 0), "{stats:?}");
    assert_eq!(huge_kib(&pages), 2048, "it was split for nothing");
    direct_io::unpin(&ring);
    wait(&service, "sharing", |s| s.pages_mapped == HUGE_PAGES as u64);
    (0..pages.count()).for_each(|page| assert!(pages.holds(page, page as u64 + 1)));
}

/// Threads write while the huge pages they write to are taken, again and again. What they write to hardly ever lies in a
/// page's key lines, so pages are taken that look like their twins and are not, before, while and after they are written.
#[test]
fn writers_lose_nothing_while_huge_pages_are_taken_as_one() {
    need_userfaultfd!();
    const ROUNDS: usize = 10;
    const WRITERS: usize = 2;
    let store = StoreThread::start();
    let pages = Pages::map_huge(CHUNKS * HUGE_PAGES);
    fill(&pages);
    huge_pages_or_skip!(&pages);
    let service = pages.serve(&store.socket(), config()).expect("dedup starts");
    let discarder = service.discarder();
    let mut written = 0;
    for round in 1..=ROUNDS {
        let (before, stop) = (service.stats().huge_splits_total, AtomicBool::new(false));
        let done: Vec<Vec<(usize, usize, u64)>> = std::thread::scope(|scope| {
            let write = |writer: usize| {
                let (pages, stop) = (&pages, &stop);
                move || {
                    let mut done = Vec::new();
                    for n in 0.. {
                        // Each page is one writer's, and a word of it is written once a round.
                        let page = (n * 514 + round * 31) * WRITERS % pages.count() + writer;
                        let (word, value) = ((n / 4 + n * 7) % 512, ((round << 32) | n) as u64);
                        pages.store(page, word, value);
                        done.push((page, word, value));
                        if stop.load(Ordering::Acquire) {
                            return done;
                        }
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    done
                }
            };
            let writers: Vec<_> = (0..WRITERS).map(|n| scope.spawn(write(n))).collect();
            let start = Instant::now();
            // What is written in its key lines again and again may stay longer.
            let enough = before + CHUNKS as u64 / 2;
            while service.stats().huge_splits_total < enough && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(2));
            }
            stop.store(true, Ordering::Release);
            writers.into_iter().map(|w| w.join().expect("a writer")).collect()
        });
        let mut changed = std::collections::HashMap::new();
        changed.extend(
            done.iter()
                .flatten()
                .map(|(page, word, value)| ((*page, *word), *value)),
        );
        written += changed.len();
        for page in 0..pages.count() {
            for word in 0..512 {
                let original = pages.expected((page % HUGE_PAGES) as u64 + 1, word);
                let expected = changed.get(&(page, word)).copied().unwrap_or(original);
                assert_eq!(
                    pages.load(page, word),
                    expected,
                    "round {round}, word {word} of page {page}"
                );
            }
        }
        // SAFETY: the test's own memory, whose content is not needed any more.
        unsafe { discarder.discard(pages.address(0), pages.count() * 4096) }.expect("it is discarded");
        pages.advise_huge();
        fill(&pages);
    }
    let stats = service.stats();
    assert!(
        stats.huge_whole_total > 0 && stats.mismatches_total > 0,
        "{stats:?}"
    );
    eprintln!(
        "{written} words written, {} huge pages, {} merged as a whole, {} pages put back, stops p99 {} us",
        stats.huge_splits_total,
        stats.huge_whole_total,
        stats.mismatches_total,
        stats.stop.quantile_us(0.99)
    );
    service.stop(true).expect("it stops");
}
