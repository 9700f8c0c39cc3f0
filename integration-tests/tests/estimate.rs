//! What an estimate promises is what the engine then saves, on the memory of this very process.

use vmm_dedup::{Config, DedupService, ServiceStats};
use vmm_dedup_estimate::{Memory, Reading, Report, Sample, estimate};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::observer::Observer;

const GUESTS: u64 = 4;
const GUEST_PAGES: u64 = 6000;
/// Passes without a change after which everything is merged.
const QUIET: u32 = 4;

/// Like guests with one system: a third zero, a third the same though elsewhere in each, a third their own.
fn content(guest: u64, page: u64) -> u64 {
    match page % 3 {
        0 => 0,
        1 => 1 + (page + guest * 501) % GUEST_PAGES / 3,
        _ => (guest + 1) << 32 | page,
    }
}

fn estimate_of_this_process() -> Report {
    let memory = Memory::of_process(std::process::id()).expect("this process can be read");
    let reading = Reading {
        threads: 2,
        progress: &|_, _| (),
    };
    estimate(&[memory], Sample::ALL, &reading).expect("this process can be read")
}

/// Merges until nothing more is to be merged.
fn converge(service: &DedupService) -> ServiceStats {
    let (mut last, mut quiet) = (0, 0);
    loop {
        let stats = service.pass().expect("the service runs");
        let merged = stats.merges_total + stats.zero_merges_total + stats.published_total;
        quiet = if merged == last && merged > 0 {
            quiet + 1
        } else {
            0
        };
        if quiet == QUIET {
            return stats;
        }
        last = merged;
    }
}

#[test]
fn what_is_promised_is_saved() {
    need_userfaultfd!();
    let pages = Pages::map(usize::try_from(GUESTS * GUEST_PAGES).expect("a small number"));
    for number in 0..GUESTS * GUEST_PAGES {
        let id = content(number / GUEST_PAGES, number % GUEST_PAGES);
        pages.fill(usize::try_from(number).expect("a small number"), id);
    }
    let store = StoreThread::start();

    let promised = estimate_of_this_process().total.saved.pages;
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let stats = converge(&service);
    let mut observer = Observer::connect(&store.socket()).expect("the store answers");
    let slots = observer.stats().expect("the store answers").0.pages_shared;
    let saved = stats.pages_mapped + stats.pages_zero - slots;
    let left = estimate_of_this_process();

    eprintln!("{promised} pages promised, {saved} saved");
    assert!(saved > 12_000, "{stats:?}");
    // Two in a hundred; what else this process holds is a part of that.
    assert!(
        promised.abs_diff(saved) * 50 < saved,
        "{promised} pages promised, {saved} saved"
    );
    // What is merged is not promised a second time; the service has some memory of its own that is zero so far.
    assert!(left.total.saved.pages * 20 < saved, "{left:?}");
    service.stop(true).expect("dedup stops");
}
