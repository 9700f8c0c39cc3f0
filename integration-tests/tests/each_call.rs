//! The lives of small guests, repeated while one of their system calls after the other fails: from each place in the engine that
//! makes calls, several of them in turn. Whatever the kernel says, the bytes stay right, nobody waits for ever, guests share
//! afterwards what they shared before, and a counter and a log line tell of the failure.
//!
//! `failures` has calls fail under guests that run, for as long as time allows. Here a life is repeated until the call was made, so
//! no place is left out that a life reaches: merging, healing, breaking and making private; and in the life of huge pages giving up
//! zeros, splitting, sampling, and building them again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{
    Breaks, Call, Config, DedupService, Injection, Policy, Sampling, ServiceStats, Site, Times, UseSource,
    Watch,
};
use vmm_dedup_integration_tests::failing::{Counter, has_another_way, is_counted_elsewhere, lack};
use vmm_dedup_integration_tests::huge::HUGE_PAGES;
use vmm_dedup_integration_tests::logged::Logged;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::windows::Windows;
use vmm_dedup_integration_tests::{follow_chaos, huge_pages_or_skip, need_userfaultfd, within};
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
const LIVES: usize = 24;
/// Lives that are watched, and places from which calls are made in every one of them, at least.
const WATCHED: usize = 3;
const FEWEST: usize = 40;
/// Places that only one of these lives reaches, and to which none comes again, at most.
const MISSED: usize = 2;
/// How long a log line may take.
const TOLD: Duration = Duration::from_secs(2);
/// Pages follow at least so many slots that move, and as long as a segment takes to go.
const FOLLOWED: u64 = 64;
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
fn spread(count: u64, most: u64) -> BTreeSet<u64> {
    (0..most).map(|n| 1 + n * (count - 1) / (most - 1)).collect()
}

/// Two equal huge pages, of which each half has twins, and one of zeros.
const HUGE: usize = 3 * HUGE_PAGES;
/// Calls from one place that fail in turn in the life of huge pages, which is longer.
const OF_A_PLACE_OF_HUGE_PAGES: u64 = 2;
/// How long the life of huge pages may take for what takes some ten milliseconds: what failed is put off for some intervals.
const SLOW: Duration = Duration::from_secs(20);

fn huge_id(page: usize) -> u64 {
    if page < 2 * HUGE_PAGES {
        (page % HUGE_PAGES) as u64 + 1
    } else {
        0
    }
}

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
fn live_huge(pages: &Pages, when: &str) -> bool {
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

/// Repeats a life, and asserts what it comes to. Whether its services started.
type Lives<'a> = &'a mut dyn FnMut(&str) -> bool;

/// Places from which lives make calls: in how many lives of [`WATCHED`], and how many calls at least in these.
fn places(life: Lives<'_>) -> BTreeMap<Site, (usize, u64)> {
    let mut places: BTreeMap<Site, (usize, u64)> = BTreeMap::new();
    for _ in 0..WATCHED {
        let watch = Watch::begin();
        assert!(life("while nothing fails"), "services start");
        for (site, count) in watch.sites() {
            let (lives, least) = places.entry(site).or_insert((0, count));
            (*lives, *least) = (*lives + 1, count.min(*least));
        }
    }
    places
}

/// Walks through what fails, and keeps account of what does not tell.
struct Walk {
    log: &'static Logged,
    counter: Counter,
    uncounted: BTreeSet<Site>,
    unlogged: BTreeSet<Site>,
    /// Of places that one life of [`WATCHED`] reached: those to which none came again.
    missed: Vec<Site>,
}

impl Walk {
    fn begin() -> Self {
        Self {
            log: Logged::begin(),
            counter: Counter::start(),
            uncounted: BTreeSet::new(),
            unlogged: BTreeSet::new(),
            missed: Vec::new(),
        }
    }

    /// So many calls from each place that a life reaches fail, each in a life of its own.
    fn through(&mut self, name: &str, life: Lives<'_>, of_a_place: u64, errnos: &[fn(Call) -> i32]) {
        let sites = places(life);
        let always = sites.values().filter(|(lives, _)| *lives == WATCHED).count();
        eprintln!("{name}: {} places, {always} of them in every life", sites.len());
        assert!(always >= FEWEST, "{sites:?}");
        for errno in errnos {
            for (site, (lives, count)) in &sites {
                self.fail(
                    life,
                    (*site, *lives > 1),
                    spread(*count, of_a_place),
                    errno(site.call),
                );
            }
        }
    }

    /// Some calls from one place fail.
    fn fail(&mut self, life: Lives<'_>, (site, often): (Site, bool), calls: BTreeSet<u64>, errno: i32) {
        let error = std::io::Error::from_raw_os_error(errno);
        for nth in calls {
            let when = format!("{site}, call {nth}: {error}");
            // How many are made, and sometimes whether any is, depends on the scheduler: which of the two publishes what, and how
            // much is found at once.
            let lives = if nth == 1 { LIVES } else { 1 };
            let failed = (0..lives).any(|_| self.fail_once(life, site, nth, errno, &when));
            assert!(
                failed || nth > 1 || !often,
                "{when}: it was not made in {LIVES} lives"
            );
            if !failed && nth == 1 {
                self.missed.push(site);
            }
        }
    }

    /// Whether the call was made in one life, and failed.
    fn fail_once(&mut self, life: Lives<'_>, site: Site, nth: u64, errno: i32, when: &str) -> bool {
        self.log.clear();
        let before = self.counter.failures();
        let injection = Injection::at(site, errno, Times::Nth(nth));
        let hung = when.to_owned();
        let watchdog = Watchdog::start(PATIENCE, move || eprintln!("{hung}: it hangs"));
        let served = life(when);
        drop(watchdog);
        let failed = injection.failed() > 0;
        drop(injection);
        // Whoever started it was told.
        if failed && served && !is_silent(site, errno) {
            if !is_counted_elsewhere(&site) && self.counter.failures() == before {
                self.uncounted.insert(site);
            }
            if !comes(|| self.log.names(errno)) {
                self.unlogged.insert(site);
            }
        }
        failed
    }

    fn end(self) {
        for site in &self.missed {
            eprintln!("no life came again to {site}");
        }
        let Self {
            uncounted,
            unlogged,
            missed,
            ..
        } = self;
        assert!(uncounted.is_empty(), "no counter told of {uncounted:?}");
        assert!(unlogged.is_empty(), "no log line told of {unlogged:?}");
        assert!(missed.len() <= MISSED, "{missed:?}");
    }
}

/// Whether nothing is to tell: it is done in another way, or is no failure.
fn is_silent(site: Site, errno: i32) -> bool {
    // What was wanted is so already; a page is pinned; somebody changes mappings just now, so it is tried again at once.
    let usual = [
        (Call::ZeroPage, libc::EEXIST),
        (Call::Move, libc::EBUSY),
        (Call::WriteProtect, libc::EAGAIN),
    ];
    has_another_way(&site) || usual.contains(&(site.call, errno))
}

/// Whether something is told in time.
fn comes(is: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !is() && start.elapsed() < TOLD {
        std::thread::sleep(Duration::from_millis(1));
    }
    is()
}

#[test]
fn whichever_call_fails_the_bytes_are_right_and_sharing_goes_on() {
    need_userfaultfd!();
    vmm_dedup::share_whatever_it_costs(true);
    let mut guests = [Guest::new(0), Guest::new(1)];
    let mut walk = Walk::begin();
    for (breaks, errnos) in [(HEALED, &[lack, busy][..]), (MANAGED, &[lack])] {
        let life = live(&mut guests, breaks, "while nothing fails").expect("services start");
        assert_eq!((life.first, life.last.mapped), (SHARED, SHARED), "{life:?}");
        assert!(breaks != HEALED || life.last.heals > 0, "{life:?}");
        let mut again = |when: &str| match live(&mut guests, breaks, when) {
            // What healing could not do is tried again after a growing number of passes.
            Some(life) => {
                assert!(life.last.mapped >= SHARED - HEALED_LATER, "{when}: {life:?}");
                true
            }
            None => false,
        };
        walk.through(&format!("{breaks:?}"), &mut again, OF_A_PLACE, errnos);
    }
    walk.end();
}

#[test]
fn whichever_call_fails_huge_pages_are_split_and_built_again() {
    need_userfaultfd!();
    vmm_dedup::share_whatever_it_costs(true);
    let pages = Pages::map_huge(HUGE);
    (0..HUGE).for_each(|page| pages.fill(page, 1));
    huge_pages_or_skip!(&pages);
    let mut walk = Walk::begin();
    let mut life = |when: &str| live_huge(&pages, when);
    walk.through("huge pages", &mut life, OF_A_PLACE_OF_HUGE_PAGES, &[lack]);
    walk.end();
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
    let out = follow_chaos::chaos(FOLLOWED, within(PATIENCE), follow_chaos::KERNEL);
    assert!(out.wrong == 0 && out.moves >= FOLLOWED, "{out:?}");
    let seen = windows.seen();
    assert!(seen.away > 0 && seen.frozen > 0, "{seen:?}");
    assert!(seen.allocating.is_empty(), "{:?}", seen.allocating);
}
