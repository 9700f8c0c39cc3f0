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

use crate::sys::inject::{AnotherWay, Call};
use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::uffd::{Mode, MoveError, Uffd};
use crate::sys::vma::{self, MEMORY_PAUSE};
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Tries to move what the kernel holds for a moment.
const TRIES: usize = 10;
/// Between two tries of what must work in the end.
const PAUSE: Duration = Duration::from_micros(100);
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
        let page_by_page = AnotherWay::of(Call::Move);
        // SAFETY: raw addresses only; what is moved is ours, and its place in the guest empty.
        let (moved, error) = unsafe { tracker.move_pages(to + at, from + at, len - at) };
        drop(page_by_page);
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
        let by_a_copy = AnotherWay::of(Call::Move);
        // SAFETY: raw addresses only; what is moved is ours, and its place in the guest empty.
        let (_, refused) = unsafe { tracker.move_pages(to, from, PAGE_SIZE) };
        drop(by_a_copy);
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
///
/// # Who else may map something into a hole
///
/// No other thread of the engine: whoever replaces guest memory holds the lock of the discards, and with managed breaks the fault
/// thread's; discards hold both. So what fills a hole of ours is the filler of this very call, or not the engine's.
///
/// Any other thread of the VMM that maps memory at an address of the kernel's choice. The kernel may choose the hole from the
/// moment on at which the failing call gives back the lock of the mappings until [`vma::hold_hole`] has it: some microseconds, in which
/// that thread's call would have to succeed where ours has just failed for want of memory. Nothing tells such a mapping from the
/// filler, so it is mapped over here, and that thread loses its memory. Leaving it there would not be better: the guest would have
/// that thread's memory as its own. Only ending the process would, and it is not done, since a hole that is filled in part looks the
/// same. Kernels from 6.12 on undo the unmapping in most cases, so that there is no hole at all.
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

/// Takes the mark of unwritten pages off a range that is tracked; if need be with its registration, whose end takes off all marks. Then
/// the range is tracked again with the next pass ([`Uffd::take_untracked`]), and all of it counts as written.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn unmark(tracker: &Uffd, range: &Range<usize>) {
    for attempt in 0usize.. {
        let Err(error) = tracker.write_protect(range.start, range.len(), false) else {
            return;
        };
        let step = "counting pages as written";
        if tracker.unregister(range.start, range.len()).is_ok() {
            late_log::note(
                step,
                &error,
                "the next pass tracks them again; until then nothing is merged there",
            );
            return tracker.note_untracked(range.clone());
        }
        late_log::note(step, &error, "it was tried again until it worked");
        cry_at_times(step, attempt, &error);
        std::thread::sleep(MEMORY_PAUSE);
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
mod tests;
