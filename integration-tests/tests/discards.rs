//! Guests that stay served while they write, give memory up and hear of pins, loans, pauses and lost stores: every page reads what was written
//! to it last, or zeros since it was discarded. VMM_DEDUP_DISCARD_SECONDS makes each round that long.
#![allow(unsafe_code)] // guest memory

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, Error, HostRange, Lease, Options, Pack, Setup, Supervisor, Switch};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::random::Random;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{alone, need_userfaultfd};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::control::Settings;
use vmm_dedup_trouble::Watchdog;

/// Pages of a region.
const PAGES: usize = 768;
/// Pages side by side that one of two threads has which use a region: so each writes beside what the other gives up.
const GROUP: usize = 8;
/// Contents that pages have besides zeros: few, so that each has twins in both guests. Higher numbers are those of pages that have no twin,
/// and can be packed well.
const CONTENTS: u64 = 200;
/// Most pages that are written or discarded at once.
const MOST: usize = 32;
const SECONDS: u64 = 4;
/// Of a round: in each of them pages are merged and copies broken, and behind it the store is lost or hangs.
const PART: Duration = Duration::from_secs(1);
/// How long a store that is stopped stays so.
const STOPPED: Duration = Duration::from_secs(1);
/// A call may meet a store that hangs (5 s) several times.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than a part may take: a thread that waits for a page cannot be ended otherwise.
const HANGS: Duration = Duration::from_secs(180);
const STORE_AT: &str = "DISCARDS_STORE_AT";

/// A store in a process of its own, which is killed (SIGKILL) when this is dropped.
struct StoreProcess(Child);

impl StoreProcess {
    fn start(socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "a_store_for_others", "--quiet"])
            .env(STORE_AT, socket)
            // What it cannot remove goes with the folder.
            .env("TMPDIR", socket.parent().expect("a folder"))
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let store = Self(child);
        let start = Instant::now();
        while !socket.exists() {
            assert!(start.elapsed() < PATIENCE, "there is no store");
            std::thread::sleep(Duration::from_millis(5));
        }
        store
    }

    fn send(&self, signal: i32) {
        let id = i32::try_from(self.0.id()).expect("a process");
        // SAFETY: no memory is given. It was not waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    }

    fn stop_for(&self, time: Duration) {
        self.send(libc::SIGSTOP);
        std::thread::sleep(time);
        self.send(libc::SIGCONT);
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// No test by itself: what a [`StoreProcess`] runs.
#[test]
fn a_store_for_others() {
    let Some(socket) = std::env::var_os(STORE_AT) else {
        return;
    };
    // SAFETY: no memory is given. A watchdog may end the test, which stops no store then.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let store = StoreThread::start();
    std::os::unix::fs::symlink(store.socket(), socket).expect("a link");
    loop {
        std::thread::park();
    }
}

fn write(pages: &Pages, page: usize, content: u64) {
    if content <= CONTENTS {
        return pages.fill(page, content);
    }
    pages.fill(page, 0);
    pages.store(page, 9, content);
}

fn holds(pages: &Pages, page: usize, content: u64) -> bool {
    if content <= CONTENTS {
        return pages.holds(page, content);
    }
    (0..PAGE_SIZE / 8).all(|word| pages.load(page, word) == if word == 9 { content } else { 0 })
}

fn addresses(pages: &Pages, run: &Range<usize>) -> Range<usize> {
    let start = pages.address(run.start);
    start..start + run.len() * PAGE_SIZE
}

/// Random numbers below others.
struct Below(Random);

impl Below {
    fn next(&mut self, end: usize) -> usize {
        usize::try_from(self.0.next()).expect("31 bits") % end
    }

    fn rest(&mut self, most_ms: usize) {
        std::thread::sleep(Duration::from_millis(self.next(most_ms) as u64));
    }
}

struct Guest {
    supervisor: Supervisor,
    /// Whose pages two threads write, in turn by groups.
    stays: Pages,
    /// Which comes and goes.
    plugged: Pages,
}

/// Pages that a thread has for itself, and what they hold.
struct Own<'a> {
    guest: &'a Guest,
    pages: Pages,
    seed: u64,
    /// Groups of so many pages, of which it has every so manieth from one on.
    group: usize,
    every: usize,
    from: usize,
    contents: Vec<u64>,
}

impl Own<'_> {
    /// Some of them side by side.
    fn run(&self, below: &mut Below) -> Range<usize> {
        let start = (below.next(PAGES / self.group / self.every) * self.every + self.from) * self.group;
        let first = start + below.next(self.group);
        first..(first + below.next(MOST) + 1).min(start + self.group)
    }

    fn write(&mut self, run: &Range<usize>, content: u64) {
        for page in run.clone() {
            let alone = CONTENTS + 1 + self.seed * PAGES as u64 + page as u64;
            let with_twins = (content + page as u64) % CONTENTS + 1;
            self.contents[page] = if content < CONTENTS { with_twins } else { alone };
            write(&self.pages, page, self.contents[page]);
        }
    }

    fn discard(&mut self, run: &Range<usize>) {
        let range = addresses(&self.pages, run);
        let mut renewed = Vec::new();
        let discarder = self.guest.supervisor.discarder();
        // SAFETY: nobody else uses these pages.
        unsafe { discarder.discard_and_tell(range.start, range.len(), |fresh| renewed.push(fresh)) }
            .expect("it is freed");
        let is_within = |fresh: &Range<usize>| range.start <= fresh.start && fresh.end <= range.end;
        assert!(renewed.iter().all(is_within), "{renewed:x?} of {range:x?}");
        self.contents[run.clone()].fill(0);
    }

    /// Something is read from a file, and soon the same again behind a write and a discard: what was read need not rest to be merged, so
    /// the pass that hears of the first read may meet the second.
    fn read_twice(&mut self, run: &Range<usize>, below: &mut Below) {
        let content = below.next(50) as u64;
        self.write(run, content);
        self.guest.supervisor.note_read(addresses(&self.pages, run));
        below.rest(20);
        self.write(run, content + 1);
        self.discard(run);
        self.write(run, content);
    }

    /// All of it is unplugged, unmapped at once, used while nobody has heard of it, and plugged in again.
    fn replug(&mut self, below: &mut Below) {
        let all = addresses(&self.pages, &(0..PAGES));
        self.guest.supervisor.remove_range(all).expect("it goes");
        self.pages.renew();
        self.contents.fill(0);
        self.write(&(0..PAGES / 2), below.next(50) as u64);
        self.discard(&(PAGES / 4..PAGES / 3));
        below.rest(10);
        self.guest.add(&self.pages);
    }

    fn check(&self, run: Range<usize>) {
        let has = |page: &usize| page / self.group % self.every == self.from;
        for page in run.filter(has) {
            let (seed, content) = (self.seed, self.contents[page]);
            assert!(
                holds(&self.pages, page, content),
                "page {page} of {seed} is not {content}"
            );
        }
    }

    /// Writes, discards and looks at them; `done` counts what was looked at.
    fn use_them(&mut self, done: &AtomicU64, over: &AtomicBool) {
        let mut below = Below(Random(self.seed));
        while !over.load(Ordering::Relaxed) {
            let run = self.run(&mut below);
            match below.next(64) {
                0..24 => {
                    let content = below.next(250) as u64;
                    self.write(&run, content);
                }
                24..30 => self.discard(&run),
                30..44 => self.read_twice(&run, &mut below),
                // So that there is something that rests.
                44..48 => below.rest(20),
                48 if self.every == 1 => self.replug(&mut below),
                49 => self.check(0..PAGES),
                _ => {}
            }
            self.check(run.clone());
            done.fetch_add(run.len() as u64, Ordering::Relaxed);
        }
        self.check(0..PAGES);
    }
}

impl Guest {
    fn new(store: PathBuf, config: Config) -> Self {
        let options = Options {
            vouch_for_pins: true,
            ..Options::default()
        };
        let guest = Self {
            supervisor: Supervisor::spawn(options).expect("it starts"),
            stays: Pages::map(PAGES),
            plugged: Pages::map(PAGES),
        };
        let setup = Setup {
            store,
            agent: None,
            config,
        };
        guest.supervisor.attach(setup).expect("it fits");
        guest.add(&guest.stays);
        guest.add(&guest.plugged);
        guest
    }

    fn add(&self, pages: &Pages) {
        let range = HostRange::try_new(pages.address(0), PAGES * PAGE_SIZE).expect("aligned");
        // SAFETY: tests' pages stay mapped but for `replug`, which removes them first, and are only reached by volatile accesses.
        unsafe { self.supervisor.add_range(range) };
    }

    /// What three threads have of it.
    fn owns(&self, seed: u64) -> [Own<'_>; 3] {
        let own = |pages, number, group, every, from| Own {
            guest: self,
            pages,
            seed: seed + number,
            group,
            every,
            from,
            contents: vec![0; PAGES],
        };
        [
            own(self.stays, 0, GROUP, 2, 0),
            own(self.stays, 1, GROUP, 2, 1),
            own(self.plugged, 2, PAGES, 1, 0),
        ]
    }

    /// Pages that were merged, and breaks.
    fn account(&self) -> [u64; 2] {
        let stats = self.supervisor.stats();
        stats.map_or([0; 2], |stats| [stats.merges_total, stats.breaks_total()])
    }

    /// Tells the supervisor all that a VMM may; `done` counts what it was told.
    fn disturb(&self, seed: u64, done: &AtomicU64, over: &AtomicBool) {
        let supervisor = &self.supervisor;
        let mut below = Below(Random(seed));
        while !over.load(Ordering::Relaxed) {
            below.rest(60);
            match below.next(10) {
                0 => {
                    let _pinned = supervisor.pinned().expect("there is memory");
                    below.rest(10);
                }
                1 | 2 => self.lend(&mut below),
                3 => {
                    supervisor.pause();
                    below.rest(10);
                    supervisor.resume();
                }
                4 | 5 => self.set(&mut below),
                6 => supervisor.direct_io_opened().expect("nothing is open"),
                // There may be no service yet.
                _ => _ = supervisor.pass(),
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lends a part of one region.
    fn lend(&self, below: &mut Below) {
        let pages = [&self.stays, &self.plugged][below.next(2)];
        let first = below.next(PAGES);
        let range = addresses(pages, &(first..PAGES));
        let lent = self.supervisor.lend(range.clone(), Lease::UntilTakenBack);
        // It may be unplugged.
        assert!(matches!(lent, Ok(()) | Err(Error::NotAdded { .. })), "{lent:?}");
        below.rest(10);
        self.supervisor.take_back(range);
    }

    /// Changes settings, and switches merging off for a moment.
    fn set(&self, below: &mut Below) {
        let switch = Some([Switch::On, Switch::Off, Switch::OffUnmerge][below.next(3)]);
        let mut some = |least: u32, end: usize| Some(least + u32::try_from(below.next(end)).expect("few"));
        let settings = Settings {
            switch,
            cpu_percent: some(50, 50),
            reserve_pages: some(16, 1024),
            pass_period_ms: some(10, 20),
            stop_target_us: some(20, 1000),
        };
        let on = Settings {
            switch: Some(Switch::On),
            ..Settings::default()
        };
        // There may be no service yet, which begins switched on.
        let _ = self.supervisor.set(settings);
        below.rest(10);
        let _ = self.supervisor.set(on);
    }
}

/// Ends threads also where this one panics.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits for so long, and until all of these have grown.
fn wait_until_grown<const N: usize>(what: &str, time: Duration, numbers: impl Fn() -> [u64; N]) {
    let (start, before) = (Instant::now(), numbers());
    let grown = |(before, now): (&u64, u64)| now > *before;
    while start.elapsed() < time || !before.iter().zip(numbers()).all(grown) {
        let now = numbers();
        assert!(
            start.elapsed() < time + PATIENCE,
            "{what}: {before:?}, then {now:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Two guests for a while; all that they do is right, and merging goes on throughout.
fn served_all_the_time(breaks: Breaks, pack: Pack) {
    let _alone = alone();
    let seconds = std::env::var("VMM_DEDUP_DISCARD_SECONDS").ok();
    let seconds = seconds.map_or(SECONDS, |number| number.parse().expect("a number of seconds"));
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("store.sock");
    let mut store = StoreProcess::start(&socket);
    let config = Config {
        cpu_percent: 100,
        pass_period_ms: 10,
        breaks,
        pack,
        ..Config::default()
    };
    let guests = [(); 2].map(|()| Guest::new(socket.clone(), config.clone()));
    let [mut first, mut second] = [guests[0].owns(10), guests[1].owns(20)];
    let (over, done): (_, [AtomicU64; 8]) = (AtomicBool::new(false), Default::default());
    let counted = || done.each_ref().map(|done| done.load(Ordering::Relaxed));
    let watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    std::thread::scope(|scope| {
        let ends = Ends(&over);
        let (of_users, of_others) = done.split_at(6);
        for (own, done) in first.iter_mut().chain(&mut second).zip(of_users) {
            scope.spawn(|| own.use_them(done, &over));
        }
        for ((guest, done), seed) in guests.iter().zip(of_others).zip(1000..) {
            let over = &over;
            scope.spawn(move || guest.disturb(seed, done, over));
        }
        for number in 0..seconds.div_ceil(PART.as_secs()) {
            let account = || {
                let [[a, b], [c, d]] = guests.each_ref().map(Guest::account);
                [a, b, c, d]
            };
            wait_until_grown("merges and breaks", PART, account);
            wait_until_grown("what threads have done", Duration::ZERO, counted);
            watchdog.feed();
            if number % 2 == 0 {
                drop(store);
                store = StoreProcess::start(&socket);
            } else {
                store.stop_for(STOPPED);
            }
        }
        drop(ends);
    });
    for guest in &guests {
        let stats = guest.supervisor.detach(true).expect("there is memory");
        let stats = stats.expect("it was served");
        eprintln!(
            "{} merges, {} breaks, {} heals, {} packs, {} packed pages touched",
            stats.merges_total,
            stats.breaks_total(),
            stats.heals_total,
            stats.packing.packs_total,
            stats.packing.touched_total
        );
    }
    eprintln!("pages looked at, and calls: {:?}", counted());
    first.iter().chain(&second).for_each(|own| own.check(0..PAGES));
}

#[test]
fn nothing_is_lost_with_breaks_by_the_kernel() {
    need_userfaultfd!();
    served_all_the_time(
        Breaks::Kernel {
            heal_stall_us: 5000,
            heal_without_fork: true,
        },
        Pack::default(),
    );
}

#[test]
fn nothing_is_lost_with_managed_breaks() {
    need_userfaultfd!();
    served_all_the_time(Breaks::managed(1024, 0), Pack::default());
}

#[test]
fn nothing_is_lost_while_what_rests_is_packed() {
    need_userfaultfd!();
    served_all_the_time(
        Breaks::KERNEL,
        Pack {
            on: true,
            idle_ms: 30,
            ..Pack::default()
        },
    );
}
