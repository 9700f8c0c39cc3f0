//! The lives of small guests, repeated while one of their system calls after the other fails: from each place in the engine that
//! makes calls, several of them in turn. Whatever the kernel says, the bytes stay right, nobody waits for ever, guests share
//! afterwards what they shared before, and a counter and a log line tell of the failure.
//!
//! `failures` has calls fail under guests that run, for as long as time allows. Here a life is repeated until the call was made, so
//! no place is left out that a life reaches: merging, healing, breaking and making private; and in the life of huge pages giving up
//! zeros, splitting, sampling, and building them again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use vmm_dedup::{Call, Injection, Site, Times, Watch};
use vmm_dedup_integration_tests::failing::{Counter, has_another_way, is_counted_elsewhere, lack};
use vmm_dedup_integration_tests::lives::{
    Guest, HEALED, HEALED_LATER, HUGE, MANAGED, SHARED, live, live_huge,
};
use vmm_dedup_integration_tests::logged::Logged;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::windows::{Heap, Windows};
use vmm_dedup_integration_tests::{follow_chaos, huge_pages_or_skip, need_userfaultfd, within};
use vmm_dedup_trouble::Watchdog;

#[global_allocator]
static HEAP: Heap = Heap;

/// Calls from one place that fail in turn: the first, the last, and some between.
const OF_A_PLACE: u64 = 4;
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

/// So many numbers of 1..=count at most, evenly spread, with the first and the last.
fn spread(count: u64, most: u64) -> BTreeSet<u64> {
    (0..most).map(|n| 1 + n * (count - 1) / (most - 1)).collect()
}

/// Calls from one place that fail in turn in the life of huge pages, which is longer.
const OF_A_PLACE_OF_HUGE_PAGES: u64 = 2;

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
    assert!(seen.asking.is_empty(), "{:#?}", seen.asking);
}

#[test]
fn memory_for_huge_pages_is_had_before_any_is_away_or_frozen() {
    need_userfaultfd!();
    vmm_dedup::share_whatever_it_costs(true);
    let pages = Pages::map_huge(HUGE);
    (0..HUGE).for_each(|page| pages.fill(page, 1));
    huge_pages_or_skip!(&pages);
    let windows = Windows::watch();
    assert!(live_huge(&pages, "while nothing fails"), "the service starts");
    let seen = windows.seen();
    assert!(seen.away > 0, "{seen:?}");
    assert!(seen.allocating.is_empty(), "{:?}", seen.allocating);
    assert!(seen.asking.is_empty(), "{:#?}", seen.asking);
}
