//! Packing of memory of the test's own, with the rebuilding thread and without a service.
#![allow(unsafe_code)] // raw pages
#![allow(clippy::cast_possible_truncation)] // a few pages

use super::packer::Brought;
use super::*;
use crate::memory::layout::{HostRange, Memory, Page};
use crate::memory::page_map::PageMap;
use crate::memory::page_state::{Backing, PageState};
use crate::sys::inject::{Call, Injection, Site, Times, Watch};
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma::{self, Anonymous};
use crate::unmerge::cow::Breaker;
use crate::unmerge::discard::{Discarder, Discards};
use crate::window::{PageSet, Scratch, Taken, Window};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::key::Key;
use vmm_dedup_trouble::Watchdog;

const PAGES: usize = 96;
const WORDS: usize = PAGE_SIZE / 8;
const IDLE: Duration = Duration::from_millis(10);
/// A thread that waits for a page for ever cannot be ended otherwise.
const PATIENCE: Duration = Duration::from_secs(60);

/// A word of a page's content: most are equal, so that it packs well.
fn content(page: usize, word: usize, round: u64) -> u64 {
    match word % 16 {
        3 => page as u64 ^ round << 32,
        7 => (word as u64 + round).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        _ => 0x1111,
    }
}

/// "Guest" memory, and whoever packs it.
struct Guest {
    area: Anonymous,
    map: PageMap,
    pagemap: Pagemap,
    tracker: Arc<Uffd>,
    packer: Arc<Packer>,
    packing: Packing,
    server: Option<JoinHandle<()>>,
}

impl Guest {
    /// `None`, said aloud, where there is no userfaultfd.
    fn new() -> Option<Self> {
        let Ok(tracker) = Uffd::tracker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            eprintln!("SKIPPED: no userfaultfd");
            return None;
        };
        let (tracker, area) = (Arc::new(tracker), Anonymous::new(PAGES).unwrap());
        let range = HostRange::try_new(area.base(), bytes(PAGES)).unwrap();
        let memory = Arc::new(Memory::new(&[range]).unwrap());
        tracker.register(area.base(), bytes(PAGES), Mode::Wp).unwrap();
        let packer = Arc::new(Packer::new(tracker.clone(), memory.clone()).unwrap());
        let (server, _) = Server::of(packer.clone());
        let guest = Self {
            map: PageMap::new(memory, 1000, 0),
            pagemap: Pagemap::open().unwrap(),
            packing: Packing::new(packer.clone(), IDLE, 1000).unwrap(),
            server: Some(std::thread::spawn(move || server.serve())),
            area,
            tracker,
            packer,
        };
        (0..PAGES).for_each(|page| guest.fill(page, 0));
        Some(guest)
    }

    fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        word_at(self.area.base(), page, word)
    }

    fn fill(&self, page: usize, round: u64) {
        (0..WORDS).for_each(|word| {
            self.word(page, word)
                .store(content(page, word, round), Ordering::Relaxed)
        });
    }

    fn holds(&self, page: usize, round: u64) -> bool {
        (0..WORDS).all(|word| self.word(page, word).load(Ordering::Relaxed) == content(page, word, round))
    }

    fn prepare(&mut self, pages: &[Page]) {
        let key = Key::try_new(7).unwrap();
        for page in pages {
            if self.map.backing(*page) == Backing::Private {
                self.map.sight(*page, key, 1);
            }
        }
        self.packing.prepare(&self.map, pages);
    }

    /// Packs pages; how many were.
    fn pack(&mut self, pages: impl IntoIterator<Item = Page>) -> u64 {
        let pages: Vec<Page> = pages.into_iter().collect();
        let mut packed = 0;
        // The windows of a pass lie in one chunk each.
        for pages in pages
            .chunk_by(|a, b| self.map.chunk_of(*a) == self.map.chunk_of(*b))
            .map(<[_]>::to_vec)
            .collect::<Vec<_>>()
        {
            for window in pages.chunks(WINDOW) {
                self.prepare(window);
                packed += self.packing.pack(&mut self.map, &mut self.pagemap, 1).packed;
            }
        }
        self.packing.clean_up();
        packed
    }

    /// Pages that hold memory in the guest.
    fn populated(&mut self) -> usize {
        let all = self.area.base()..self.area.base() + bytes(PAGES);
        let found = self.pagemap.populated(all).unwrap();
        found.iter().map(|range| range.len() / PAGE_SIZE).sum()
    }

    fn take_home(&mut self) {
        self.packing.take_home(&mut self.map);
    }

    /// Ends the rebuilding thread, as a service does.
    fn end(&mut self) {
        self.packer.end();
        self.server.take().unwrap().join().unwrap();
    }

    /// Nothing is packed or registered with the packer: it is memory as any other.
    fn assert_is_all_back(&mut self) {
        let figures = self.packer.figures();
        assert_eq!((figures.pages, figures.bytes), (0, 0));
        let other = Uffd::packer().unwrap();
        let (start, len) = (self.area.base(), bytes(PAGES));
        self.tracker.unregister(start, len).unwrap();
        other
            .register(start, len, Mode::Missing)
            .expect("nobody else has it registered");
    }
}

fn word_at(base: usize, page: usize, word: usize) -> &'static AtomicU64 {
    // SAFETY: mapped for as long as the test uses it, aligned, and only ever used as this.
    unsafe { &*((base + bytes(page) + word * 8) as *const AtomicU64) }
}

fn all_hold(base: usize, mut pages: std::ops::Range<usize>) -> bool {
    pages.all(|page| {
        (0..WORDS).all(|word| word_at(base, page, word).load(Ordering::Relaxed) == content(page, word, 0))
    })
}

#[test]
fn packed_pages_hold_no_memory_and_come_back_as_they_were() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    assert_eq!(guest.pack(0..PAGES as Page), PAGES as u64);
    assert_eq!(guest.populated(), 0);
    let figures = guest.packer.figures();
    assert_eq!((figures.pages, figures.packs), (PAGES as u64, PAGES as u64));
    assert_eq!(guest.map.counts().packed, PAGES as u64);
    // In no order.
    for page in (0..PAGES).map(|n| n * 35 % PAGES) {
        assert!(guest.holds(page, 0), "page {page}");
    }
    assert_eq!(guest.packer.figures().touched, PAGES as u64);
    guest.take_home();
    assert_eq!((guest.map.counts().packed, guest.map.vmas()), (0, 0));
    assert_eq!(guest.packing.early(), PAGES as u64);
    guest.assert_is_all_back();
}

#[test]
fn writes_to_packed_pages_are_kept_and_tracked_when_they_are_home() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack([3, 4, 9]);
    guest.fill(4, 7);
    guest.take_home();
    assert_eq!(guest.map.state(4), PageState::UNTRACKED);
    let at = guest.area.base() + bytes(4);
    guest
        .tracker
        .write_protect(at, PAGE_SIZE, true)
        .expect("it is the tracker's again");
    assert_eq!([3, 9].map(|page| guest.map.backing(page)), [Backing::Packed; 2]);
    assert!(guest.holds(3, 0) && guest.holds(4, 7) && guest.holds(9, 0));
}

#[test]
fn what_is_written_after_it_was_prepared_stays() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.prepare(&[1, 2, 3]);
    guest.word(2, 500).store(99, Ordering::Relaxed);
    let done = guest.packing.pack(&mut guest.map, &mut guest.pagemap, 1);
    assert_eq!((done.packed, done.pinned), (2, 0));
    assert_eq!(guest.map.state(2), PageState::UNTRACKED);
    assert_eq!(guest.word(2, 500).load(Ordering::Relaxed), 99);
    guest.word(2, 500).store(content(2, 500, 0), Ordering::Relaxed);
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

#[test]
fn places_that_are_given_up_are_zeros_whether_their_page_is_packed_or_back() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(10..20);
    assert!(guest.holds(15, 0), "this one is back");
    guest.packer.discard(&(12..18));
    vma::discard_own(guest.area.base() + bytes(12), bytes(6)).unwrap();
    assert!((12..18).all(|page| guest.word(page, 7).load(Ordering::Relaxed) == 0));
    guest.fill(13, 5);
    guest.take_home();
    assert!(guest.holds(13, 5) && (10..12).chain(18..20).all(|page| guest.holds(page, 0)));
    assert!((12..18).all(|page| guest.map.state(page) == PageState::UNTRACKED));
    guest.end();
    guest.assert_is_all_back();
}

#[test]
fn the_end_brings_everything_back_without_the_scanning_thread() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..PAGES as Page);
    guest.packer.discard(&(5..6));
    guest.end();
    guest.assert_is_all_back();
    assert!(
        (0..PAGES)
            .filter(|page| *page != 5)
            .all(|page| guest.holds(page, 0))
    );
    assert_eq!(guest.packer.figures().brought_back, PAGES as u64 - 1);
}

#[test]
fn a_panic_of_the_rebuilding_thread_lets_nobody_wait_for_ever() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..40);
    for page in [0, 17, 30] {
        guest.packer.panics.store(2, Ordering::Relaxed);
        assert!(guest.holds(page, 0));
        assert_eq!(guest.packer.panics.load(Ordering::Relaxed), 0);
    }
    guest.packer.panics.store(2, Ordering::Relaxed);
    guest.end();
    guest.assert_is_all_back();
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

/// The kernel lets whoever asks fill an empty place, also where another userfaultfd has it registered.
#[test]
fn a_fault_that_is_read_late_fills_no_place_that_is_not_the_packers_any_more() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..8);
    assert!(guest.packer.bring_back(&(0..8), Duration::MAX));
    guest.take_home();
    // A page is away in a window of merging.
    let mut scratch = Scratch::new(guest.tracker.clone()).unwrap();
    let place = scratch.place(8);
    let pages = PageSet::of(std::iter::once(0..8));
    let mut window = Window::open(&guest.tracker, guest.area.base(), place, &pages).unwrap();
    window.take(0..8);
    assert_eq!(window.became(0..8), [Taken::Yes; 8]);
    let packer = guest.packer.clone();
    let brought = packer.bring(&mut packer.lock(), 3, true);
    assert_eq!(
        (brought, packer.uffd.filled(window.address(3))),
        (Brought::WasThere, false)
    );
    window.close();
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

/// As a VMM does that maps something else there without telling.
#[test]
#[allow(unsafe_code)] // maps memory over the guest's
fn memory_that_replaced_a_packed_page_gets_no_old_bytes() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..8);
    let address = guest.area.base() + bytes(3);
    // SAFETY: a page of the test's own area, to which there are no references.
    unsafe { vma::renew(address, PAGE_SIZE) }.unwrap();
    assert!(guest.packer.bring_back(&(3..4), Duration::MAX));
    assert!((0..WORDS).all(|word| guest.word(3, word).load(Ordering::Relaxed) == 0));
    guest.fill(3, 0);
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

#[test]
fn what_lacks_memory_stays_packed_and_comes_back_later() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    // Whether it is short for the page itself, or for what the page is copied from.
    for errno in [libc::ENOMEM, libc::EFAULT] {
        guest.pack(0..8);
        let lack = Injection::begin(Call::Copy, errno, Times::Always);
        assert!(!guest.packer.bring_back(&(0..8), IDLE));
        drop(lack);
        assert_eq!((guest.packer.figures().pages, guest.populated()), (8, PAGES - 8));
        assert!(guest.packer.bring_back(&(0..8), IDLE));
        guest.take_home();
    }
    assert_eq!(guest.packer.figures().broken, 0);
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

/// Whoever waits for a page must not wait for memory as well.
#[test]
fn without_memory_for_what_is_packed_no_page_is_taken() {
    let Some(mut guest) = Guest::new() else { return };
    let lack = Injection::begin(Call::MapAnonymous, libc::ENOMEM, Times::Always);
    let watch = Watch::begin();
    assert_eq!(guest.pack(0..8), 0);
    let calls: Vec<Call> = watch.sites().into_keys().map(|site| site.call).collect();
    assert!(calls.contains(&Call::MapAnonymous), "{calls:?}");
    assert!(!calls.contains(&Call::Move), "{calls:?}");
    drop((watch, lack));
    assert_eq!(guest.pack(0..8), 8);
}

/// What is given up in the middle of a window leaves its neighbours their own bytes.
#[test]
fn pages_of_a_window_are_packed_although_one_is_no_candidate_any_more() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.prepare(&[0, 1, 2, 3]);
    assert!(guest.map.note_written(1, true));
    let packed = guest.packing.pack(&mut guest.map, &mut guest.pagemap, 1);
    assert_eq!(packed.packed, 3);
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

/// A VMM that unmaps memory of a service whose scanning thread has died.
#[test]
#[allow(unsafe_code)] // maps memory over the guest's
fn memory_that_is_forgotten_is_nobodys_to_fill() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..8);
    let place = guest.area.base() + bytes(2)..guest.area.base() + bytes(6);
    let memory = guest.map.memory().clone();
    let discards = Arc::new(Discards::new(memory.clone(), guest.map.in_file()));
    let breaker = Arc::new(Breaker::new(guest.tracker.clone(), memory, None).unwrap());
    Discarder::of(discards, breaker, Some(guest.packer.clone())).forget(place.start, place.len());
    // SAFETY: pages of the test's own area, to which there are no references.
    unsafe { vma::renew(place.start, place.len()) }.unwrap();
    // Somebody else who waits for what is missing there.
    let other = Uffd::packer().unwrap();
    other.register(place.start, place.len(), Mode::Missing).unwrap();
    assert_eq!(guest.packer.figures().pages, 4);
    guest.end();
    assert!(!other.filled(place.start) && !other.filled(place.end - PAGE_SIZE));
    other.unregister(place.start, place.len()).unwrap();
    assert!([0, 1, 6, 7].iter().all(|page| guest.holds(*page, 0)));
    assert!((2..6).all(|page| guest.word(page, 0).load(Ordering::Relaxed) == 0));
}

#[test]
fn a_panic_while_pages_are_compared_leaves_the_guest_whole() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.packer.panics_comparing.store(3, Ordering::Relaxed);
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| guest.pack(0..8)));
    assert!(died.is_err());
    // Some were packed before.
    assert!(guest.packer.figures().pages > 0);
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
    guest.end();
    guest.assert_is_all_back();
    assert!((0..PAGES).all(|page| guest.holds(page, 0)));
}

#[test]
fn a_page_whose_bytes_broke_becomes_a_memory_error_and_never_other_bytes() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..4);
    guest.packer.lock().table.break_bytes(2);
    assert!(guest.packer.bring_back(&(0..4), Duration::MAX));
    assert_eq!(guest.packer.figures().broken, 1);
    let mut words = [0u64; 1];
    let at = |page: usize| libc::iovec {
        iov_base: (guest.area.base() + bytes(page)) as *mut _,
        iov_len: 8,
    };
    let mut read = |page: usize| {
        let local = libc::iovec {
            iov_base: words.as_mut_ptr().cast(),
            iov_len: 8,
        };
        // SAFETY: both buffers are there; the kernel says so if one of them cannot be read.
        let got = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &at(page), 1, 0) };
        (got, words[0])
    };
    assert_eq!(read(1), (8, content(1, 0, 0)));
    assert_eq!(read(2).0, -1, "it is poisoned");
}

#[test]
fn a_touch_waits_for_memory_and_gets_its_page() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    guest.pack(0..4);
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    std::thread::scope(|scope| {
        let base = guest.area.base();
        let reader = scope.spawn(move || all_hold(base, 2..3));
        let begin = Instant::now();
        while lack.failed() < 5 {
            assert!(begin.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!reader.is_finished());
        // Somebody else gives memory up meanwhile, and is not held up.
        guest.packer.discard(&(0..1));
        drop(lack);
        assert!(reader.join().unwrap());
    });
}

/// A life: pages are packed, read, written, given up, brought back; everything ends. Whatever fails, bytes are right.
fn live(mut guest: Guest, when: &str) -> u64 {
    let base = guest.area.base();
    let mut packed = guest.pack(0..48);
    let reader = std::thread::spawn(move || all_hold(base, 0..16));
    packed += guest.pack(48..PAGES as Page);
    assert!(reader.join().unwrap(), "{when}: a reader");
    (16..24).for_each(|page| guest.fill(page, 3));
    guest.take_home();
    {
        guest.packer.discard(&(24..32));
        // Only what the VMM does in its own thread.
        // SAFETY: memory of the test's own.
        unsafe { libc::madvise((base + bytes(24)) as *mut _, bytes(8), libc::MADV_DONTNEED) };
    }
    packed += guest.pack(0..8);
    assert!(guest.packer.bring_back(&(32..40), Duration::MAX));
    guest.take_home();
    // What could not be done is done later.
    guest.take_home();
    let right = |guest: &Guest, when: &str| {
        for page in 0..PAGES {
            let right = match page {
                16..24 => guest.holds(page, 3),
                24..32 => (0..WORDS).all(|word| guest.word(page, word).load(Ordering::Relaxed) == 0),
                _ => guest.holds(page, 0),
            };
            assert!(right, "{when}: page {page}");
        }
    };
    right(&guest, when);
    guest.pack(40..60);
    guest.end();
    right(&guest, when);
    assert_eq!(guest.packer.figures().pages, 0, "{when}");
    packed
}

fn errnos(call: Call) -> [i32; 2] {
    let lack = match call {
        Call::Wake | Call::Schedule => libc::EINVAL,
        Call::PollFaults => libc::EINTR,
        Call::Mincore => libc::EAGAIN,
        _ => libc::ENOMEM,
    };
    let busy = match call {
        Call::Move | Call::Register => libc::EBUSY,
        Call::Copy | Call::ZeroPage => libc::EEXIST,
        Call::PagemapScan | Call::Poison => libc::EFAULT,
        _ => libc::EAGAIN,
    };
    [lack, busy]
}

#[test]
fn whichever_call_fails_every_byte_is_right() {
    // Whoever reads meanwhile has windows end early, beside other work now and then nearly all of them.
    let mut lives = 0;
    let sites: BTreeMap<Site, u64> = loop {
        let Some(guest) = Guest::new() else { return };
        let watch = Watch::begin();
        let packed = live(guest, "nothing fails");
        lives += 1;
        if packed >= 64 {
            break watch.sites();
        }
        assert!(lives < 20, "{packed}");
    };
    let within = |site: &Site| !site.file.ends_with("tests.rs");
    let sites: Vec<(Site, u64)> = sites.into_iter().filter(|(site, _)| within(site)).collect();
    assert!(sites.len() >= 20, "{sites:?}");
    let mut failed = 0;
    for (site, count) in sites {
        for errno in errnos(site.call) {
            for times in [Times::Nth(1), Times::Nth(count.div_ceil(2)), Times::Every(3)] {
                let when = format!("{site}, {times:?}, {errno}");
                let hung = when.clone();
                let _watchdog = Watchdog::start(PATIENCE, move || eprintln!("{hung}: it hangs"));
                let guest = Guest::new().unwrap();
                let injection = Injection::at(site, errno, times);
                live(guest, &when);
                failed += injection.failed();
            }
        }
    }
    assert!(failed > 100, "{failed}");
}

/// Pages come and go in their cells, so that segments get holes.
#[test]
fn compaction_moves_what_is_packed_and_loses_none() {
    let Some(mut guest) = Guest::new() else { return };
    let _watchdog = Watchdog::start(PATIENCE, || ());
    // Words of their own, so that a page takes half of its size, and all of them more than one segment.
    let noise = |page: usize, word: usize| ((page * WORDS + word) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for page in 0..PAGES {
        (0..WORDS / 2).for_each(|word| guest.word(page, word).store(noise(page, word), Ordering::Relaxed));
    }
    assert_eq!(guest.pack(0..PAGES as Page), PAGES as u64);
    let before = guest.packer.figures().bytes;
    // Touched in no order, so that none comes ahead.
    for page in (0..PAGES).rev().filter(|page| page % 8 != 3) {
        assert_eq!(guest.word(page, 5).load(Ordering::Relaxed), noise(page, 5));
    }
    guest.packer.lock().table.compact_all();
    let after = guest.packer.figures();
    assert!(
        after.bytes < before && after.pages == PAGES as u64 / 8,
        "{before} {after:?}"
    );
    for page in (0..PAGES).filter(|page| page % 8 == 3) {
        assert!(
            (0..WORDS / 2).all(|word| guest.word(page, word).load(Ordering::Relaxed) == noise(page, word))
        );
        assert!(
            (WORDS / 2..WORDS)
                .all(|word| guest.word(page, word).load(Ordering::Relaxed) == content(page, word, 0))
        );
    }
    assert_eq!(
        (guest.packer.figures().pages, guest.packer.figures().bytes),
        (0, 0)
    );
}

/// Readers, writers, and whoever gives memory up, while pages are packed all the time.
#[test]
fn nothing_is_lost_under_fire() {
    const TIME: Duration = Duration::from_secs(4);
    /// Pages given up at least, however seldom the discarder gets the lock.
    const DISCARDS: u64 = 100;
    let Some(mut guest) = Guest::new() else { return };
    let watchdog = Watchdog::start(PATIENCE, || ());
    let base = guest.area.base();
    let stop = Arc::new(AtomicBool::new(false));
    // A counter in each page of the first two thirds, which one thread each counts up; the last third is given up now and then.
    let count = |first: usize, step: usize| {
        let stop = stop.clone();
        std::thread::spawn(move || {
            let mut counted = [0u64; PAGES];
            let mut state = first as u64 + 1;
            while !stop.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let page = (state >> 33) as usize % (64 / step) * step + first;
                let word = word_at(base, page, 9);
                let before = word.load(Ordering::Relaxed);
                assert_eq!(before, content(page, 9, 0) + counted[page], "page {page}");
                if state >> 62 != 0 {
                    word.store(before + 1, Ordering::Relaxed);
                    counted[page] += 1;
                }
                // The rest of the page is as it was.
                let other = (state >> 20) as usize % WORDS;
                let other = if other == 9 { 10 } else { other };
                assert_eq!(
                    word_at(base, page, other).load(Ordering::Relaxed),
                    content(page, other, 0)
                );
                if state >> 60 == 3 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            counted
        })
    };
    let counters = [count(0, 2), count(1, 2)];
    // Whoever gives memory up holds the discards' lock, as does who packs.
    let discards = Arc::new(Mutex::new(()));
    let discarded = Arc::new(AtomicU64::new(0));
    let (packer, their_stop, their_discards) = (guest.packer.clone(), stop.clone(), discards.clone());
    let their_discarded = discarded.clone();
    let discarder = std::thread::spawn(move || {
        let mut round = 0u64;
        while !their_stop.load(Ordering::Relaxed) {
            let page = 64 + (round as usize * 7) % 32;
            let value = word_at(base, page, 3).load(Ordering::Relaxed);
            assert!(
                value == 0 || value == content(page, 3, 0) || value >> 32 != 0,
                "page {page}: {value:x}"
            );
            (0..WORDS).for_each(|word| {
                word_at(base, page, word).store(content(page, word, round + 1), Ordering::Relaxed)
            });
            std::thread::sleep(Duration::from_micros(100));
            assert!((0..WORDS).all(|word| {
                word_at(base, page, word).load(Ordering::Relaxed) == content(page, word, round + 1)
            }));
            {
                let _lock = their_discards.lock().unwrap();
                packer.discard(&(page as Page..page as Page + 1));
                vma::discard_own(base + bytes(page), PAGE_SIZE).unwrap();
            }
            assert!(
                (0..WORDS).all(|word| word_at(base, page, word).load(Ordering::Relaxed) == 0),
                "page {page}"
            );
            round += 1;
            their_discarded.store(round, Ordering::Relaxed);
        }
    });
    let (begin, mut packed) = (Instant::now(), 0);
    while begin.elapsed() < TIME || discarded.load(Ordering::Relaxed) < DISCARDS {
        for first in (0..PAGES as Page).step_by(WINDOW) {
            let lock = discards.lock().unwrap();
            guest.take_home();
            packed += guest.pack(first..first + WINDOW as Page);
            drop(lock);
        }
    }
    stop.store(true, Ordering::Relaxed);
    let counted = counters.map(|counter| counter.join().unwrap());
    discarder.join().unwrap();
    guest.end();
    for page in 0..64 {
        let expected = content(page, 9, 0) + counted[page % 2][page];
        assert_eq!(
            guest.word(page, 9).load(Ordering::Relaxed),
            expected,
            "page {page}"
        );
        guest.word(page, 9).store(content(page, 9, 0), Ordering::Relaxed);
        assert!(guest.holds(page, 0), "page {page}");
    }
    let figures = guest.packer.figures();
    let writes: u64 = counted.iter().flatten().sum();
    eprintln!(
        "{packed} packs, {} touched, p50 {} us, p99 {} us, {writes} writes, {} discards",
        figures.touched,
        figures.rebuild.quantile_us(0.5),
        figures.rebuild.quantile_us(0.99),
        discarded.load(Ordering::Relaxed),
    );
    assert!(packed > 1000 && figures.touched > 1000);
    drop(watchdog);
}
