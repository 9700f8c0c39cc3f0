//! The life of two small guests, repeated while one of its system calls after the other fails: from each place in the engine that
//! makes calls, several of them in turn. Whatever the kernel says, the bytes stay right, nobody waits for ever, and guests share
//! afterwards what they shared before.
//!
//! `failures` has calls fail under guests that run, for as long as time allows, also those by which huge pages are split, sampled
//! and built. Here a life is repeated until the call was made, so no place is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vmm_dedup::{Breaks, Call, Config, DedupService, Injection, Policy, ServiceStats, Site, Times, Watch};
use vmm_dedup_integration_tests::failing::lack;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::windows::Windows;
use vmm_dedup_integration_tests::{follow_chaos, need_userfaultfd, within};
use vmm_dedup_trouble::Watchdog;

/// Pages of a guest.
const PAGES: usize = 192;
/// Every second one up to here is written in the middle of a life.
const WRITTEN: usize = 48;
/// Writers get the kernel's copies, which are merged again; or the service breaks.
const HEALED: Breaks = Breaks::Kernel {
    heal_stall_us: 200_000,
    heal_without_fork: true,
};
const MANAGED: Breaks = Breaks::managed(256, 0);
/// Calls from one place that fail in turn: the first, the last, and some between.
const OF_A_PLACE: u64 = 4;
/// Passes after which everything has happened that happens by itself.
const PASSES: usize = 6;
/// Passes after which a service has mended what it can, also what it puts off for some.
const MENDED: usize = 40;
/// Pages shared by both guests together while nothing fails.
const SHARED: u64 = 2 * (PAGES - PAGES / 4 - PAGES / 16) as u64;
/// And what may still be left to healing, which waits longer each time that it failed: what was written.
const HEALED_LATER: u64 = WRITTEN as u64;
/// Lives in which a call is made that may fail, at least in one of them.
const LIVES: usize = 8;
/// Places from which calls are made in one life, at least.
const FEWEST: usize = 40;
/// How long pages follow.
const FOLLOWED: Duration = Duration::from_secs(4);
/// How long one life may take: a writer who waits for ever is waited for that long.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// What else the kernel may say than that it lacks something.
fn busy(call: Call) -> i32 {
    match call {
        Call::Move | Call::Register => libc::EBUSY,
        Call::Copy | Call::ZeroPage => libc::EEXIST,
        Call::Poison | Call::PagemapScan | Call::PagemapRead | Call::Mincore => libc::EFAULT,
        Call::Wake | Call::Schedule => libc::EINVAL,
        Call::PollFaults | Call::ReadFaults | Call::Brk => libc::EINTR,
        _ => libc::EAGAIN,
    }
}

struct Guest {
    number: usize,
    pages: Pages,
    /// In memory that is written.
    round: u64,
}

impl Guest {
    fn new(number: usize) -> Self {
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
struct Sum {
    mapped: u64,
    heals: u64,
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
struct Life {
    /// Pages shared at first.
    first: u64,
    /// And after they were written.
    last: Sum,
}

/// Both guests are served, share, write what they share, share again, give memory away, and are left. `None`: a service did not
/// start.
#[allow(unsafe_code)] // discards memory of the test's own
fn live(guests: &mut [Guest; 2], breaks: Breaks, when: &str) -> Option<Life> {
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

/// So many numbers of 1..=count at most, evenly spread, with the first and the last.
fn spread(count: u64) -> BTreeSet<u64> {
    (0..OF_A_PLACE)
        .map(|n| 1 + n * (count - 1) / (OF_A_PLACE - 1))
        .collect()
}

/// Places from which every life makes calls, and how many at least.
fn places(guests: &mut [Guest; 2], breaks: Breaks) -> BTreeMap<Site, u64> {
    let mut lives = (0..3).map(|_| {
        let watch = Watch::begin();
        let life = live(guests, breaks, "while nothing fails").expect("services start");
        assert_eq!((life.first, life.last.mapped), (SHARED, SHARED), "{life:?}");
        assert!(breaks != HEALED || life.last.heals > 0, "{life:?}");
        watch.sites()
    });
    let first = lives.next().expect("there are some");
    lives.fold(first, |mut all, sites| {
        all.retain(|site, count| {
            let more = sites.get(site).copied();
            *count = more.map_or(0, |more| more.min(*count));
            more.is_some()
        });
        all
    })
}

#[test]
fn whichever_call_fails_the_bytes_are_right_and_sharing_goes_on() {
    need_userfaultfd!();
    vmm_dedup::share_whatever_it_costs(true);
    let mut guests = [Guest::new(0), Guest::new(1)];
    for (breaks, errnos) in [(HEALED, &[lack, busy][..]), (MANAGED, &[lack])] {
        let sites = places(&mut guests, breaks);
        eprintln!("{breaks:?}: {} places", sites.len());
        assert!(sites.len() >= FEWEST, "{sites:?}");
        for errno in errnos {
            for (site, count) in &sites {
                fail(&mut guests, breaks, *site, *count, errno(site.call));
            }
        }
    }
}

/// Who waits for a page must not wait for reclaim as well.
#[test]
fn memory_for_pages_is_had_before_any_is_away_or_frozen() {
    need_userfaultfd!();
    vmm_dedup::share_whatever_it_costs(true);
    let mut guests = [Guest::new(0), Guest::new(1)];
    let windows = Windows::watch();
    for breaks in [HEALED, MANAGED] {
        live(&mut guests, breaks, "while nothing fails").expect("services start");
    }
    // Copies that lie between pages that follow are carried along, others are moved out.
    let out = follow_chaos::chaos(u64::MAX, within(FOLLOWED), follow_chaos::KERNEL);
    assert!(out.wrong == 0 && out.moves > 0, "{out:?}");
    let seen = windows.seen();
    assert!(seen.away > 0 && seen.frozen > 0, "{seen:?}");
    assert!(seen.allocating.is_empty(), "{:?}", seen.allocating);
}

/// Some calls from one place fail, each in a life of its own.
fn fail(guests: &mut [Guest; 2], breaks: Breaks, site: Site, count: u64, errno: i32) {
    for nth in spread(count) {
        let error = std::io::Error::from_raw_os_error(errno);
        let when = format!("{site}, call {nth} of {count}: {error}");
        // How many are made, and sometimes whether any is, depends on the scheduler: which of the two publishes what, and how much
        // is found at once.
        let lives = if nth == 1 { LIVES } else { 1 };
        let failed = (0..lives).any(|_| fail_once(guests, breaks, site, nth, errno, &when));
        assert!(failed || nth > 1, "{when}: it was not made in {LIVES} lives");
    }
}

/// Whether the call was made in one life, and failed.
fn fail_once(guests: &mut [Guest; 2], breaks: Breaks, site: Site, nth: u64, errno: i32, when: &str) -> bool {
    let injection = Injection::at(site, errno, Times::Nth(nth));
    let hung = when.to_owned();
    let watchdog = Watchdog::start(PATIENCE, move || eprintln!("{hung}: it hangs"));
    let life = live(guests, breaks, when);
    drop(watchdog);
    match life {
        // What healing could not do is tried again after a growing number of passes.
        Some(life) => assert!(life.last.mapped >= SHARED - HEALED_LATER, "{when}: {life:?}"),
        None => eprintln!("{when}: no service"),
    }
    injection.failed() > 0
}
