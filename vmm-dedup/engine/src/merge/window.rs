//! The steps of a merge window. Why nothing is lost by them: [`crate::merge::merger`].

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::ranges::complement;
use crate::merge::merger::MAX_WINDOW;
use crate::merge::request::{Item, Outcome, Role, continues};
use crate::merge::run_builder::{Aside, Piece};
use crate::store::connection::Store;
use crate::sys::guest;
use crate::sys::page_size::{HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::relocate::{mend_hole, put_back_page, put_back_pages};
use crate::sys::uffd::{Mode, MoveError, Uffd};
use crate::sys::vma::map_segment;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use vmm_dedup_protocol::Slot;

/// Pages that are compared before it is asked again whether somebody waits: some ten microseconds.
const BLOCK: usize = 16;

/// A window whose pages are ours for the moment.
pub(crate) struct Hold<'a> {
    pub(crate) tracker: &'a Uffd,
    /// Address of the first page.
    pub(crate) start: usize,
    /// Its place while it is away; the others' follow.
    pub(crate) scratch: usize,
    pub(crate) first: Page,
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
    pub(crate) fn protect_again(&self, items: &[Item], outcomes: &[Outcome]) {
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
    pub(crate) fn take_whole(&self, items: &[Item]) -> Vec<Outcome> {
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

    /// Compares what was taken with its slots, while `go_on` says so, which is asked again and again; whether to the end.
    pub(crate) fn verify(
        &self,
        store: &Store,
        items: &[Item],
        outcomes: &mut [Outcome],
        mut go_on: impl FnMut() -> bool,
    ) -> bool {
        let mut blocks = items.chunks(BLOCK).zip(outcomes.chunks_mut(BLOCK));
        blocks.all(|(items, outcomes)| {
            let go_on = go_on();
            if go_on {
                self.verify_block(store, items, outcomes);
            }
            go_on
        })
    }

    #[allow(unsafe_code)] // compares raw pages
    fn verify_block(&self, store: &Store, items: &[Item], outcomes: &mut [Outcome]) {
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
    pub(crate) fn map(
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
            mend_hole(self.tracker, &(at..at + len));
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
    pub(crate) fn put_back(&self, items: &[Item], outcomes: &[Outcome]) {
        for (item, _) in items.iter().zip(outcomes).filter(|(_, o)| o.is_held()) {
            self.put_back_one(self.offset(item));
        }
    }

    /// The same by copying, which leaves a huge page in scratch memory whole.
    #[allow(unsafe_code)] // copies guest pages
    pub(crate) fn put_copies_back(&self, items: &[Item], outcomes: &[Outcome]) {
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

    /// Moves everything back that was taken, for somebody who waits for it.
    pub(crate) fn put_all_back(&self, items: &[Item], outcomes: &mut [Outcome]) {
        let mut at = 0;
        for part in outcomes.chunk_by_mut(|a, b| a.was_taken() == b.was_taken()) {
            let offset = self.offset(&items[at]);
            at += part.len();
            if part[0].was_taken() {
                let (from, to) = (self.scratch + offset, self.start + offset);
                put_back_pages(self.tracker, from, to, bytes(part.len()));
                part.fill(Outcome::Wanted);
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
