//! Moving pages between the guest, scratch memory and memory made beside the guest: the steps at which a page exists in
//! one place only, so that doing one of them wrong loses it.
//!
//! # Why no page is lost, and nobody waits for ever
//!
//! *Which place holds a page* is asked of the page tables ([`Uffd::filled`]), never of mincore(): reclaim may swap a page
//! out at any moment, in the guest or in scratch memory, and mincore() says of a swapped-out page what it says of an empty
//! place. Swapped out or not, a page moves as it is (the kernel moves the swap entry).
//!
//! *Taking* ([`move_away`], [`Uffd::move_pages`]). The guest's addresses are registered for missing pages, so nobody but us
//! fills an emptied one. The place in scratch memory was empty before, and only we move pages there; so if it holds
//! something, that is the page, whatever the kernel counted.
//!
//! *Putting back* ([`put_back_page`]). The page is in scratch memory, its place in the guest is empty, and whoever touches
//! that waits. Nobody else fills either place or empties it: reclaim and migration change how a place is filled, not
//! whether. So:
//!
//! - Nothing in scratch memory: the page is back already (the kernel moved it and lost count), and nothing is to be done.
//! - Something in both places: that in the guest is our own copy, made when the kernel would not move the page. It is the
//!   one that the guest uses since, so what is in scratch memory is dropped.
//! - Something in scratch memory only: it is moved, or copied if the kernel refuses to move it. The copy is read through
//!   scratch memory, which is registered for missing pages itself: reading an empty place there would wait for this very
//!   thread. But the place was just seen to be filled, and nobody empties it. A swapped-out page is read in, which waits for
//!   the disk only.
//!
//! It ends: a refusal to move ends in a copy, a copy fails for want of memory or because the page cannot be read. Memory
//! comes or the kernel kills somebody. A page that cannot be read (its memory or its swap is broken) is lost whoever
//! asks; the guest is to meet the memory error that it would have met without us, when it touches the page
//! (UFFDIO_POISON). A place in the guest that is registered no more is registered again, one that is unmapped is mapped again.

use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::uffd::{Mode, MoveError, Uffd};
use crate::sys::vma;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Tries to move what the kernel holds for a moment.
const TRIES: usize = 10;
/// Between two tries of what must work in the end.
const PAUSE: Duration = Duration::from_micros(100);
/// The same where the kernel lacks memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(1);
/// How long reading a page is tried before it counts as broken: the kernel says the same where it lacks memory for a moment.
const UNREADABLE: Duration = Duration::from_secs(5);

/// Moves guest pages from addresses registered for missing pages into scratch memory; how many bytes, and why no more. What
/// the kernel holds for a moment is tried again.
#[allow(unsafe_code)] // moves guest pages
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn move_away(tracker: &Uffd, from: usize, to: usize, len: usize) -> (usize, Option<MoveError>) {
    let mut moved = 0;
    for _attempt in 0..TRIES {
        // SAFETY: guest memory and scratch memory are only ever accessed through raw addresses.
        let (more, error) = unsafe { tracker.move_pages(to + moved, from + moved, len - moved) };
        moved += more;
        if error != Some(MoveError::Again) {
            return (moved, error);
        }
    }
    (moved, Some(MoveError::Again))
}

/// Moves pages back to where they were; whether all went in one move, as a huge page does. (Not if it is split on the way,
/// since there is a page table in its place: that nobody tells.)
#[allow(unsafe_code)] // moves guest pages
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn put_back_pages(tracker: &Uffd, from: usize, to: usize, len: usize) -> bool {
    let (mut at, mut tries, mut moves) = (0, 0, 0);
    while at < len {
        // SAFETY: raw addresses only; what is moved is ours, and its place in the guest empty.
        let (moved, error) = unsafe { tracker.move_pages(to + at, from + at, len - at) };
        at += moved;
        moves += usize::from(moved > 0);
        match error {
            Some(MoveError::Again) if tries < TRIES => tries += 1,
            Some(_) if at < len => {
                put_back_page(tracker, from + at, to + at);
                at += PAGE_SIZE;
                moves += 1;
            }
            _ => {}
        }
    }
    moves == 1
}

/// Moves one page back, or, should the kernel refuse to move it, copies it back: nobody else can have it pinned.
/// Its place in scratch memory is empty then.
#[allow(unsafe_code)] // moves guest pages
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn put_back_page(tracker: &Uffd, from: usize, to: usize) {
    let mut start = None;
    for attempt in 0usize.. {
        // SAFETY: raw addresses only; what is moved is ours, and its place in the guest empty.
        let (_, refused) = unsafe { tracker.move_pages(to, from, PAGE_SIZE) };
        match refused {
            None => return,
            Some(MoveError::Again) if attempt < TRIES => continue,
            Some(_) => {}
        }
        if !tracker.filled(from) {
            return;
        }
        if tracker.filled(to) {
            return drop_copy(from);
        }
        // SAFETY: there is a page in scratch memory, which nobody but us uses; its place in the guest is empty.
        let Err(mut error) = (unsafe { tracker.copy(to, from, PAGE_SIZE) }) else {
            return drop_copy(from);
        };
        let start = *start.get_or_insert_with(Instant::now);
        // Neither a page nor in swap nor on the way between, which cannot be moved; or one that is in swap, and was not to
        // be read for long enough.
        let broken = refused == Some(MoveError::Refused(libc::EFAULT)) || start.elapsed() > UNREADABLE;
        if broken && error.raw_os_error() == Some(libc::EFAULT) {
            let Err(refused) = tracker.poison(to, PAGE_SIZE) else {
                late_log::note(
                    "reading a guest page",
                    &io::Error::from_raw_os_error(libc::EHWPOISON),
                    "the guest meets a memory error there",
                );
                return drop_copy(from);
            };
            error = refused;
        }
        late_log::note(
            "putting a guest page back",
            &error,
            "it was tried again until it worked",
        );
        match error.raw_os_error() {
            // What is there is seen by the next turn.
            Some(libc::EEXIST) => {}
            // Nobody listens at the place any more, or it is unmapped.
            Some(libc::ENOENT) => {
                mend_hole(tracker, &(to..to + PAGE_SIZE));
                let _ = tracker.register(to, PAGE_SIZE, Mode::Missing);
            }
            _ => cry_at_times("putting a guest page back", attempt, &error),
        }
        std::thread::sleep(PAUSE);
    }
}

/// Empties a place in scratch memory.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
fn drop_copy(at: usize) {
    for _attempt in 0..TRIES {
        let Err(error) = vma::discard_own(at, PAGE_SIZE) else {
            return;
        };
        late_log::note(
            "emptying scratch memory",
            &error,
            "it was tried again; a copy of a guest page may stay there for a while",
        );
        std::thread::sleep(PAUSE);
    }
}

/// Moves memory of ours into the place of a range of guest memory, in one step for everyone who uses that. On an error
/// the guest's is as it was, and ours is gone.
///
/// # Safety
/// `fresh` must hold what the guest sees in the range, and nobody may be able to change that before the step is done.
#[allow(unsafe_code)] // replaces guest pages
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) unsafe fn put_over(fresh: usize, range: &Range<usize>) -> io::Result<()> {
    // SAFETY: as promised by the caller.
    let put = map_over(range, || unsafe {
        vma::move_over(fresh, range.start, range.len())
    });
    if put.is_err() {
        vma::unmap(fresh, range.len());
    }
    put
}

/// Lets `map` put a mapping into the place of guest memory whose bytes it has as well. On an error the guest's is as it was.
pub(crate) fn map_over(range: &Range<usize>, mut map: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let mut hole = false;
    loop {
        let Err(error) = map() else {
            return Ok(());
        };
        // Asked of the mappings: touching the place could wait for a page that is away, which only this thread can put back.
        if !hole && vma::is_mapped(range.start, range.len()) {
            return Err(error);
        }
        // The kernel unmapped the place and then lacked the memory to go on: there is no way back, and nobody may get the
        // hole. (That fails where it was filled in an earlier turn.)
        hole = true;
        let _ = vma::hold_hole(range.start, range.len());
        std::thread::sleep(MEMORY_PAUSE);
    }
}

/// After a call failed that was to map something over empty places of the guest: the kernel leaves them as they are, but if
/// it lacks memory after it has begun, it leaves a hole (all versions do, 6.8 to 6.11 on more occasions). Then they are
/// mapped anew, empty and with whoever touches them waiting, so that their pages can be put back.
///
/// Nobody reads anything wrong: who touches the hole, or the inaccessible memory that fills it first, gets SIGSEGV; from the
/// moment on that the memory can be accessed it is registered for missing pages.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn mend_hole(tracker: &Uffd, range: &Range<usize>) {
    if vma::is_mapped(range.start, range.len()) {
        return;
    }
    let error = io::Error::from_raw_os_error(libc::ENOMEM);
    late_log::note(
        "mapping over guest memory",
        &error,
        "the hole that was left was filled",
    );
    let mut filled = false;
    loop {
        match vma::hold_hole(range.start, range.len()) {
            Ok(()) => filled = true,
            Err(error) if !filled && error.raw_os_error() == Some(libc::EEXIST) => {
                return late_log::note(
                    "filling a hole in guest memory",
                    &error,
                    "somebody else was faster",
                );
            }
            Err(_) => {}
        }
        let mended = || {
            tracker.register(range.start, range.len(), Mode::Missing)?;
            vma::allow_access(range.start, range.len())
        };
        if filled && mended().is_ok() {
            return;
        }
        std::thread::sleep(MEMORY_PAUSE);
    }
}

/// Ends waiting for missing pages in a range, and tracks writes again; whether they are tracked. Without registration nobody
/// waits either, so if the one fails the other is tried, and both until one works: else somebody waits for ever. What is not
/// tracked then the scanning thread registers in a later pass ([`Uffd::take_untracked`]).
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn track_again(tracker: &Uffd, range: &Range<usize>) -> bool {
    for attempt in 0usize.. {
        let Err(error) = tracker.register(range.start, range.len(), Mode::Wp) else {
            return true;
        };
        let step = "tracking writes to guest memory again";
        if tracker.unregister(range.start, range.len()).is_ok() {
            late_log::note(
                step,
                &error,
                "the next pass tries it again; until then nothing is merged there",
            );
            tracker.note_untracked(range.clone());
            break;
        }
        late_log::note(step, &error, "it was tried again until it worked");
        cry_at_times(step, attempt, &error);
        std::thread::sleep(MEMORY_PAUSE);
    }
    false
}

/// Tracks writes to guest memory that was not registered. If that fails, the next pass tries it again
/// ([`Uffd::take_untracked`]).
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn track(tracker: &Uffd, range: Range<usize>, step: &'static str) {
    if let Err(error) = tracker.register(range.start, range.len(), Mode::Wp) {
        late_log::note(step, &error, "the next pass tries it again");
        tracker.note_untracked(range);
    }
}

/// Ends the protection of a range, so that its writers do not wait; by ending its registration if need be.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn unprotect(breaker: &Uffd, range: &Range<usize>) {
    for attempt in 0usize.. {
        let Err(error) = breaker.write_protect(range.start, range.len(), false) else {
            return;
        };
        let ended = breaker.unregister(range.start, range.len()).is_ok();
        // Not registered (any more): nothing is protected.
        if error.raw_os_error() == Some(libc::ENOENT) {
            return;
        }
        let step = "ending the protection of shared pages";
        if ended {
            return late_log::note(step, &error, "their registration was ended instead");
        }
        late_log::note(step, &error, "it was tried again until it worked");
        cry_at_times(step, attempt, &error);
        std::thread::sleep(MEMORY_PAUSE);
    }
}

/// Lets everybody go on who waits in a range. No kernel refuses that. If one did, nothing else would let them go on, so it
/// is tried until it works.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn wake(uffd: &Uffd, range: &Range<usize>) {
    for attempt in 0usize.. {
        let Err(error) = uffd.wake(range.start, range.len()) else {
            return;
        };
        let step = "waking who waits for guest memory";
        late_log::note(step, &error, "it was tried again until it worked");
        cry_at_times(step, attempt, &error);
        std::thread::sleep(PAUSE);
    }
}

/// Says so, now and then, while a step fails again and again.
fn cry_at_times(step: &str, attempt: usize, error: &io::Error) {
    if attempt % 10_000 == 1_000 {
        late_log::cry(step, error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::inject::{Call, Injection, Times};
    use crate::sys::page_size::bytes;
    use crate::sys::vma::Anonymous;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use vmm_dedup_trouble::{MemoryGroup, Pager, Swap, UsedUp, Watchdog, or_skip, page_out, swap_or_skip};

    const PAGES: usize = 16;
    /// A word that nobody changes, to tell a page from one of zeros.
    const MARK: u64 = 0x1234_5678_9abc_def0;

    fn tracker() -> Option<Uffd> {
        let tracker = Uffd::tracker();
        assert!(
            tracker.is_ok() || std::env::var_os("CI").is_none(),
            "no userfaultfd in CI"
        );
        tracker.inspect_err(|e| eprintln!("SKIPPED: {e}")).ok()
    }

    /// Memory that stands for a guest's, and scratch memory for it.
    struct Memory {
        guest: Anonymous,
        scratch: Anonymous,
    }

    impl Memory {
        fn new(tracker: &Uffd) -> Self {
            let (guest, scratch) = (Anonymous::new(PAGES).unwrap(), Anonymous::new(PAGES).unwrap());
            guest.populate().unwrap();
            scratch.populate_part(0, PAGE_SIZE).unwrap();
            scratch.discard(0, PAGE_SIZE).unwrap();
            tracker
                .register(scratch.base(), bytes(PAGES), Mode::Missing)
                .unwrap();
            tracker.register(guest.base(), bytes(PAGES), Mode::Wp).unwrap();
            Self { guest, scratch }
        }

        /// A word of the guest.
        #[allow(unsafe_code)] // raw pages
        fn word(&self, page: usize, word: usize) -> &AtomicU64 {
            // SAFETY: mapped, aligned, and only ever used as this.
            unsafe { &*((self.guest.base() + bytes(page) + word * 8) as *const AtomicU64) }
        }

        fn ranges(&self) -> Vec<Range<usize>> {
            let range = |area: &Anonymous| area.base()..area.base() + bytes(PAGES);
            vec![range(&self.guest), range(&self.scratch)]
        }

        /// One window: takes what can be taken, and puts it back.
        fn round(&self, tracker: &Uffd) -> usize {
            let (guest, scratch, len) = (self.guest.base(), self.scratch.base(), bytes(PAGES));
            tracker.write_protect(guest, len, true).unwrap();
            tracker.register(guest, len, Mode::Missing).unwrap();
            let (mut at, mut taken) = (0, Vec::new());
            while at < len {
                let (moved, error) = move_away(tracker, guest + at, scratch + at, len - at);
                taken.extend((at..at + moved).step_by(PAGE_SIZE));
                at += moved;
                at += if error.is_some() { PAGE_SIZE } else { 0 };
            }
            for at in &taken {
                put_back_page(tracker, scratch + at, guest + at);
            }
            tracker.register(guest, len, Mode::Wp).unwrap();
            tracker.wake(guest, len).unwrap();
            // What was not taken must not be in scratch memory: it would be lost now.
            self.scratch.discard(0, len).unwrap();
            taken.len()
        }

        /// Rounds under two threads that count in the guest's pages; nothing counted may be lost.
        fn rounds_under_writers(&self, tracker: &Uffd, time: Duration, watchdog: &Watchdog) -> usize {
            (0..PAGES).for_each(|page| self.word(page, 8).store(MARK, Ordering::Relaxed));
            let stop = AtomicBool::new(false);
            let mut taken = 0;
            let written = std::thread::scope(|scope| {
                let write = || {
                    let mut written = [0u64; PAGES];
                    for n in 0usize.. {
                        let page = n * 7 % PAGES;
                        self.word(page, 0).fetch_add(1, Ordering::Relaxed);
                        written[page] += 1;
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                    written
                };
                let writers = [scope.spawn(write), scope.spawn(write)];
                let start = Instant::now();
                while start.elapsed() < time {
                    taken += self.round(tracker);
                    watchdog.feed();
                }
                stop.store(true, Ordering::Relaxed);
                writers.map(|writer| writer.join().unwrap())
            });
            for (page, (a, b)) in written[0].iter().zip(&written[1]).enumerate() {
                let counted = self.word(page, 0).load(Ordering::Relaxed);
                assert_eq!(counted, a + b, "page {page} was lost");
                assert_eq!(self.word(page, 8).load(Ordering::Relaxed), MARK);
            }
            taken
        }
    }

    /// Few pages under threads that always write make the kernel try again often enough to lose count, where it does.
    #[test]
    fn no_page_is_lost_between_threads_that_write_and_moves() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let taken = memory.rounds_under_writers(&tracker, Duration::from_secs(3), &watchdog);
        assert!(taken > 0);
    }

    /// With swap the kernel loses count of pages that are in neither place by what mincore() tells.
    #[test]
    fn no_page_is_lost_and_nothing_hangs_while_reclaim_swaps_guest_and_scratch_memory() {
        let swap = swap_or_skip!();
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let last = swap.clone();
        let watchdog = Watchdog::start(Duration::from_secs(10), move || last.off());
        let pagers = [1, 77].map(|seed| {
            let ranges = memory.ranges();
            Pager::start(seed, 1, move || ranges.clone())
        });
        let taken = memory.rounds_under_writers(&tracker, Duration::from_secs(8), &watchdog);
        assert!(taken > 0 && pagers.iter().all(|pager| pager.calls() > 0));
    }

    /// A window with one page that was taken.
    fn take_one(tracker: &Uffd, memory: &Memory) -> (usize, usize) {
        let (guest, scratch) = (memory.guest.base(), memory.scratch.base());
        memory.word(0, 8).store(MARK, Ordering::Relaxed);
        tracker.register(guest, bytes(PAGES), Mode::Missing).unwrap();
        assert_eq!(move_away(tracker, guest, scratch, PAGE_SIZE), (PAGE_SIZE, None));
        (guest, scratch)
    }

    #[test]
    fn a_page_that_is_back_already_is_not_waited_for() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        put_back_page(&tracker, scratch, guest);
        put_back_page(&tracker, scratch, guest);
        assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK);
    }

    #[test]
    fn a_page_goes_back_to_a_place_that_nobody_listens_at() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        tracker.unregister(guest, bytes(PAGES)).unwrap();
        put_back_page(&tracker, scratch, guest);
        assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK);
    }

    #[test]
    fn a_page_whose_place_lost_its_mapping_goes_back_all_the_same() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        vma::unmap(guest, bytes(PAGES));
        put_back_page(&tracker, scratch, guest);
        assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK);
        assert!(!tracker.filled(scratch));
    }

    #[test]
    fn who_touches_a_mended_hole_waits_for_the_page() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        vma::unmap(guest, bytes(PAGES));
        mend_hole(&tracker, &(guest..guest + bytes(PAGES)));
        let seen = std::thread::scope(|scope| {
            let reader = scope.spawn(|| memory.word(0, 8).load(Ordering::Relaxed));
            assert!(tracker.wait_for_fault(Duration::from_secs(5)));
            put_back_page(&tracker, scratch, guest);
            tracker.wake(guest, PAGE_SIZE).unwrap();
            reader.join().unwrap()
        });
        assert_eq!(seen, MARK);
    }

    /// Whatever the kernel says when it does not move a page back: the page is there afterwards, and scratch memory empty.
    #[test]
    fn a_page_that_cannot_be_moved_back_is_copied_back() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        for errno in [
            libc::EAGAIN,
            libc::EBUSY,
            libc::EEXIST,
            libc::EFAULT,
            libc::EINVAL,
            libc::ENOENT,
            libc::ENOMEM,
        ] {
            let (guest, scratch) = take_one(&tracker, &memory);
            let injection = Injection::begin(Call::Move, errno, Times::Always);
            put_back_page(&tracker, scratch, guest);
            assert!(injection.failed() > 0);
            drop(injection);
            assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK, "errno {errno}");
            assert!(!tracker.filled(scratch), "errno {errno}");
        }
    }

    /// Neither moved nor copied, for a while.
    #[test]
    fn putting_back_is_tried_until_it_works() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        for errno in [
            libc::EAGAIN,
            libc::EEXIST,
            libc::EFAULT,
            libc::ENOENT,
            libc::ENOMEM,
        ] {
            let (guest, scratch) = take_one(&tracker, &memory);
            tracker.unregister(guest, bytes(PAGES)).unwrap(); // else it is moved
            let before = late_log::count();
            let injection = Injection::begin(Call::Copy, errno, Times::First(20));
            put_back_page(&tracker, scratch, guest);
            drop(injection);
            assert!(late_log::count() > before, "errno {errno} was not noted");
            assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK, "errno {errno}");
        }
    }

    #[test]
    fn waiters_go_on_although_waking_fails_for_a_while() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        let seen = std::thread::scope(|scope| {
            let reader = scope.spawn(|| memory.word(0, 8).load(Ordering::Relaxed));
            assert!(tracker.wait_for_fault(Duration::from_secs(5)));
            let injection = Injection::begin(Call::Wake, libc::EINVAL, Times::First(50));
            put_back_page(&tracker, scratch, guest);
            wake(&tracker, &(guest..guest + PAGE_SIZE));
            assert_eq!(injection.failed(), 50);
            reader.join().unwrap()
        });
        assert_eq!(seen, MARK);
    }

    #[test]
    fn memory_that_cannot_be_tracked_waits_for_nobody_and_is_remembered() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        put_back_page(&tracker, scratch, guest);
        let all = guest..guest + bytes(PAGES);
        let injection = Injection::begin(Call::Register, libc::ENOMEM, Times::Always);
        assert!(!track_again(&tracker, &all));
        drop(injection);
        assert_eq!(tracker.take_untracked(), std::slice::from_ref(&all));
        vma::discard_own(guest, PAGE_SIZE).unwrap();
        assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), 0, "nobody waits there");
        let injection = Injection::begin(Call::Unregister, libc::ENOMEM, Times::Always);
        assert!(track_again(&tracker, &all));
        drop(injection);
        assert!(tracker.take_untracked().is_empty());
    }

    #[test]
    fn a_hole_is_mended_although_that_fails_for_a_while() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        for (call, errno) in [
            (Call::Mincore, libc::EAGAIN),
            (Call::MapAnonymous, libc::ENOMEM),
            (Call::Register, libc::ENOMEM),
            (Call::Protect, libc::ENOMEM),
        ] {
            let (guest, scratch) = take_one(&tracker, &memory);
            vma::unmap(guest, bytes(PAGES));
            let injection = Injection::begin(call, errno, Times::First(3));
            mend_hole(&tracker, &(guest..guest + bytes(PAGES)));
            assert_eq!(injection.failed(), 3, "{call:?}");
            drop(injection);
            put_back_page(&tracker, scratch, guest);
            assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK, "{call:?}");
            tracker.register(guest, bytes(PAGES), Mode::Wp).unwrap();
        }
    }

    #[test]
    fn what_is_put_over_arrives_although_the_kernel_leaves_holes() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let mut fresh = Anonymous::new(PAGES).unwrap();
        fresh.populate().unwrap();
        #[allow(unsafe_code)] // a page of ours
        // SAFETY: mapped, and nobody else uses it.
        unsafe {
            crate::sys::guest::store_page(fresh.base(), &[MARK; 512]);
        }
        let guest = memory.guest.base();
        let injection = Injection::leaving_holes(Call::Remap, libc::ENOMEM, Times::First(2));
        #[allow(unsafe_code)] // nobody uses the pages
        // SAFETY: all of the range is ours.
        unsafe { put_over(fresh.take_front(PAGES), &(guest..guest + bytes(PAGES))) }.unwrap();
        assert_eq!(injection.failed(), 2);
        drop(injection);
        assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK);
    }

    /// The kernel refuses to move memory over the guest's then. What is there must not be found out by touching it.
    #[test]
    fn putting_over_ends_where_mappings_are_used_up() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let (guest, scratch) = take_one(&tracker, &memory);
        let mut fresh = Anonymous::new(PAGES).unwrap();
        fresh.populate().unwrap();
        // Before: a thread needs mappings.
        let _watchdog = Watchdog::start(Duration::from_secs(60), || ());
        let used_up = match UsedUp::begin() {
            Ok(used_up) => used_up,
            Err(reason) => {
                eprintln!("SKIPPED: {reason}");
                return put_back_page(&tracker, scratch, guest);
            }
        };
        #[allow(unsafe_code)] // nobody looks at the other pages
        // SAFETY: all of the range is ours.
        let put = unsafe { put_over(fresh.take_front(PAGES), &(guest..guest + bytes(PAGES))) };
        assert_eq!(put.unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        drop(used_up);
        put_back_page(&tracker, scratch, guest);
        assert_eq!(memory.word(0, 8).load(Ordering::Relaxed), MARK);
    }

    /// A page that was taken, is in the swap file and nowhere else, and cannot be read from there. `None`, said aloud, where
    /// there is no such thing.
    fn take_one_that_breaks(tracker: &Uffd, memory: &Memory, swap: &Swap) -> Option<(usize, usize)> {
        let group = MemoryGroup::new()
            .inspect_err(|reason| eprintln!("SKIPPED: {reason}"))
            .ok()?;
        vma::discard_own(memory.guest.base(), PAGE_SIZE).unwrap();
        let (guest, scratch) = group.within(|| take_one(tracker, memory));
        // It may be in use for a moment, and the kernel keeps what it has written until it reclaims that.
        let gone = (0..50).any(|_| {
            page_out(&(scratch..scratch + PAGE_SIZE));
            group.reclaim();
            std::thread::sleep(Duration::from_millis(2));
            !in_memory(scratch)
        });
        if !gone {
            eprintln!("SKIPPED: the kernel keeps the page in memory");
            put_back_page(tracker, scratch, guest);
            return None;
        }
        swap.break_it().unwrap();
        Some((guest, scratch))
    }

    /// Whether the kernel has a page in memory, mapped or not.
    #[allow(unsafe_code)] // mincore
    fn in_memory(at: usize) -> bool {
        let mut state = 0u8;
        // SAFETY: a byte is written for the one page.
        let asked = unsafe { libc::mincore(at as *mut _, PAGE_SIZE, &raw mut state) };
        assert_eq!(asked, 0);
        state & 1 != 0
    }

    /// What is swapped out is moved back unread. Who touches it meets the error, as without the service.
    #[test]
    fn a_page_whose_swap_broke_goes_back_as_it_is() {
        let swap = or_skip!(Swap::in_file());
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let last = swap.clone();
        let _watchdog = Watchdog::start(Duration::from_secs(10), move || last.off());
        let Some((guest, scratch)) = take_one_that_breaks(&tracker, &memory, &swap) else {
            return;
        };
        put_back_page(&tracker, scratch, guest);
        assert!(tracker.filled(guest) && !tracker.filled(scratch));
        let read = vma::populate_read(guest, PAGE_SIZE);
        assert!(read.is_err(), "reading it is an error");
        vma::populate_read(guest + PAGE_SIZE, PAGE_SIZE).unwrap();
    }

    /// The same if the page must be copied.
    #[test]
    fn a_page_whose_swap_broke_and_that_cannot_be_moved_becomes_a_memory_error() {
        let swap = or_skip!(Swap::in_file());
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let last = swap.clone();
        let _watchdog = Watchdog::start(4 * UNREADABLE, move || last.off());
        let Some((guest, scratch)) = take_one_that_breaks(&tracker, &memory, &swap) else {
            return;
        };
        let injection = Injection::begin(Call::Move, libc::EBUSY, Times::Always);
        put_back_page(&tracker, scratch, guest);
        drop(injection);
        assert!(tracker.filled(guest) && !tracker.filled(scratch));
        assert!(vma::populate_read(guest, PAGE_SIZE).is_err());
    }

    #[test]
    fn a_page_that_broke_in_scratch_memory_goes_back_as_a_memory_error() {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::new(&tracker);
        let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
        let (guest, scratch) = take_one(&tracker, &memory);
        vma::discard_own(scratch, PAGE_SIZE).unwrap();
        tracker.poison(scratch, PAGE_SIZE).unwrap();
        let injection = Injection::begin(Call::Poison, libc::ENOMEM, Times::First(3));
        put_back_page(&tracker, scratch, guest);
        assert_eq!(injection.failed(), 3);
        drop(injection);
        assert!(!tracker.filled(scratch), "scratch memory can be used again");
        assert!(tracker.filled(guest), "nobody waits for the page any more");
        assert!(
            vma::populate_read(guest, PAGE_SIZE).is_err(),
            "reading it is an error"
        );
        vma::populate_read(guest + PAGE_SIZE, PAGE_SIZE).unwrap();
    }
}
