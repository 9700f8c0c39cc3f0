//! Sharing that hides itself: what a guest can time does not tell whether a page was shared, and no page is lost.
#![allow(unsafe_code)] // raw memory
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)] // a few pages

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, Pack, Sampling, Settings, Switch};
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, huge_kib};
use vmm_dedup_integration_tests::memory::{Pages, flags_of};
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::{need_kvm, need_userfaultfd};
use vmm_dedup_payload::{PayloadConfig, WorkingSet};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_refvmm::ThpMode;
use vmm_dedup_trouble::Watchdog;

const WORDS: usize = PAGE_SIZE / 8;
/// Pages that are read first, and as many that are written first.
const TOUCHED: usize = 10_000;
const PATIENCE: Duration = Duration::from_secs(120);
const HANGS: Duration = Duration::from_secs(300);

fn config() -> Config {
    Config {
        pass_period_ms: 20,
        cpu_percent: 100,
        pack: Pack {
            idle_ms: 40,
            ..Pack::default()
        },
        ..Config::default()
    }
}

/// The generator splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn shuffle<T>(&mut self, all: &mut [T]) {
        for at in (1..all.len()).rev() {
            all.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
    }
}

fn content(id: u64, word: usize) -> u64 {
    match word {
        0 => id,
        word => Random(id ^ ((word as u64) << 40)).next(),
    }
}

fn fill(pages: &Pages, page: usize, id: u64) {
    (0..WORDS).for_each(|word| pages.store(page, word, content(id, word)));
}

fn holds(pages: &Pages, page: usize, id: u64) -> bool {
    (0..WORDS).all(|word| pages.load(page, word) == content(id, word))
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kept(service: &DedupService) -> usize {
    service.stats().packing.pages as usize
}

/// A guest that wants to know which of its pages another one has.
struct Spy {
    // Services end before their memory goes.
    service: DedupService,
    _other: (DedupService, Pages),
    pages: Pages,
    /// Which the other one has.
    shared: Vec<bool>,
    _store: StoreThread,
}

impl Spy {
    /// All of whose pages take part, as the store has it.
    fn new(store: StoreThread, random: &mut Random) -> Self {
        let (pages, others) = (Pages::map(2 * TOUCHED), Pages::map(2 * TOUCHED));
        // Half of each kind, anywhere.
        let half = |random: &mut Random| {
            let mut half: Vec<bool> = (0..TOUCHED).map(|n| n % 2 == 0).collect();
            random.shuffle(&mut half);
            half
        };
        let mut shared = half(random);
        shared.extend(half(random));
        for (page, shared) in shared.iter().enumerate() {
            // The first bit tells, for the leak that a test makes.
            let id = random.next() & !1 | u64::from(*shared);
            fill(&pages, page, id);
            fill(&others, page, if *shared { id } else { random.next() & !1 });
        }
        let other = others.serve(&store.socket(), config()).expect("dedup starts");
        let service = pages.serve(&store.socket(), config()).expect("dedup starts");
        // The ordinary way what is shared is mapped, and its neighbours stay as they are.
        let all = |service: &DedupService| {
            kept(service) == 2 * TOUCHED || service.stats().pages_mapped as usize == TOUCHED
        };
        wait_until("taking part", || all(&service) && all(&other));
        Self {
            service,
            _other: (other, others),
            pages,
            shared,
            _store: store,
        }
    }

    /// Touches pages for the first time, in random order: how long each took, in cycles.
    fn time(
        &self,
        which: std::ops::Range<usize>,
        random: &mut Random,
        touch: impl Fn(&Pages, usize),
    ) -> Times {
        let mut order: Vec<usize> = which.collect();
        random.shuffle(&mut order);
        let timed = |page: &usize| {
            // SAFETY: the instructions only tell the time, and wait for what came before.
            let now = || unsafe {
                _mm_lfence();
                let now = _rdtsc();
                _mm_lfence();
                now
            };
            let start = now();
            touch(&self.pages, *page);
            (self.shared[*page], now() - start)
        };
        Times(order.iter().map(timed).collect())
    }

    fn read(&self, random: &mut Random) -> Times {
        self.time(0..TOUCHED, random, |pages, page| _ = pages.load(page, 7))
    }

    fn write(&self, random: &mut Random) -> Times {
        self.time(TOUCHED..2 * TOUCHED, random, |pages, page| {
            pages.store(page, 7, 7)
        })
    }
}

/// Whether a page was shared, and how long its touch took; in the order of the touches.
struct Times(Vec<(bool, u64)>);

impl Times {
    fn of(&self, shared: bool) -> Vec<u64> {
        let mut times: Vec<u64> = self
            .0
            .iter()
            .filter(|time| time.0 == shared)
            .map(|time| time.1)
            .collect();
        times.sort_unstable();
        times
    }

    /// The probability that two samples of one distribution differ as much (Kolmogorov and Smirnov).
    fn p(&self) -> f64 {
        let (a, b) = (self.of(true), self.of(false));
        let below =
            |all: &[u64], time: u64| all.partition_point(|other| *other <= time) as f64 / all.len() as f64;
        let distance = |time: &u64| (below(&a, *time) - below(&b, *time)).abs();
        let most = a.iter().chain(&b).map(distance).fold(0.0, f64::max);
        let n = ((a.len() * b.len()) as f64 / (a.len() + b.len()) as f64).sqrt();
        let x = (n + 0.12 + 0.11 / n) * most;
        let sign = |k: f64| if k % 2.0 == 1.0 { 2.0 } else { -2.0 };
        let term = |k: f64| sign(k) * (-2.0 * k * k * x * x).exp();
        (1..=100).map(|k| term(f64::from(k))).sum::<f64>().clamp(0.0, 1.0)
    }

    /// How many of a hundred pages the best threshold of one half tells right in the other half.
    fn told(&self) -> f64 {
        let half = |odd: usize| -> Vec<(bool, u64)> { self.0.iter().skip(odd).step_by(2).copied().collect() };
        let mut learnt = half(0);
        learnt.sort_unstable_by_key(|time| time.1);
        let shared = learnt.iter().filter(|time| time.0).count() as f64;
        let rest = learnt.len() as f64 - shared;
        // Of each class, the share that is below.
        let (mut below, mut best) = ((0.0, 0.0), (0.0, 0, true));
        for (is_shared, time) in &learnt {
            if *is_shared {
                below.0 += 1.0 / shared;
            } else {
                below.1 += 1.0 / rest;
            }
            let gain: f64 = below.0 - below.1;
            if gain.abs() > best.0 {
                best = (gain.abs(), *time, gain > 0.0);
            }
        }
        let (_, threshold, shared_is_below) = best;
        let judged = half(1);
        let right = |class: bool| {
            let all: Vec<_> = judged.iter().filter(|time| time.0 == class).collect();
            let right = all
                .iter()
                .filter(|time| ((time.1 <= threshold) == shared_is_below) == class);
            right.count() as f64 / all.len() as f64
        };
        50.0 * (right(true) + right(false))
    }

    fn show(&self, what: &str) -> (f64, f64) {
        let mut all: Vec<u64> = self.0.iter().map(|time| time.1).collect();
        all.sort_unstable();
        let at = |percent: usize| all[(all.len() - 1) * percent / 100];
        let (p, told) = (self.p(), self.told());
        eprintln!(
            "{what}: p50 {} p99 {} cycles; shared {} others {} (p50); two samples p = {p:.4}; threshold {told:.2} %",
            at(50),
            at(99),
            self.of(true)[self.of(true).len() / 2],
            self.of(false)[self.of(false).len() / 2],
        );
        (p, told)
    }
}

/// What cannot be told apart at one in a hundred, and by a threshold no better than by chance.
fn is_hidden((p, told): (f64, f64)) -> bool {
    p >= 0.01 && (told - 50.0).abs() <= 2.0
}

/// One of a hundred samples of what is the same seems to differ. So what seems to is looked at once more, with other pages: what does
/// differ does so again.
fn is_hidden_at_last(what: &str, seed: u64, times: impl Fn(&Spy, &mut Random) -> Times) -> bool {
    (0..2).any(|again| {
        let mut random = Random(seed + again);
        let spy = Spy::new(StoreThread::secure(), &mut random);
        is_hidden(times(&spy, &mut random).show(what))
    })
}

#[test]
fn what_a_guest_can_time_does_not_tell_whether_a_page_was_shared() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let mut random = Random(1);
    let spy = Spy::new(StoreThread::secure(), &mut random);
    let read = spy.read(&mut random).show("secure, first read");
    let write = spy.write(&mut random).show("secure, first write");
    assert_eq!(spy.service.stats().pages_mapped, 0);
    drop(spy);
    assert!(
        is_hidden(read) || is_hidden_at_last("secure, first read", 11, Spy::read),
        "{read:?}"
    );
    assert!(
        is_hidden(write) || is_hidden_at_last("secure, first write", 21, Spy::write),
        "{write:?}"
    );
}

#[test]
fn a_leak_would_be_found() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let mut random = Random(3);
    let spy = Spy::new(StoreThread::secure(), &mut random);
    vmm_dedup::delay_by_first_bit(3_000);
    let read = spy.read(&mut random).show("3 us longer where shared, first read");
    let write = spy
        .write(&mut random)
        .show("3 us longer where shared, first write");
    vmm_dedup::delay_by_first_bit(0);
    assert!(!is_hidden(read) && !is_hidden(write), "{read:?} {write:?}");
}

#[test]
fn without_the_mode_a_guest_can_tell() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let mut random = Random(5);
    let spy = Spy::new(StoreThread::start(), &mut random);
    assert_eq!(spy.service.stats().pages_mapped as usize, TOUCHED);
    let read = spy.read(&mut random).show("ordinary, first read");
    let write = spy.write(&mut random).show("ordinary, first write");
    assert!(!is_hidden(write) && write.1 > 60.0, "{write:?}, and {read:?}");
}

/// Two guests of so many pages each, of which the first so many have the same content in both; all of it in slots.
fn two(count: usize, same: usize) -> (StoreThread, [(Pages, DedupService); 2]) {
    let store = StoreThread::secure();
    let guests = [0u64, 1].map(|guest| {
        let pages = Pages::map(count);
        (0..count).for_each(|page| fill(&pages, page, id(guest, page, same)));
        let service = pages.serve(&store.socket(), config()).expect("dedup starts");
        (pages, service)
    });
    for (_, service) in &guests {
        wait_until("taking part", || kept(service) == count);
    }
    (store, guests)
}

fn id(guest: u64, page: usize, same: usize) -> u64 {
    let guest = if page < same { 7 } else { guest };
    (guest << 32 | page as u64) << 1
}

#[test]
fn every_idle_page_is_emptied_and_the_account_is_of_what_is_shared() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (store, guests) = two(768, 256);
    wait_until("the account", || store.metric("pages_shared") == 2 * 768 - 256);
    assert_eq!(store.metric("secure"), 1);
    assert_eq!(store.metric("pages_sharing"), 256);
    for (number, (pages, service)) in (0..).zip(&guests) {
        let stats = service.stats();
        assert_eq!(
            (stats.pages_mapped, stats.pages_zero, stats.packing.bytes),
            (0, 0, 0)
        );
        let flags = flags_of(pages);
        assert!(flags.iter().any(|flags| flags.contains(" um")), "{flags:?}");
        (0..768).for_each(|page| assert!(holds(pages, page, id(number, page, 256)), "page {page}"));
    }
    // Touched, so that each has memory of its own; no slot is in use until they rest again.
    for (_, service) in &guests {
        service.pass().expect("a pass");
    }
    wait_until("all taking part again", || {
        guests.iter().all(|(_, service)| kept(service) == 768)
    });
    wait_until("the account", || store.metric("pages_shared") == 2 * 768 - 256);
    for (pages, service) in guests {
        service.stop(true).expect("it stops");
        assert!(flags_of(&pages).iter().all(|flags| !flags.contains(" um")));
    }
    wait_until("all given back", || {
        store.metric("pages_shared") == 0 && store.metric("orphans") == 0
    });
}

/// Whatever they hold: all but the pages by which their use is sampled.
#[test]
fn idle_huge_pages_take_part() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (count, probes) = (2 * HUGE_PAGES, 2 * 4);
    let store = StoreThread::secure();
    let config = Config {
        sampling: Sampling {
            interval_ms: 50,
            ..Sampling::default()
        },
        ..config()
    };
    let guests = [0u64, 1].map(|guest| {
        let pages = Pages::map_huge(count);
        (0..count).for_each(|page| fill(&pages, page, id(guest, page, HUGE_PAGES)));
        if huge_kib(&pages) == 0 {
            eprintln!("SKIPPED: this host gives no huge pages");
            return None;
        }
        let service = pages
            .serve(&store.socket(), config.clone())
            .expect("dedup starts");
        Some((pages, service))
    });
    let [Some(a), Some(b)] = guests else { return };
    for (number, (pages, service)) in (0..).zip([&a, &b]) {
        wait_until("taking part", || kept(service) == count - probes);
        assert_eq!(service.stats().huge_splits_total, 2);
        (0..count).for_each(|page| assert!(holds(pages, page, id(number, page, HUGE_PAGES)), "page {page}"));
    }
}

/// What the frames of pages of this process are, by their addresses.
fn frames(addresses: impl Iterator<Item = usize>) -> Vec<u64> {
    use std::os::unix::fs::FileExt;
    let pagemap = std::fs::File::open("/proc/self/pagemap").expect("/proc is there");
    let frame = |address: usize| {
        let mut entry = [0; 8];
        pagemap
            .read_exact_at(&mut entry, (address / PAGE_SIZE * 8) as u64)
            .expect("it is mapped");
        u64::from_ne_bytes(entry) & ((1 << 55) - 1)
    };
    addresses.map(frame).collect()
}

/// Where this process maps slots of the store for reading: the first words of their pages, and their addresses.
fn slots() -> HashMap<u64, usize> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is there");
    let mut slots = HashMap::new();
    for line in maps
        .lines()
        .filter(|line| line.contains("memfd:vmm-dedup") && line.contains(" r--s "))
    {
        let (start, end) = line
            .split_once(' ')
            .and_then(|(range, _)| range.split_once('-'))
            .expect("a range");
        let number = |text| usize::from_str_radix(text, 16).expect("hexadecimal");
        for address in (number(start)..number(end)).step_by(PAGE_SIZE) {
            // SAFETY: a page that is mapped for reading, of a store that this process runs.
            let first = unsafe { std::ptr::read_volatile(address as *const u64) };
            slots.entry(first).or_insert(address);
        }
    }
    slots
}

#[test]
fn no_frame_of_a_guest_becomes_a_shared_one() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let store = StoreThread::secure();
    let pages = Pages::map(256);
    (0..256).for_each(|page| fill(&pages, page, id(1, page, 0)));
    let before = frames((0..256).map(|page| pages.address(page)));
    let service = pages.serve(&store.socket(), config()).expect("dedup starts");
    wait_until("taking part", || kept(&service) == 256);
    let slots = slots();
    let places: Vec<usize> = (0..256).map(|page| slots[&id(1, page, 0)]).collect();
    let after = frames(places.iter().copied());
    if before[0] == 0 {
        return eprintln!("the kernel does not tell frames to this user");
    }
    // A slot was written while its page was there still.
    assert!(
        before
            .iter()
            .zip(&after)
            .all(|(before, after)| before != after && *after != 0)
    );
    // Slots do not lie as the pages did: neighbours are neighbours by chance only.
    let neighbours = places
        .windows(2)
        .filter(|two| two[1] == two[0] + PAGE_SIZE)
        .count();
    assert!(neighbours < 16, "{neighbours}");
}

#[test]
fn a_store_that_is_gone_takes_no_page_with_it() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (store, [(pages, service), (others, other)]) = two(768, 256);
    let store = store.restart_secure();
    // Some while the store is another, and the rest is brought back.
    (0..100).for_each(|page| assert!(holds(&pages, page, id(0, page, 256)), "page {page}"));
    (0..100).for_each(|page| fill(&others, page, id(9, page, 0)));
    wait_until("coming back, and taking part again", || {
        store.metric("pages_shared") == 2 * 768 - 156 && kept(&service) == 768 && kept(&other) == 768
    });
    drop(store);
    (0..768).for_each(|page| assert!(holds(&pages, page, id(0, page, 256)), "page {page}"));
    (0..100).for_each(|page| assert!(holds(&others, page, id(9, page, 0)), "page {page}"));
    (100..768).for_each(|page| assert!(holds(&others, page, id(1, page, 256)), "page {page}"));
    other.stop(true).expect("it stops");
    service.stop(false).expect("it stops");
    assert!(flags_of(&pages).iter().all(|flags| !flags.contains(" um")));
}

#[test]
fn a_service_does_not_change_its_way_for_another_store() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    (0..64).for_each(|page| fill(&pages, page, page as u64 / 2));
    let service = pages.serve(&store.socket(), config()).expect("dedup starts");
    wait_until("sharing", || service.stats().pages_mapped == 64);
    let _store = store.restart_secure();
    std::thread::sleep(Duration::from_millis(500));
    let stats = service.pass().expect("a pass");
    assert_eq!((stats.state, stats.packing.pages), (3, 0), "without a store");
    assert!((0..64).all(|page| holds(&pages, page, page as u64 / 2)));
}

#[test]
fn nothing_is_lost_under_fire() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    const COUNT: usize = 600;
    let store = StoreThread::secure();
    let guests: Vec<(Pages, DedupService)> = (0..2)
        .map(|_| {
            let pages = Pages::map(COUNT);
            (0..COUNT).for_each(|page| fill(&pages, page, page as u64 % 50));
            let service = pages.serve(&store.socket(), config()).expect("dedup starts");
            (pages, service)
        })
        .collect();
    let stop = AtomicBool::new(false);
    let touched = |service: &DedupService| service.stats().packing.touched_total;
    std::thread::scope(|scope| {
        for (number, (pages, service)) in guests.iter().enumerate() {
            let stop = &stop;
            scope.spawn(move || {
                let discarder = service.discarder();
                let mut random = Random(number as u64);
                let mut held: Vec<Option<u64>> = (0..COUNT).map(|page| Some(page as u64 % 50)).collect();
                while !stop.load(Ordering::Relaxed) {
                    let page = (random.next() % COUNT as u64) as usize;
                    match held[page] {
                        Some(id) => assert!(holds(pages, page, id), "page {page}"),
                        None => assert!((0..WORDS).all(|word| pages.load(page, word) == 0), "page {page}"),
                    }
                    match random.next() % 8 {
                        0 => {
                            // SAFETY: the test's own memory, whose content is not needed any more.
                            unsafe { discarder.discard(pages.address(page), PAGE_SIZE) }
                                .expect("it is discarded");
                            held[page] = None;
                        }
                        1..4 => {
                            let id = random.next() % 50;
                            fill(pages, page, id);
                            held[page] = Some(id);
                        }
                        _ => {}
                    }
                    std::thread::sleep(Duration::from_micros(1500));
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(12) {
            let (_, service) = &guests[usize::from(start.elapsed().as_millis().is_multiple_of(2))];
            service.pause();
            std::thread::sleep(Duration::from_millis(20));
            service.resume();
            std::thread::sleep(Duration::from_millis(400));
            let switch = |switch| Settings {
                switch: Some(switch),
                ..Settings::default()
            };
            if start.elapsed().as_secs() % 4 == 3 {
                service.set(switch(Switch::OffUnmerge)).expect("it is set");
                service.set(switch(Switch::On)).expect("it is set");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let all: Vec<u64> = guests.iter().map(|(_, service)| touched(service)).collect();
    assert!(all.iter().all(|touched| *touched > 100), "{all:?}");
    for (_, service) in guests {
        assert_eq!(service.stop(true).expect("it stops").packing.broken_total, 0);
    }
    wait_until("all given back", || store.metric("pages_shared") == 0);
}

/// Most of the store's pages die, and the rest lies in segments that go; and that again, in segments that have the same numbers.
#[test]
fn records_follow_slots_and_memory_returns() {
    const COUNT: usize = 2 * 4096;
    /// Pages that die or live together, of which one in so many lives.
    const EXTENT: usize = 64;
    const LIVES: usize = 8;
    /// A walk through what dies brings up to 16 pages back ahead of it.
    const STAY: usize = COUNT / LIVES / 4 * 3;
    const ROUNDS: usize = 3;
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (store, guests) = two(COUNT, COUNT);
    let dead = id(9, 0, 0);
    let mut contents: Vec<u64> = (0..COUNT).map(|page| id(0, page, COUNT)).collect();
    let write = |contents: &mut [u64], page: usize, id: u64| {
        contents[page] = id;
        guests.iter().for_each(|(pages, _)| fill(pages, page, id));
    };
    let mut random = Random(31);
    for round in 0..ROUNDS {
        for page in (0..COUNT).filter(|_| round > 0) {
            if contents[page] == dead {
                write(&mut contents, page, id(10 + round as u64, page, 0));
            }
        }
        for (_, service) in &guests {
            wait_until("taking part", || kept(service) == COUNT);
        }
        let (full, moved) = (store.metric("resident_bytes"), store.metric("moved_total"));
        for page in (0..COUNT).filter(|page| page / EXTENT % LIVES != round) {
            write(&mut contents, page, dead);
        }
        let start = Instant::now();
        wait_until("memory to return", || {
            // They follow where they are, and are not brought back instead.
            assert!(kept(&guests[1].1) >= STAY, "{}", kept(&guests[1].1));
            // Some of the other guest are touched meanwhile.
            let page = random.next() as usize % COUNT;
            assert!(holds(&guests[0].0, page, contents[page]), "page {page}");
            let in_use = store.metric("pages_shared") * PAGE_SIZE as u64;
            let resident = store.metric("resident_bytes");
            let moved = store.metric("moved_total") - moved;
            let still = store.metric("segments_leaving") + store.metric("segments_held");
            let done = moved > 0
                && still == 0
                && resident < full / 2
                && resident * 100 <= in_use * 115 + (800 << 20);
            if done {
                let took = start.elapsed();
                eprintln!("{full} -> {resident} for {in_use} in use, {moved} moved, in {took:?}");
            }
            done
        });
    }
    for (pages, service) in guests {
        for (page, id) in contents.iter().enumerate() {
            assert!(holds(&pages, page, *id), "page {page}");
        }
        assert_eq!(service.stop(true).expect("it stops").packing.broken_total, 0);
    }
    wait_until("all given back", || store.metric("pages_shared") == 0);
}

/// Guests on KVM write and read pages that lie in the store, and verify all of their memory in the end.
#[test]
fn guests_find_every_word_that_they_wrote() {
    need_kvm!();
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("a guest hangs"));
    let store = StoreThread::secure();
    let guests = [1, 2].map(|seed| {
        let payload = PayloadConfig::default()
            .seed(seed)
            .private_mib(2)
            .zero_mib(4)
            .common_mib(8)
            .ws_area(WorkingSet::All)
            .ws_pages(1024)
            .rate(1000)
            .seconds(1_000_000);
        let config = Config {
            name: format!("guest-{seed}"),
            ..config()
        };
        Guest::boot(payload, 32, ThpMode::Never, Some((&store.socket(), config)))
    });
    let touched = |guest: &Guest| guest.stats().packing.touched_total;
    wait_until("sharing, and coming back", || {
        store.metric("pages_sharing") >= 1024 && guests.iter().all(|guest| touched(guest) > 500)
    });
    let sharing = store.metric("pages_sharing");
    for guest in guests {
        assert!(guest.progress() > 0);
        let (verdict, stats) = guest.finish();
        let touched = stats.packing.touched_total;
        eprintln!("{sharing} not kept again, {touched} touched: {verdict:?}");
        assert!(verdict.ok && verdict.errors == 0, "{verdict:?}");
        assert_eq!((stats.pages_mapped, stats.packing.broken_total), (0, 0));
        // It wrote, and read to verify, what was in the store.
        assert!(touched > 1024, "{stats:?}");
    }
    wait_until("all given back", || store.metric("pages_shared") == 0);
}
