//! Lives of small guests in memory of this process: they are served, share what they have, write some of it, share again, give memory
//! away, and are left. A life is over in a moment and says what it came to, so that it can be repeated, while nothing fails or
//! something does.
#![allow(unsafe_code)] // discards memory of the test's own

use crate::huge::HUGE_PAGES;
use crate::memory::Pages;
use crate::store::StoreThread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService, Policy, Sampling, ServiceStats, UseSource};

/// Pages of a guest.
const PAGES: usize = 192;
/// Every second one up to here is written in the middle of a life.
const WRITTEN: usize = 48;
/// Writers get the kernel's copies, which are merged again.
pub const HEALED: Breaks = Breaks::Kernel {
    heal_stall_us: 200_000,
    heal_without_fork: true,
};
/// The service breaks.
pub const MANAGED: Breaks = Breaks::managed(256, 0);
/// Passes after which everything has happened that happens by itself.
const PASSES: usize = 6;
/// Passes after which a service has mended what it can, also what it puts off for some.
const MENDED: usize = 40;
/// Pages shared by both guests together while nothing fails.
pub const SHARED: u64 = 2 * (PAGES - PAGES / 4 - PAGES / 16) as u64;
/// And what may still be left to healing, which waits longer each time that it failed: what was written.
pub const HEALED_LATER: u64 = WRITTEN as u64;
/// How long the life of huge pages may take for what takes some ten milliseconds: what failed is put off for some intervals.
const SLOW: Duration = Duration::from_secs(20);

/// Two equal huge pages, of which each half has twins, and one of zeros.
pub const HUGE: usize = 3 * HUGE_PAGES;

/// Every fourth page is another one in each guest, and every sixteenth zero.
fn id(guest: usize, page: usize, round: u64) -> u64 {
    let number = page as u64 + 1 + round * 10_000;
    match page % 16 {
        3 | 7 | 11 | 15 => number + (guest as u64 + 1) * 1_000_000,
        5 => 0,
        _ => number,
    }
}

/// Written in the middle of a life.
fn is_written(page: usize) -> bool {
    page < WRITTEN && page.is_multiple_of(2)
}

/// A guest of one region.
#[derive(Debug)]
pub struct Guest {
    number: usize,
    pages: Pages,
    /// In memory that is written.
    round: u64,
}

impl Guest {
    /// A guest of this number: what every fourth page holds tells guests apart.
    #[must_use]
    pub fn new(number: usize) -> Self {
        Self {
            number,
            pages: Pages::map(PAGES),
            round: 0,
        }
    }

    fn id(&self, page: usize) -> u64 {
        id(self.number, page, if is_written(page) { self.round } else { 0 })
    }

    fn fill(&mut self, round: u64, pages: impl Iterator<Item = usize>) {
        self.round = round;
        pages.for_each(|page| self.pages.fill(page, self.id(page)));
    }

    fn check(&self, when: &str) {
        for page in 0..PAGES {
            assert!(
                self.pages.holds(page, self.id(page)),
                "{when}: page {page} of guest {}",
                self.number
            );
        }
    }

    fn serve(&self, store: &StoreThread, breaks: Breaks) -> Result<DedupService, vmm_dedup::Error> {
        let config = Config {
            name: format!("guest-{}", self.number),
            cpu_percent: 100,
            pass_period_ms: 3_600_000,
            huge_policy: Policy::Ksm,
            breaks,
            ..Config::default()
        };
        let service = self.pages.serve(&store.socket(), config)?;
        service.vouch_for_pins();
        Ok(service)
    }
}

/// Their accounts, both together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Pages that map the store.
    pub mapped: u64,
    /// Pages merged again that the kernel had copied.
    pub heals: u64,
}

impl Sum {
    fn add(&mut self, stats: &ServiceStats) {
        self.mapped += stats.pages_mapped;
        self.heals += stats.heals_total;
    }
}

/// Runs passes of both in turn, until `done` or as many as are enough.
fn pass(services: &[DedupService], most: usize, done: impl Fn(&Sum) -> bool) -> Sum {
    let mut sum = Sum::default();
    for _ in 0..most {
        sum = Sum::default();
        services
            .iter()
            .for_each(|service| sum.add(&service.pass().expect("a pass")));
        if done(&sum) {
            break;
        }
    }
    sum
}

/// What a life came to.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// Pages shared at first.
    pub first: u64,
    /// And after they were written.
    pub last: Sum,
}

/// Both guests are served, share, write what they share, share again, give memory away, and are left. `None`: a service did not
/// start.
///
/// # Panics
/// If a page is wrong.
pub fn live(guests: &mut [Guest; 2], breaks: Breaks, when: &str) -> Option<Life> {
    let store = StoreThread::start();
    for guest in guests.iter_mut() {
        guest.pages.renew();
        guest.fill(0, 0..PAGES);
    }
    let served: Result<Vec<DedupService>, _> =
        guests.iter().map(|guest| guest.serve(&store, breaks)).collect();
    let life = served.ok().map(|services| {
        let enough = |sum: &Sum| sum.mapped >= SHARED;
        let first = pass(&services, PASSES, enough).mapped;
        guests.iter().for_each(|guest| guest.check(when));
        for guest in guests.iter_mut() {
            guest.fill(1, (0..PAGES).filter(|page| is_written(*page)));
        }
        // What they wrote is noticed first.
        pass(&services, 2, |_| false);
        let last = pass(&services, MENDED, |sum| {
            enough(sum) && (sum.heals > 0 || breaks != HEALED)
        });
        guests.iter().for_each(|guest| guest.check(when));
        for service in services {
            let _ = service.stop(true);
        }
        Life { first, last }
    });
    guests.iter().for_each(|guest| guest.check(when));
    life
}

fn huge_id(page: usize) -> u64 {
    if page < 2 * HUGE_PAGES {
        (page % HUGE_PAGES) as u64 + 1
    } else {
        0
    }
}

/// How long is waited for all to be built again once one is.
const FOLLOWS: Duration = Duration::from_secs(1);

/// Passes until something holds.
fn pass_until(service: &DedupService, what: &str, when: &str, is: impl Fn(&ServiceStats) -> bool) {
    let start = Instant::now();
    loop {
        let stats = service.pass().expect("a pass");
        if is(&stats) {
            return;
        }
        assert!(start.elapsed() < SLOW, "{when}: until {what}: {stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Huge pages are served, given up where they are zero, sampled, split and shared; they are used, sampled and built again. Whether
/// the service started. (Sampling that could not start is started again.)
///
/// # Panics
/// If a page is wrong, or something does not come about.
pub fn live_huge(pages: &Pages, when: &str) -> bool {
    let store = StoreThread::start();
    pages.renew();
    pages.advise_huge();
    (0..HUGE).for_each(|page| pages.fill(page, huge_id(page)));
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        huge_policy: Policy::Smartmd,
        use_source: UseSource::FaultSampling,
        sampling: Sampling {
            interval_ms: 10,
            window_us: 500,
        },
        breaks: Breaks::managed(256, 0),
        ..Config::default()
    };
    let Ok(service) = pages.serve(&store.socket(), config) else {
        return false;
    };
    // What fails may leave one of both to be merged page by page.
    let shared = |stats: &ServiceStats| stats.huge_split > 0 && stats.pages_mapped > 900;
    pass_until(&service, "they are shared", when, shared);
    let stop = AtomicBool::new(false);
    let wrong = std::thread::scope(|scope| {
        let user = scope.spawn(|| {
            let (mut n, mut wrong) = (1usize, 0);
            while !stop.load(Ordering::Acquire) {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (page, word) = ((n >> 32) % HUGE, (n >> 20) % 512);
                wrong += usize::from(pages.load(page, word) != pages.expected(huge_id(page), word));
            }
            wrong
        });
        // The user ends also if they are not built.
        let built = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pass_until(&service, "they are built again", when, |stats| {
                stats.huge_rebuilt_total > 0
            });
            // Where nothing fails the others follow soon. What is left is brought back page by page, which other lives walk through.
            let start = Instant::now();
            while service.stats().pages_mapped > 0 && start.elapsed() < FOLLOWS {
                service.pass().expect("a pass");
                std::thread::sleep(Duration::from_millis(1));
            }
        }));
        stop.store(true, Ordering::Release);
        let wrong = user.join().expect("the user ends");
        built.map_or_else(|panic| std::panic::resume_unwind(panic), |()| wrong)
    });
    assert_eq!(wrong, 0, "{when}: words were wrong");
    let _ = service.stop(true);
    for page in 0..HUGE {
        assert!(pages.holds(page, huge_id(page)), "{when}: page {page}");
    }
    true
}
