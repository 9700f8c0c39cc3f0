//! Merging: take, verify, map, wake.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Take.* The pages' addresses are registered for missing pages, then UFFDIO_MOVE moves the pages into scratch
//!    memory of ours. The kernel does this page by page under the page table lock, and refuses (EBUSY) a page that is
//!    pinned, so no device or io_uring buffer points to what we hold. A vCPU or a system call that touches an address
//!    from now on finds it empty and waits; writes before the move are in the page that we got.
//! 2. *Verify.* Nobody else can reach the taken page, and a slot's content never changes while it is in the index and
//!    its epoch is not acknowledged (see `vmm_dedup_protocol::index`). So an equal comparison stays true.
//! 3. *Map.* The slot is mapped over the empty place, privately, from a read-only descriptor. Waiting threads still
//!    wait. A page that was not equal, or could not be mapped, is moved back: its place is still empty. A run with
//!    exceptions ([`crate::stretch`]) takes those as well; it is built aside with copies of them, and moved over the
//!    empty places in one step ([`crate::aside`]). A copy is as good as the page: it was taken, so nobody has it pinned
//!    and nobody changes it.
//! 4. *Wake.* Only now are waiters woken; they fault again and find the mapping, or their own page.
//!
//! Anything unexpected ends in "put back", and putting back is tried until it works: the page exists nowhere else.
//!
//! # Huge pages
//!
//! A huge page all of whose pages have twins is taken as one: UFFDIO_MOVE moves its mapping, a microsecond instead of the
//! hundreds that splitting it takes, and it is freed as one. That works only into an empty place of 2 MiB without a page
//! table ([`HugeScratch`]); into any other the kernel splits the huge page on the way, which is slow and as safe. What
//! is put back is copied: moving a part of the huge page would split it. Pins count for all of a huge page, so if one page
//! is pinned all stay.

use crate::aside::{Aside, Piece};
use crate::breaks::{Breaker, complement};
use crate::error::Error;
use crate::item::{Item, Open, Outcome, Role, continues, return_exceptions};
use crate::memory::{Memory, Page};
use crate::mixed::scratch::HugeScratch;
use crate::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE, bytes};
use crate::store::Store;
use crate::sys::guest;
use crate::sys::pagemap::Pagemap;
use crate::sys::sched::Urgent;
use crate::sys::uffd::{Mode, MoveError, Uffd};
use crate::sys::vma::{Anonymous, discard_own, fill_hole, map_segment};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;
use vmm_dedup_protocol::Slot;

/// Most pages in one window.
pub(crate) const MAX_WINDOW: usize = CHUNK_PAGES;
/// Pages of scratch memory: windows go one behind the other, and what they leave is freed for many at once.
const SCRATCH_PAGES: usize = 2 * MAX_WINDOW;

/// Takes and maps. One per service, used by the scanning thread alone.
#[derive(Debug)]
pub(crate) struct Merger {
    tracker: Arc<Uffd>,
    scratch: Anonymous,
    /// Pages of it in use, from the first on.
    used: usize,
    /// Where huge pages are taken to as a whole, made when there is the first.
    huge: Option<HugeScratch>,
    /// Where runs with exceptions are built.
    aside: Option<Aside>,
}

/// Where a window's pages are while they are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    /// In scratch memory for small pages, which is freed for many windows at once.
    Pages,
    /// The window is a huge page: in a place where it can stay one.
    HugePage,
}

/// Items that lie within [`MAX_WINDOW`] consecutive pages of one region, in page order. Pages between them are not touched.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) items: &'a [Item],
    /// Which of its runs go on beyond the window.
    pub(crate) open: Open,
    pub(crate) take: Take,
}

/// The result of a window.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// One for each item.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long pages were away.
    pub(crate) stop_ns: u64,
}

impl Merger {
    pub(crate) fn new(tracker: Arc<Uffd>) -> Result<Self, Error> {
        Ok(Self {
            scratch: new_scratch(&tracker).map_err(Error::Scratch)?,
            tracker,
            used: 0,
            huge: None,
            aside: None,
        })
    }

    /// Merges a window.
    ///
    /// # Errors
    /// Only when the range cannot be registered, or there is no scratch memory; nothing was changed then.
    pub(crate) fn merge(
        &mut self,
        memory: &Memory,
        store: &Store,
        breaker: &Breaker,
        pagemap: &mut Pagemap,
        request: &Request<'_>,
    ) -> Result<Window, Error> {
        let Request { items, open, take } = *request;
        let (Some(first), Some(last)) = (items.first(), items.last()) else {
            return Ok(Window::default());
        };
        let pages = (last.page - first.page) as usize + 1;
        let tracker = self.tracker.clone();
        let huge = match take {
            Take::Pages => None,
            Take::HugePage => self.hold_huge(memory, first.page, &tracker),
        };
        let as_one = huge.is_some();
        let hold = huge.unwrap_or_else(|| self.hold(memory, first.page, pages, &tracker));
        let start = hold.start;
        let stretches = hold.stretches(items);
        hold.arm(&stretches)?;
        let urgent = Urgent::begin();
        let clock = Instant::now();
        let mut outcomes = if as_one {
            hold.take_whole(items)
        } else {
            hold.take(items)
        };
        hold.verify(store, items, &mut outcomes);
        return_exceptions(items, &mut outcomes, open);
        let runs = hold.map(store, &mut self.aside, items, &mut outcomes);
        if as_one {
            hold.put_copies_back(items, &outcomes);
        } else {
            hold.put_back(items, &outcomes);
        }
        for run in &runs {
            breaker.adopt(pagemap, run);
        }
        // Whoever waits for a page can go on; only where nothing is, waiting ends with the registration.
        let _ = tracker.wake(start, bytes(pages));
        let mut stop = clock.elapsed();
        hold.disarm(&stretches, &runs);
        // A huge page that stayed is not tracked, and protecting its pages would split it.
        if !(as_one && outcomes.iter().all(|o| *o == Outcome::Pinned)) {
            hold.protect_again(items, &outcomes);
        }
        let _ = tracker.wake(start, bytes(pages));
        if outcomes.contains(&Outcome::Absent) {
            stop = clock.elapsed();
        }
        drop(urgent);
        if as_one {
            self.free_huge(pagemap, hold.scratch);
        }
        let stop_ns = u64::try_from(stop.as_nanos()).unwrap_or(u64::MAX);
        Ok(Window { outcomes, stop_ns })
    }

    /// As [`Self::hold`], for a huge page that is to stay one; `None` for want of memory.
    fn hold_huge<'a>(&mut self, memory: &Memory, first: Page, tracker: &'a Uffd) -> Option<Hold<'a>> {
        let made = self.huge.take().map_or_else(|| HugeScratch::new(tracker, 1), Ok);
        let scratch = made.inspect_err(|e| log::debug!("no place for a huge page: {e}"));
        let scratch = self.huge.insert(scratch.ok()?).place(0);
        Some(Hold {
            tracker,
            start: memory.address(first),
            scratch,
            first,
        })
    }

    /// Frees what is left of a huge page. If it was none any more there is a page table now, which would be in the next
    /// one's way: then the place is given up with it.
    fn free_huge(&mut self, pagemap: &mut Pagemap, place: usize) {
        let found = pagemap.huge(place..place + HUGE_SIZE).unwrap_or_default();
        let clean = found.iter().map(Range::len).sum::<usize>() == HUGE_SIZE;
        let freed = self.huge.as_ref().is_some_and(|scratch| scratch.free(0).is_ok());
        if !(clean && freed) {
            self.huge = None;
        }
    }

    /// Scratch memory for consecutive pages that are about to be taken.
    pub(crate) fn hold<'a>(
        &mut self,
        memory: &Memory,
        first: Page,
        pages: usize,
        tracker: &'a Uffd,
    ) -> Hold<'a> {
        assert!(pages <= MAX_WINDOW);
        if self.used + pages > SCRATCH_PAGES {
            self.free_taken();
        }
        let scratch = self.scratch.base() + bytes(self.used);
        self.used += pages;
        Hold {
            tracker,
            start: memory.address(first),
            scratch,
            first,
        }
    }

    /// To be called after some windows: frees what they left behind.
    pub(crate) fn clean_up(&mut self) {
        self.aside = None;
        self.free_taken();
    }

    /// Frees the pages that were merged. What is taken next must find its place empty.
    fn free_taken(&mut self) {
        while let Err(error) = self.scratch.discard(0, bytes(self.used)) {
            log::error!("cannot free {} merged pages: {error}", self.used);
            if let Ok(fresh) = new_scratch(&self.tracker) {
                self.scratch = fresh;
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.used = 0;
    }
}

fn new_scratch(tracker: &Uffd) -> io::Result<Anonymous> {
    let scratch = Anonymous::new(SCRATCH_PAGES)?;
    // UFFDIO_MOVE wants its destination registered and to have been anonymous memory in use: one page is enough.
    scratch.populate_part(0, PAGE_SIZE)?;
    scratch.discard(0, PAGE_SIZE)?;
    tracker.register(scratch.base(), bytes(SCRATCH_PAGES), Mode::Missing)?;
    Ok(scratch)
}

/// A window whose pages are ours for the moment.
pub(crate) struct Hold<'a> {
    tracker: &'a Uffd,
    start: usize,
    scratch: usize,
    first: Page,
}

impl Hold<'_> {
    fn offset(&self, item: &Item) -> usize {
        bytes((item.page - self.first) as usize)
    }

    /// Where an item's page is, once it was taken.
    pub(crate) fn scratch_of(&self, item: &Item) -> usize {
        self.scratch + self.offset(item)
    }

    /// The addresses of the items, as few ranges as possible.
    pub(crate) fn stretches(&self, items: &[Item]) -> Vec<Range<usize>> {
        let mut stretches: Vec<Range<usize>> = Vec::new();
        for item in items {
            let at = self.start + self.offset(item);
            match stretches.last_mut() {
                Some(last) if last.end == at => last.end += PAGE_SIZE,
                _ => stretches.push(at..at + PAGE_SIZE),
            }
        }
        stretches
    }

    /// Makes whoever touches a missing page in the stretches wait; write tracking rests there meanwhile. (The kernel
    /// cannot drop one of two modes of a registration, but it replaces one by the other.)
    pub(crate) fn arm(&self, stretches: &[Range<usize>]) -> Result<(), Error> {
        for (i, stretch) in stretches.iter().enumerate() {
            if let Err(source) = self.tracker.register(stretch.start, stretch.len(), Mode::Missing) {
                self.disarm(&stretches[..i], &[]);
                let _ = self
                    .tracker
                    .wake(stretches[0].start, stretch.end - stretches[0].start);
                return Err(Error::Register {
                    address: stretch.start,
                    source,
                });
            }
        }
        Ok(())
    }

    /// Ends that where no store mapping took the place, and tracks writes again.
    pub(crate) fn disarm(&self, stretches: &[Range<usize>], runs: &[Range<usize>]) {
        for stretch in stretches {
            let inside: Vec<Range<usize>> = runs
                .iter()
                .filter(|r| stretch.contains(&r.start))
                .cloned()
                .collect();
            for rest in complement(stretch, &inside) {
                if let Err(error) = self.tracker.register(rest.start, rest.len(), Mode::Wp) {
                    // Never leave anyone waiting: without registration nobody does. It is not tracked any more.
                    log::error!("write tracking of {rest:x?} is lost: {error}");
                    let _ = self.tracker.unregister(rest.start, rest.len());
                }
            }
        }
    }

    /// Pages that could not be taken stayed in place without tracking for a moment: what was written meanwhile must not
    /// look unwritten for ever. They are keyed anew, protected from here on.
    fn protect_again(&self, items: &[Item], outcomes: &[Outcome]) {
        let stayed = |o: &Outcome| matches!(o, Outcome::Pinned | Outcome::NotTaken);
        for (item, _) in items.iter().zip(outcomes).filter(|(_, o)| stayed(o)) {
            let _ = self
                .tracker
                .write_protect(self.start + self.offset(item), PAGE_SIZE, true);
        }
    }

    /// Moves the items' pages into scratch memory, stretch by stretch. `Merged` stands for "taken" until verified.
    pub(crate) fn take(&self, items: &[Item]) -> Vec<Outcome> {
        self.take_rest(items, Vec::with_capacity(items.len()))
    }

    /// Moves a huge page as one. If it is pinned, asking for its pages one by one would only split it (and older kernels
    /// try that for as long as it is pinned).
    #[allow(unsafe_code)] // moves guest pages
    fn take_whole(&self, items: &[Item]) -> Vec<Outcome> {
        // SAFETY: guest memory and scratch memory are only ever accessed through raw addresses.
        let (moved, error) = unsafe { self.tracker.move_pages(self.scratch, self.start, HUGE_SIZE) };
        if moved == 0 && error == Some(MoveError::Pinned) {
            return vec![Outcome::Pinned; items.len()];
        }
        self.take_rest(items, vec![Outcome::Merged; moved / PAGE_SIZE])
    }

    #[allow(unsafe_code)] // moves guest pages
    fn take_rest(&self, items: &[Item], mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
        let mut tries = 0;
        // One call moves pages of one mapping only. Pages that we broke lie in mappings of their own.
        let mut one_by_one = false;
        while outcomes.len() < items.len() {
            let rest = &items[outcomes.len()..];
            let neighbours = rest
                .iter()
                .zip(0u32..)
                .take_while(|(i, n)| i.page == rest[0].page + n);
            let stretch = neighbours.take(if one_by_one { 1 } else { MAX_WINDOW }).count();
            let offset = self.offset(&rest[0]);
            // SAFETY: guest memory and scratch memory are only ever accessed through raw addresses.
            let (moved, error) = unsafe {
                self.tracker
                    .move_pages(self.scratch + offset, self.start + offset, bytes(stretch))
            };
            outcomes.extend(std::iter::repeat_n(Outcome::Merged, moved / PAGE_SIZE));
            tries = if moved > 0 { 0 } else { tries + 1 };
            match error {
                None => {}
                Some(MoveError::Again) if tries < 100 => {}
                Some(MoveError::Refused(libc::EINVAL)) if stretch > 1 => one_by_one = true,
                Some(error) => {
                    tries = 0;
                    outcomes.push(match error {
                        MoveError::Pinned => Outcome::Pinned,
                        MoveError::Absent => Outcome::Absent,
                        MoveError::Again | MoveError::Refused(_) => Outcome::NotTaken,
                    });
                }
            }
        }
        outcomes.truncate(items.len());
        outcomes
    }

    #[allow(unsafe_code)] // compares raw pages
    fn verify(&self, store: &Store, items: &[Item], outcomes: &mut [Outcome]) {
        let shared = |(item, outcome): &(&Item, &mut Outcome)| {
            item.role != Role::Exception && **outcome == Outcome::Merged
        };
        for (item, outcome) in items.iter().zip(outcomes).filter(shared) {
            let page = self.scratch + self.offset(item);
            let equal = match item.slot {
                // SAFETY: the page was taken, so nobody writes it.
                None => unsafe { guest::is_zero_page(page) },
                // SAFETY: as above; the slot is mapped, and immutable while its epoch is not acknowledged.
                Some(slot) => store
                    .slot(slot)
                    .is_some_and(|(_, at)| unsafe { guest::same_page(page, at) }),
            };
            if !equal {
                *outcome = Outcome::Different;
            }
        }
    }

    /// Maps runs of verified pages; returns the ranges that now map the store, in order. From the last to the first:
    /// the kernel splits a mapping a tenth cheaper at its end than at its beginning.
    fn map(
        &self,
        store: &Store,
        aside: &mut Option<Aside>,
        items: &[Item],
        outcomes: &mut [Outcome],
    ) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        let mut end = items.len();
        while end > 0 {
            if outcomes[end - 1] != Outcome::Merged {
                end -= 1;
                continue;
            }
            let mut at = end - 1;
            while at > 0 && outcomes[at - 1] == Outcome::Merged && continues(&items[at - 1], &items[at]) {
                at -= 1;
            }
            match self.map_run(store, aside, &items[at..end]) {
                Ok(None) => {}
                Ok(Some(run)) => match runs.last_mut() {
                    Some(next) if next.start == run.end => next.start = run.start,
                    _ => runs.push(run),
                },
                Err(outcome) => outcomes[at..end].fill(outcome),
            }
            end = at;
        }
        runs.reverse();
        runs
    }

    #[allow(unsafe_code)] // maps over guest memory
    fn map_run(
        &self,
        store: &Store,
        aside: &mut Option<Aside>,
        run: &[Item],
    ) -> Result<Option<Range<usize>>, Outcome> {
        let at = self.start + self.offset(&run[0]);
        let len = bytes(run.len());
        let Some(slot) = run[0].slot else {
            let zeroed = self.tracker.zero_page(at, len).or_else(|_| {
                // As for moving: one mapping a call. What is zeroed already says so.
                (at..at + len).step_by(PAGE_SIZE).try_for_each(|at| {
                    match self.tracker.zero_page(at, PAGE_SIZE) {
                        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
                        done => done,
                    }
                })
            });
            return zeroed.map(|()| None).map_err(|_| Outcome::Refused);
        };
        let (file, _) = store.slot(slot).ok_or(Outcome::Refused)?;
        let exceptions = run.iter().any(|item| item.role == Role::Exception);
        let mapped = if exceptions {
            let aside = self
                .aside_for(aside, file, slot, run.len())
                .ok_or(Outcome::NoVma)?;
            let piece = aside.take(slot, run.len());
            self.fill(&piece, run).map_err(|_| Outcome::Refused)?;
            // SAFETY: the range is guest memory whose pages were taken. Those that are shared were verified equal to the
            // slots, the others were filled in.
            unsafe { piece.move_to(self.tracker, at) }
        } else {
            // SAFETY: the range is guest memory whose pages were taken and verified equal to the slots.
            unsafe { map_segment(at, len, file, slot.offset()) }
        };
        if mapped.is_err() {
            // Out of memory, the kernel may have unmapped the place all the same: then the pages go back into a new one.
            if fill_hole(at, len) {
                let _ = self.tracker.register(at, len, Mode::Missing);
            }
            return Err(Outcome::NoVma);
        }
        Ok(Some(at..at + len))
    }

    /// Where a run from a slot on can be built; what is there of the last one, if this one goes on behind it.
    fn aside_for<'a>(
        &self,
        aside: &'a mut Option<Aside>,
        file: BorrowedFd<'_>,
        slot: Slot,
        pages: usize,
    ) -> Option<&'a mut Aside> {
        if !aside.as_ref().is_some_and(|aside| aside.has(slot, pages)) {
            *aside = Aside::new(self.tracker, file, slot).ok();
        }
        aside.as_mut().filter(|aside| aside.has(slot, pages))
    }

    /// Fills the exceptions of a run in, neighbours in one call.
    #[allow(unsafe_code)] // copies guest pages
    fn fill(&self, piece: &Piece, run: &[Item]) -> io::Result<()> {
        let mut at = 0;
        for part in
            run.chunk_by(|a, b| a.role == b.role || (a.role != Role::Exception && b.role != Role::Exception))
        {
            if part[0].role == Role::Exception {
                let from = self.scratch + self.offset(&part[0]);
                // SAFETY: the pages were taken, so nobody writes them.
                unsafe { piece.fill(self.tracker, at, from, part.len()) }?;
            }
            at += part.len();
        }
        Ok(())
    }

    /// Moves back what was taken and is not to be merged. (What was not taken must not come here: there is nothing
    /// in its scratch page.)
    fn put_back(&self, items: &[Item], outcomes: &[Outcome]) {
        for (item, _) in items.iter().zip(outcomes).filter(|(_, o)| o.is_held()) {
            self.put_back_one(self.offset(item));
        }
    }

    /// The same by copying, which leaves a huge page in scratch memory whole.
    #[allow(unsafe_code)] // copies guest pages
    fn put_copies_back(&self, items: &[Item], outcomes: &[Outcome]) {
        let mut at = 0;
        for part in outcomes.chunk_by(|a, b| a.is_held() == b.is_held()) {
            let offset = self.offset(&items[at]);
            at += part.len();
            // SAFETY: the pages were taken, so nobody writes them, and their places are empty.
            let copied = |len| unsafe { self.tracker.copy(self.start + offset, self.scratch + offset, len) };
            if part[0].is_held() && copied(bytes(part.len())).is_err() {
                let pages = (offset..offset + bytes(part.len())).step_by(PAGE_SIZE);
                pages.for_each(|offset| self.put_back_one(offset));
            }
        }
    }

    pub(crate) fn put_back_item(&self, item: &Item) {
        self.put_back_one(self.offset(item));
    }

    fn put_back_one(&self, offset: usize) {
        put_back_page(self.tracker, self.scratch + offset, self.start + offset);
    }
}

/// Moves one page back, or, should the kernel refuse to move it, copies it back: nobody else can have it pinned.
/// Its place in scratch memory is empty then.
#[allow(unsafe_code)] // moves and copies guest pages
pub(crate) fn put_back_page(tracker: &Uffd, from: usize, to: usize) {
    for attempt in 0u64.. {
        // SAFETY: raw addresses only.
        let (_, error) = unsafe { tracker.move_pages(to, from, PAGE_SIZE) };
        match error {
            None => return,
            // Absent, after the copy below had put it back already.
            Some(MoveError::Absent) if attempt > 0 => return,
            Some(_) => {}
        }
        // SAFETY: the scratch page is ours and readable, its place in the guest empty.
        match unsafe { tracker.copy(to, from, PAGE_SIZE) } {
            Ok(()) => return drop_copy(from),
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => return drop_copy(from),
            Err(e) if attempt % 1000 == 0 => log::error!("cannot put a guest page back: {e}; trying on"),
            Err(_) => {}
        }
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
}

/// Empties a place in scratch memory.
fn drop_copy(at: usize) {
    if let Err(error) = discard_own(at, PAGE_SIZE) {
        log::error!("a copy of a guest page stays in scratch memory: {error}");
    }
}
