//! System calls that fail, one kind after the other, under guests that write and check their memory all the time: whatever
//! the kernel says, the guests go on with the right bytes, and a counter and a log line tell.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{
    Breaks, Call, Config, Injection, Policy, ServiceStats, Settings, Site, Switch, Times, Watch,
};
use vmm_dedup_integration_tests::failing::{Counter, has_another_way, is_counted_elsewhere, lack};
use vmm_dedup_integration_tests::guests::{self, Size};
use vmm_dedup_integration_tests::heal_chaos::{self, Besides, Pins};
use vmm_dedup_integration_tests::logged::Logged;
use vmm_dedup_integration_tests::memory::{Pages, flags_of};
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::{follow_chaos, huge_chaos, lives, need_kvm, need_userfaultfd};
use vmm_dedup_trouble::Watchdog;

/// What the kernel may say to the calls that the service makes while it merges, breaks, samples, gives up zeros, builds huge
/// pages and makes pages private.
const FAILURES: [(Call, i32); 40] = [
    (Call::Split, libc::EAGAIN),
    (Call::Register, libc::ENOMEM),
    (Call::Register, libc::EBUSY),
    (Call::Wake, libc::EINVAL),
    (Call::ZeroPage, libc::EAGAIN),
    (Call::ZeroPage, libc::EEXIST),
    (Call::ZeroPage, libc::ENOENT),
    (Call::ZeroPage, libc::ENOMEM),
    (Call::Move, libc::EAGAIN),
    (Call::Move, libc::EBUSY),
    (Call::Move, libc::EEXIST),
    (Call::Move, libc::EFAULT),
    (Call::Move, libc::EINVAL),
    (Call::Move, libc::ENOENT),
    (Call::Move, libc::ENOMEM),
    (Call::WriteProtect, libc::EAGAIN),
    (Call::WriteProtect, libc::ENOENT),
    (Call::WriteProtect, libc::ENOMEM),
    (Call::ReadFaults, libc::EINTR),
    (Call::ReadFaults, libc::ENOMEM),
    (Call::PollFaults, libc::EINTR),
    (Call::PollFaults, libc::ENOMEM),
    (Call::PagemapScan, libc::EFAULT),
    (Call::PagemapScan, libc::ENOMEM),
    (Call::MapSegment, libc::EAGAIN),
    (Call::MapSegment, libc::ENOMEM),
    (Call::MapAnonymous, libc::ENOMEM),
    (Call::Remap, libc::EAGAIN),
    (Call::Remap, libc::EFAULT),
    (Call::Remap, libc::ENOMEM),
    (Call::Unmap, libc::ENOMEM),
    (Call::Populate, libc::EFAULT),
    (Call::Populate, libc::ENOMEM),
    (Call::PopulateRead, libc::ENOMEM),
    (Call::PopulateRead, libc::EFAULT),
    (Call::Discard, libc::EAGAIN),
    (Call::Discard, libc::ENOMEM),
    (Call::Advise, libc::EAGAIN),
    (Call::Advise, libc::ENOMEM),
    (Call::Schedule, libc::EINVAL),
];
/// Calls that are not made then, and where they fail: they belong to healing, to runs with exceptions, or to what is done after
/// another call has failed.
const ELSEWHERE: [(Call, &str); 8] = [
    (Call::Copy, "runs_with_exceptions_are_made_whatever_call_fails"),
    (
        Call::Unregister,
        "runs_with_exceptions_are_made_whatever_call_fails",
    ),
    (
        Call::Fork,
        "healing: when_nothing_tells_of_pins_no_page_changes_and_it_is_tried_again",
    ),
    (
        Call::PagemapRead,
        "healing: when_nothing_tells_of_pins_no_page_changes_and_it_is_tried_again",
    ),
    (
        Call::Brk,
        "guests_go_on_wherever_a_call_fails: the walk through healing",
    ),
    (
        Call::Mincore,
        "engine, relocate: a_hole_is_mended_although_that_fails_for_a_while",
    ),
    (
        Call::Protect,
        "engine, relocate: a_hole_is_mended_although_that_fails_for_a_while",
    ),
    (
        Call::Poison,
        "engine, relocate: a_page_that_broke_in_scratch_memory_goes_back_as_a_memory_error",
    ),
];
/// Calls of a kind that fail, at least, before the next is tried.
const FAILED: u64 = 5;
/// How long all calls of a kind fail, and how long if nothing has told of it until then.
const ALL_FAIL: Duration = Duration::from_millis(100);
const ALL_FAIL_AT_MOST: Duration = Duration::from_secs(10);
/// How long no new place must come while a scene is watched from where calls are made, and how long it is watched.
const WATCHED: Duration = Duration::from_secs(2);
const WATCHED_AT_MOST: Duration = Duration::from_secs(6);
/// How long calls from these places fail in turn (longer while one is left that must fail: after a failure the service leaves
/// alone for a while what failed, and guests share two cores with whatever else runs), and how long one turn may take (less if calls from the place failed in another scene).
const WALKED: Duration = Duration::from_secs(6);
const WALKED_AT_MOST: Duration = Duration::from_secs(30);
const TURN: Duration = Duration::from_millis(300);
/// The same for a place that must fail and has not yet, after the scene has begun anew.
const LONG_TURN: Duration = Duration::from_secs(5);
/// Places from which every scene makes calls, at least.
const FEWEST: usize = 10;
/// How often a scene is played, at most, while places are left in it: scenes are what guests and the machine make of them, and on a
/// busy one some places do not come again in time.
const ROUNDS: usize = 4;
/// Lives in which a place is to fail that is left then, of each kind that reaches it.
const LIVES: usize = 24;
/// Places that scenes may meet while they are watched and never again, and why.
const RARE: [(Call, &str, &str); 14] = [
    (
        Call::PagemapScan,
        "window/mod.rs",
        "asked when the kernel has lost count of what it moved",
    ),
    (
        Call::PagemapScan,
        "track/fault_sampling.rs",
        "asked when somebody uses a huge page just while it is away",
    ),
    (Call::MapSegment, "merge/in_place.rs", CARRIED),
    (Call::Advise, "memory/advice.rs", LEAVING),
    (Call::MapAnonymous, "merge/in_place.rs", LEAVING),
    (Call::Register, "merge/in_place.rs", LEAVING),
    (Call::Populate, "merge/in_place.rs", LEAVING),
    (Call::Advise, "merge/in_place.rs", LEAVING),
    (Call::WriteProtect, "unmerge/cow.rs", COPIED),
    (Call::Wake, "unmerge/cow.rs", COPIED),
    (Call::Unregister, "unmerge/cow.rs", UNPROTECTED),
    (Call::ZeroPage, "window/mod.rs", AFTERWARDS),
    (Call::Advise, "memory/layout.rs", "made once in a service's life"),
    (Call::Populate, "unmerge/address_space.rs", FILLED),
];
const CARRIED: &str =
    "copies are carried along where few lie between pages that follow; they stay as those of frozen.rs do";
const COPIED: &str = "pages are left to the kernel that were copied between being mapped and being protected; all calls of this kind fail in the first test here";
const UNPROTECTED: &str = "made where ending the protection of pages fails, as it does where they are not registered any more; the engine's own test of that has both fail";
const AFTERWARDS: &str = "made page by page once the call for all pages has failed; so it does in the first test here, where all calls of this kind fail";
const FILLED: &str = "zero pages are filled when all else was given back, for which the CPU budget is kept; all calls of this kind fail in the first test here";
const LEAVING: &str = "copies leave a file when its segment goes, all at once; the engine's own test of that has these calls fail";
/// How long a log line may take.
const TOLD: Duration = Duration::from_secs(5);
/// How long services take to start.
const BEGINNING: Duration = Duration::from_secs(2);
/// How often it is looked at what is called while a scene is watched, and looks at which calls from a place are new after which it
/// is not rare.
const LOOK: Duration = Duration::from_millis(50);
const OFTEN: u64 = 5;
/// How long nothing may happen: guests share two cores with whatever else runs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for what comes in the end; ends the process, with where all threads are, if it does not.
fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let what = what.to_owned();
    let watchdog = Watchdog::start(PATIENCE, move || eprintln!("waiting for {what}"));
    while !is() {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(watchdog);
}

/// What tells of failures, all guests together.
fn told(guests: &[Guest]) -> u64 {
    let of = |s: ServiceStats| {
        s.window_failures_total
            + s.refused_pinned_total
            + s.refused_other_total
            + s.refused_vmas_total
            + s.rebuild_memory_total
            + s.rebuild_other_total
    };
    guests.iter().map(Guest::stats).map(of).sum()
}

/// Waits until every guest has written and restored more than it had.
fn go_on(guests: &[Guest], when: &str) {
    let before: Vec<u64> = guests.iter().map(Guest::progress).collect();
    for (guest, before) in guests.iter().zip(before) {
        wait(&format!("a guest to go on {when}"), || guest.progress() > before);
    }
}

/// Brings all shared pages back to private memory, as far as that goes, and lets them be shared again.
fn make_private(guests: &[Guest]) {
    let switch = |switch| Settings {
        switch: Some(switch),
        ..Settings::default()
    };
    for guest in guests {
        // While calls fail some stay shared.
        let _ = guest.set(switch(Switch::OffUnmerge));
        guest.set(switch(Switch::On)).expect("it is switched on again");
    }
}

/// Some calls of a kind fail until enough have, then all of them for a while.
fn fail(guests: &[Guest], log: &Logged, (call, errno): (Call, i32)) {
    let when = format!(
        "after {call:?} failed with {}",
        std::io::Error::from_raw_os_error(errno)
    );
    let start = Instant::now();
    let before = told(guests);
    log.clear();
    let injection = Injection::begin(call, errno, Times::Every(3));
    make_private(guests);
    wait(&format!("{call:?} to be called"), || injection.failed() >= FAILED);
    go_on(guests, &when);
    let some = injection.failed();
    drop(injection);
    // The zero page is there, which is what was wanted. A page is pinned, which is no failure.
    let silent = (call, errno) == (Call::ZeroPage, libc::EEXIST);
    let pinned = (call, errno) == (Call::Move, libc::EBUSY);
    let injection = Injection::begin(call, errno, Times::Always);
    let begun = Instant::now();
    let is_told = || silent || told(guests) > before;
    while begun.elapsed() < ALL_FAIL || !is_told() && begun.elapsed() < ALL_FAIL_AT_MOST {
        std::thread::sleep(Duration::from_millis(5));
    }
    let all = injection.failed();
    drop(injection);
    go_on(guests, &when);
    wait(&format!("a counter to tell {when}"), is_told);
    wait(&format!("a log line {when}"), || {
        silent || pinned || log.names(errno)
    });
    eprintln!(
        "{when}, {some} and {all} times: right, {} ms",
        start.elapsed().as_millis()
    );
}

#[test]
fn guests_go_on_whatever_call_fails() {
    need_kvm!();
    let log = Logged::begin();
    let size = Size {
        merges: 0,
        patience: PATIENCE,
        common_mib: 4,
        zero_mib: 4,
    };
    for of_one_kind in FAILURES.chunk_by(|a, b| a.0 == b.0) {
        let store = StoreThread::start();
        // New ones: pages that were left to the kernel's copy-on-write are merged again late, if at all.
        let guests = huge_chaos::boot(&store, size);
        let sum =
            |field: fn(&ServiceStats) -> u64| guests.iter().map(Guest::stats).map(|s| field(&s)).sum::<u64>();
        wait("merging, and huge pages to be split", || {
            sum(|s| s.merges_total) > 0 && sum(|s| s.huge_splits_total) > 0
        });
        let quiet = told(&guests);
        make_private(&guests);
        go_on(&guests, "while nothing fails");
        std::thread::sleep(ALL_FAIL);
        assert_eq!(
            told(&guests),
            quiet,
            "something tells of failures where nothing fails"
        );
        for failure in of_one_kind {
            fail(&guests, log, *failure);
        }
        let merges = sum(|s| s.merges_total);
        wait("merging to go on", || sum(|s| s.merges_total) > merges);
        let _ = huge_chaos::outcome(guests);
    }
}

/// Places of all scenes.
#[derive(Default)]
struct Places {
    /// In which calls failed.
    failed: BTreeSet<Site>,
    /// From which calls were made, in looks with new ones in one scene.
    seen: BTreeMap<Site, u64>,
    unlogged: Vec<Site>,
    uncounted: Vec<Site>,
}

impl Places {
    /// Those from which calls have not failed yet and should.
    fn left(&self) -> Vec<Site> {
        self.seen
            .keys()
            .filter(|site| self.wants(site))
            .copied()
            .collect()
    }

    /// A call from a place failed: whether that is told of.
    fn note_failed(&mut self, site: Site, log: &Logged, counter: &Counter, before: u64) {
        self.failed.insert(site);
        if has_another_way(&site) {
            return;
        }
        if !comes(&|| log.names(lack(site.call))) {
            self.unlogged.push(site);
        }
        if !is_counted_elsewhere(&site) && !comes(&|| counter.failures() > before) {
            self.uncounted.push(site);
        }
    }

    /// Whether calls from a place have not failed yet and should.
    fn wants(&self, site: &Site) -> bool {
        let named = |(call, file, _): &(Call, &str, &str)| *call == site.call && site.file.ends_with(file);
        let is_rare = self.seen[site] < OFTEN && RARE.iter().any(named);
        !self.failed.contains(site) && !is_rare
    }

    fn check(&self) {
        let left = self.left();
        assert!(left.is_empty(), "calls were not made again: {left:#?}");
        assert!(
            self.unlogged.is_empty(),
            "no log line told of {:?}",
            self.unlogged
        );
        assert!(
            self.uncounted.is_empty(),
            "no counter told of {:?}",
            self.uncounted
        );
    }
}

/// What keeps a scene going.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Poke {
    /// While it is watched, or calls fail.
    Now,
    /// Before a long turn: what happens at the beginning only is to happen again.
    Anew,
}

/// Watches from where calls are made while nothing fails, until no new place comes.
fn watch(scene: &str, poke: &mut dyn FnMut(Poke)) -> BTreeMap<Site, u64> {
    let watch = Watch::begin();
    let (start, mut new) = (Instant::now(), Instant::now());
    let (mut calls, mut looks): (BTreeMap<Site, u64>, BTreeMap<Site, u64>) = Default::default();
    while new.elapsed() < WATCHED && start.elapsed() < WATCHED_AT_MOST {
        poke(Poke::Now);
        std::thread::sleep(LOOK);
        let now = watch.sites();
        if now.len() > calls.len() {
            new = Instant::now();
        }
        let is_new = |(site, count): &(&Site, &u64)| calls.get(*site) != Some(*count);
        for (site, _) in now.iter().filter(is_new) {
            *looks.entry(*site).or_default() += 1;
        }
        calls = now;
    }
    assert!(looks.len() >= FEWEST, "{scene}: little happens: {looks:?}");
    looks
}

/// Has the calls from each place that is seen fail, one place after the other. A counter and a log line must tell of it.
fn walk(scene: &str, log: &Logged, counter: &Counter, places: &mut Places, mut poke: impl FnMut(Poke)) {
    let seen = watch(scene, &mut poke);
    for (site, looks) in &seen {
        let most = places.seen.entry(*site).or_default();
        *most = (*most).max(*looks);
    }
    let mut left: Vec<Site> = seen.keys().copied().collect();
    let start = Instant::now();
    // Some are rare: they get another turn. Those that are rare in this scene may fail in another.
    let waits = |site: &Site, places: &Places| seen[site] >= OFTEN && places.wants(site);
    let goes_on = |left: &[Site], places: &Places| match start.elapsed() {
        time if time < WALKED => !left.is_empty(),
        time if time < WALKED_AT_MOST => left.iter().any(|site| waits(site, places)),
        _ => false,
    };
    while goes_on(&left, places) {
        left.retain(|site| {
            let again = places.failed.contains(site);
            let late = start.elapsed() > WALKED;
            if late && !waits(site, places) {
                return true;
            }
            if late {
                poke(Poke::Anew);
            }
            log.clear();
            let before = counter.failures();
            let injection = Injection::at(*site, lack(site.call), Times::First(2));
            let turn = match (late, again) {
                (true, _) => LONG_TURN,
                (false, true) => TURN / 4,
                (false, false) => TURN,
            };
            let begun = Instant::now();
            while injection.failed() == 0 && begun.elapsed() < turn {
                poke(Poke::Now);
                std::thread::sleep(Duration::from_millis(2));
            }
            let failed = injection.failed();
            drop(injection);
            if failed == 0 {
                return true;
            }
            eprintln!("{scene}: {site} failed {failed} times");
            places.note_failed(*site, log, counter, before);
            false
        });
    }
    let walked = seen.len() - left.len();
    eprintln!("{scene}: {walked} of {} places failed in turn", seen.len());
    for site in &left {
        eprintln!("{scene}: seen in {} looks, and not again: {site}", seen[site]);
    }
}

/// Kinds of lives.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Healed,
    Managed,
    Huge,
}

/// Has calls fail from the places that are left of the scenes, in lives that reach them, which are repeated until that happens.
fn live_through(log: &Logged, counter: &Counter, places: &mut Places) {
    if places.left().is_empty() {
        return;
    }
    vmm_dedup::share_whatever_it_costs(true);
    let mut guests = [0, 1].map(lives::Guest::new);
    let huge = Pages::map_huge(lives::HUGE);
    let mut live = |kind: Kind, when: &str| match kind {
        Kind::Healed => _ = lives::live(&mut guests, lives::HEALED, when),
        Kind::Managed => _ = lives::live(&mut guests, lives::MANAGED, when),
        Kind::Huge => _ = lives::live_huge(&huge, when),
    };
    for kind in [Kind::Healed, Kind::Managed, Kind::Huge] {
        let watch = Watch::begin();
        live(kind, "while nothing fails");
        let reached = watch.sites();
        drop(watch);
        // Small lives are short: they are repeated also for what this one did not come to.
        let may_reach = |site: &Site| !matches!(kind, Kind::Huge) || reached.contains_key(site);
        for site in places.left().into_iter().filter(may_reach) {
            log.clear();
            let before = counter.failures();
            let fails = (0..LIVES).any(|_| {
                let injection = Injection::at(site, lack(site.call), Times::First(2));
                live(kind, &site.to_string());
                injection.failed() > 0
            });
            if fails {
                eprintln!("a life, {kind:?}: {site} failed");
                places.note_failed(site, log, counter, before);
            }
        }
    }
    vmm_dedup::share_whatever_it_costs(false);
}

/// Whether something is told in time.
fn comes(is: &dyn Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !is() && begun.elapsed() < TOLD {
        std::thread::sleep(Duration::from_millis(2));
    }
    is()
}

/// Whoever adds a kind of calls says where it fails.
#[test]
fn every_kind_of_call_fails_somewhere() {
    let fails_here = |call: &Call| FAILURES.iter().any(|(fails, _)| fails == call);
    let fails_elsewhere = |call: &Call| ELSEWHERE.iter().any(|(fails, _)| fails == call);
    for call in Call::ALL {
        assert!(fails_here(&call) != fails_elsewhere(&call), "{call:?}");
    }
}

/// Every place in the engine from which a call is made while guests run.
#[test]
fn guests_go_on_wherever_a_call_fails() {
    need_kvm!();
    let log = Logged::begin();
    let (store, counter) = (StoreThread::start(), Counter::start());
    let size = Size {
        merges: 0,
        patience: PATIENCE,
        common_mib: 4,
        zero_mib: 4,
    };
    let mut guests = huge_chaos::boot(&store, size);
    let (mut pokes, mut places) = (0u64, Places::default());
    walk("windows", log, &counter, &mut places, |poke| {
        pokes += 1;
        if poke == Poke::Anew {
            // Huge pages that were split may never be built again. This process lives on, so the store would keep the connections of
            // guests that did not give their memory back, and it takes some only.
            guests.iter().for_each(|guest| _ = guest.end_dedup(true));
            let _ = huge_chaos::outcome(std::mem::take(&mut guests));
            guests = huge_chaos::boot(&store, size);
        } else if pokes.is_multiple_of(16) {
            make_private(&guests);
        }
    });
    go_on(&guests, "after calls from all places failed");
    let _ = huge_chaos::outcome(guests);
    let burn_all = |places: &mut Places| {
        for breaks in [follow_chaos::KERNEL, follow_chaos::MANAGED] {
            let scene = format!("following, {breaks:?}");
            burn(&scene, log, &counter, places, |over| {
                follow_chaos::chaos(u64::MAX, over, breaks).wrong
            });
        }
        burn("healing", log, &counter, places, |over| {
            heal_chaos::chaos(u64::MAX, over, Pins::Devices, Besides::default()).wrong
        });
    };
    burn_all(&mut places);
    live_through(log, &counter, &mut places);
    for round in 1..ROUNDS {
        if places.left().is_empty() {
            break;
        }
        eprintln!("round {round}: {:?} left", places.left());
        burn_all(&mut places);
    }
    places.check();
}

/// Walks through a scene that counts wrong words, until it is told that it is over.
fn burn(
    scene: &str,
    log: &Logged,
    counter: &Counter,
    places: &mut Places,
    fire: impl FnOnce(&dyn Fn() -> bool) -> u64 + Send,
) {
    let over = AtomicBool::new(false);
    let wrong = std::thread::scope(|scope| {
        let fire = scope.spawn(|| fire(&|| over.load(Ordering::Acquire)));
        std::thread::sleep(BEGINNING);
        // The scene ends even if the walk panics.
        let walked = catch_unwind(AssertUnwindSafe(|| walk(scene, log, counter, places, |_| ())));
        over.store(true, Ordering::Release);
        let wrong = fire.join().expect("it ends");
        walked.map(|()| wrong)
    });
    let wrong = wrong.unwrap_or_else(|panic| resume_unwind(panic));
    assert_eq!(wrong, 0, "{scene}: words are wrong");
}

/// Runs with exceptions are mapped beside the guest and moved over the guest's pages.
#[test]
fn runs_with_exceptions_are_made_whatever_call_fails() {
    need_kvm!();
    let (log, counter) = (Logged::begin(), Counter::start());
    // A refused mapping makes the service wait for some passes, so that calls that map fail a few times only.
    let (some, few) = (Times::Every(3), Times::First(FAILED));
    for (seed, (call, errno, times)) in (0..).zip([
        (Call::Copy, libc::EAGAIN, some),
        (Call::Copy, libc::EEXIST, some),
        (Call::Copy, libc::ENOMEM, some),
        (Call::Unregister, libc::ENOMEM, few),
        (Call::MapSegment, libc::ENOMEM, few),
        (Call::Remap, libc::ENOMEM, few),
    ]) {
        log.clear();
        let before = counter.failures();
        let injection = Injection::begin(call, errno, times);
        let out = guests::exceptions(seed);
        let failed = injection.failed();
        drop(injection);
        assert!(
            failed >= FAILED && log.names(errno) && counter.failures() > before,
            "{call:?}, {failed} times: {out:?}"
        );
        eprintln!(
            "{call:?} failed {failed} times: right, {} exceptions",
            out.exceptions
        );
    }
}

/// The kernel may unmap the place of what it then cannot map. (Whoever touches the hole meanwhile gets SIGSEGV, with any
/// service; so nobody does here.)
#[test]
fn holes_that_failing_calls_leave_are_mended() {
    need_userfaultfd!();
    let (log, counter) = (Logged::begin(), Counter::start());
    let store = StoreThread::start();
    for call in [Call::MapSegment, Call::Remap] {
        log.clear();
        let before = counter.failures();
        let pages = Pages::map(512);
        pages.advise(libc::MADV_DONTDUMP);
        // Equal pages with others between them, so that there are runs with exceptions.
        let id = |page: usize| if page % 4 == 3 { 1000 + page } else { page % 256 } as u64 + 1;
        (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
        let config = Config {
            cpu_percent: 100,
            pass_period_ms: 3_600_000,
            huge_policy: Policy::Ksm,
            breaks: Breaks::KERNEL,
            ..Config::default()
        };
        let twin = Pages::map(512);
        (0..twin.count()).for_each(|page| {
            twin.fill(
                page,
                if page % 4 == 3 {
                    5000 + page as u64
                } else {
                    id(page)
                },
            )
        });
        let service = pages
            .serve(&store.socket(), config.clone())
            .expect("dedup starts");
        let others = twin.serve(&store.socket(), config).expect("dedup starts");
        let injection = Injection::leaving_holes(call, libc::ENOMEM, Times::Every(2));
        let start = Instant::now();
        // A batch is a few calls, and all is merged after some batches.
        while injection.failed() < FAILED / 2 {
            assert!(
                start.elapsed() < PATIENCE,
                "{call:?} failed {} times",
                injection.failed()
            );
            let _ = (service.pass().expect("a pass"), others.pass().expect("a pass"));
            // Memory in the place of a hole is the guest's, which is not to be in core dumps.
            let dumped = flags_of(&pages).into_iter().find(|flags| !flags.contains(" dd"));
            assert_eq!(dumped, None, "{call:?}");
        }
        drop(injection);
        for page in 0..pages.count() {
            assert!(pages.holds(page, id(page)), "page {page}");
        }
        let stats = service.stop(true).expect("it stops");
        others.stop(true).expect("it stops");
        assert!(
            counter.failures() > before && log.names(libc::ENOMEM),
            "{stats:?}"
        );
        assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
    }
}
