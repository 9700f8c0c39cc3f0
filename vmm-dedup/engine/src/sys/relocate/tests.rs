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
        Pager::start(seed, 1, Duration::ZERO, move || ranges.clone())
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
        assert!(tracker.somebody_waits(Duration::from_secs(5)));
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
        assert!(tracker.somebody_waits(Duration::from_secs(5)));
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
    assert!(track_again(&tracker, &all));
    assert!(tracker.take_untracked().is_empty());
}

#[test]
fn where_neither_tracking_nor_leaving_works_both_are_tried_until_one_does() {
    let Some(tracker) = tracker() else { return };
    let memory = Memory::new(&tracker);
    let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
    for (tracks_at_last, register, unregister) in [
        (true, Times::First(5), Times::Always),
        (false, Times::Always, Times::First(5)),
    ] {
        let (guest, scratch) = take_one(&tracker, &memory);
        put_back_page(&tracker, scratch, guest);
        let all = guest..guest + bytes(PAGES);
        let registering = Injection::begin(Call::Register, libc::ENOMEM, register);
        let leaving = Injection::begin(Call::Unregister, libc::ENOMEM, unregister);
        assert_eq!(track_again(&tracker, &all), tracks_at_last);
        assert!(registering.failed() >= 5 && leaving.failed() >= 5);
        drop((registering, leaving));
        assert_eq!(tracker.take_untracked().is_empty(), tracks_at_last);
        assert!(track_again(&tracker, &all));
    }
}

/// Writers of protected pages go on although neither the protection nor the registration ends for a while, and where neither is there.
#[test]
#[allow(unsafe_code)] // writes memory of its own
fn protection_ends_although_that_fails_for_a_while() {
    let Ok(breaker) = Uffd::breaker() else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let memory = Anonymous::new(PAGES).unwrap();
    memory.populate().unwrap();
    let all = memory.base()..memory.base() + bytes(PAGES);
    let _watchdog = Watchdog::start(Duration::from_secs(10), || ());
    for protection in [Times::Always, Times::First(3)] {
        breaker.register(all.start, all.len(), Mode::Wp).unwrap();
        breaker.write_protect(all.start, all.len(), true).unwrap();
        let protecting = Injection::begin(Call::WriteProtect, libc::ENOMEM, protection);
        let leaving = Injection::begin(Call::Unregister, libc::ENOMEM, Times::First(3));
        let before = late_log::count();
        unprotect(&breaker, &all);
        assert!(protecting.failed() >= 3 && leaving.failed() == 3);
        drop((protecting, leaving));
        assert!(late_log::count() > before, "nothing was noted");
        // It would wait, for nobody.
        // SAFETY: the page is ours alone.
        unsafe { crate::sys::guest::store_page(all.start, &[MARK; 512]) };
    }
    breaker.unregister(all.start, all.len()).unwrap();
    let before = late_log::count();
    unprotect(&breaker, &all);
    assert_eq!(late_log::count(), before, "nothing was protected");
}

#[test]
#[allow(unsafe_code)] // memory that nobody uses
fn fresh_memory_comes_although_mapping_it_leaves_a_hole() {
    let guest = Anonymous::new(PAGES).unwrap();
    guest.populate().unwrap();
    let injection = Injection::leaving_holes(Call::MapAnonymous, libc::ENOMEM, Times::First(4));
    // SAFETY: nothing refers to it.
    unsafe { vma::renew(guest.base(), bytes(PAGES)) }.unwrap();
    assert_eq!(injection.failed(), 4);
    drop(injection);
    guest.populate().unwrap();
    let injection = Injection::begin(Call::MapAnonymous, libc::ENOMEM, Times::Always);
    // SAFETY: as above.
    let renewed = unsafe { vma::renew(guest.base(), bytes(PAGES)) };
    drop(injection);
    assert!(renewed.is_err() && vma::is_mapped(guest.base(), bytes(PAGES)));
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
