//! Guest memory that the VMM keeps out of core dumps and children stays out of them when it is shared.
#![allow(unsafe_code)] // madvise

use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService};
use vmm_dedup_integration_tests::memory::{Pages, flags_of};
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::PAGE_SIZE;

const PAGES: usize = 1024;
const ADVICE: [(i32, &str); 2] = [(libc::MADV_DONTDUMP, " dd"), (libc::MADV_DONTFORK, " dc")];
/// Every so many pages of a guest are its own, so that sharing comes in pieces.
const PERIOD: usize = 8;

fn hidden_pages(guest: u64) -> Pages {
    let pages = Pages::map(PAGES);
    for (advice, _) in ADVICE {
        // SAFETY: the test's own memory, whose content stays.
        let advised = unsafe { libc::madvise(pages.address(0) as *mut _, PAGES * PAGE_SIZE, advice) };
        assert_eq!(advised, 0);
    }
    for page in 0..PAGES {
        let own = page % PERIOD == 0;
        pages.fill(
            page,
            page as u64 + 1 + if own { (guest + 1) * 1_000_000 } else { 0 },
        );
    }
    pages
}

fn assert_hidden(pages: &Pages, when: &str) {
    for flags in flags_of(pages) {
        for (_, flag) in ADVICE {
            assert!(flags.contains(flag), "{when}: a mapping lacks{flag}: {flags}");
        }
    }
}

fn share(breaks: Breaks) -> (StoreThread, Vec<(Pages, DedupService)>) {
    let store = StoreThread::start();
    let guests: Vec<(Pages, DedupService)> = (0..2)
        .map(|guest| {
            let pages = hidden_pages(guest);
            let config = Config {
                name: format!("hidden-{guest}"),
                cpu_percent: 100,
                pass_period_ms: 10,
                breaks,
                ..Config::default()
            };
            let service = pages.serve(&store.socket(), config).expect("dedup starts");
            (pages, service)
        })
        .collect();
    let shared = |service: &DedupService| service.stats().pages_mapped >= (PAGES - PAGES / PERIOD) as u64;
    let start = Instant::now();
    while !guests.iter().all(|(_, service)| shared(service)) {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "sharing takes too long"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    (store, guests)
}

fn stays_hidden(breaks: Breaks) {
    let (_store, guests) = share(breaks);
    for (pages, service) in guests {
        assert_hidden(&pages, "shared");
        // Neighbouring mappings of the store are one, as they were without the advice.
        let mappings = flags_of(&pages).len();
        assert!(mappings <= 2 * PAGES / PERIOD + 4, "{mappings} mappings");
        (0..PAGES).step_by(3).for_each(|page| pages.store(page, 1, 7));
        assert_hidden(&pages, "written");
        service.stop(true).expect("it stops");
        assert_hidden(&pages, "given back");
    }
}

#[test]
fn shared_memory_stays_out_of_core_dumps_and_children() {
    need_userfaultfd!();
    stays_hidden(Breaks::KERNEL);
}

#[test]
fn shared_memory_stays_out_of_core_dumps_and_children_with_managed_breaks() {
    need_userfaultfd!();
    stays_hidden(Breaks::managed(512, 0));
}

/// What the store shares (segments, pages on their way to it) is mapped by every VMM.
#[test]
fn the_stores_memory_stays_out_of_core_dumps_and_children_of_a_vmm() {
    need_userfaultfd!();
    let (_store, _guests) = share(Breaks::KERNEL);
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let (mut name, mut seen) = (String::new(), 0);
    for line in smaps.lines() {
        if line.contains("/memfd:") {
            line.clone_into(&mut name);
        } else if let (Some(flags), false) = (line.strip_prefix("VmFlags:"), name.is_empty()) {
            assert!(flags.contains(" dd") && flags.contains(" dc"), "{name}: {flags}");
            name.clear();
            seen += 1;
        }
    }
    assert!(seen > 0, "nothing of the store is mapped");
}
