//! The one way in which guest pages are taken away for a moment.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Arm.* Addresses are registered for missing pages. Whoever touches one of them while nothing is there waits.
//! 2. *Take.* UFFDIO_MOVE moves pages into scratch memory of ours. The kernel does this page by page under the page table
//!    lock, and refuses (EBUSY) a page that is pinned, so no device or io_uring buffer points to what we hold. A vCPU or a
//!    system call that touches the address from now on finds it empty and waits; writes before the move are in the page
//!    that we got. Nobody else can reach it: what is read of it stays true.
//! 3. What was taken is *put back*. Or something of the same content was put into its place: then it is *consumed*.
//! 4. *Wake, disarm.* Only now are waiters woken; they fault again and find what is there. Then writes are tracked again.
//!
//! A [`Window`] knows at any time which pages are armed and which are away. However it ends, by [`Window::close`], by an
//! error or by a panic of the thread that holds it, everything that is away goes back, nothing stays armed, and everybody
//! who waits is woken. Putting back is tried until it works: the page exists nowhere else.
//!
//! Merging, building huge pages, giving up zeros, sampling and packing all use it. Pages in mappings of store files cannot be taken;
//! they are replaced while they are [`Frozen`]. Memory that is discarded must not meet a window:
//! whoever opens one holds the lock of [`discard`](mod@crate::unmerge::discard) until it is closed.
//!
//! Nothing is logged while pages are away: a log may end in a thread of the VMM that waits for one of them.

mod frozen;
mod huge_scratch;
mod page_set;
mod scratch;

pub(crate) use frozen::{Afterwards, Frozen};
pub(crate) use huge_scratch::HugeScratch;
pub(crate) use page_set::PageSet;
pub(crate) use scratch::{MAX_WINDOW, Scratch};

use crate::error::Error;
use crate::sys::inject::{AnotherWay, Call};
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::relocate::{self, move_away, put_back_page, put_back_pages, track_again};
use crate::sys::uffd::{Mode, MoveError, Uffd};
use std::io;
use std::ops::Range;
use std::time::Duration;

/// Tries to take what the kernel holds for a moment.
const TRIES: usize = 100;

/// What became of a page that was to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is ours.
    Yes,
    /// It is pinned, or shared with another process.
    Pinned,
    /// Nothing was there.
    Absent,
    /// The kernel would not move it.
    Refused,
}

impl Taken {
    fn of_error(error: MoveError) -> Self {
        match error {
            MoveError::Pinned => Self::Pinned,
            MoveError::Absent => Self::Absent,
            MoveError::Again | MoveError::Refused(_) => Self::Refused,
        }
    }
}

/// A page could not be taken. That it is pinned or not there is no failure.
fn note_refusal(error: MoveError) {
    let errno = match error {
        MoveError::Pinned | MoveError::Absent => return,
        MoveError::Again => libc::EAGAIN,
        MoveError::Refused(errno) => errno,
    };
    let error = io::Error::from_raw_os_error(errno);
    late_log::note("taking guest pages", &error, "they stay as they are for now");
}

/// Pages that are ours for the moment. Pages are named by their offset from the first.
#[derive(Debug)]
pub(crate) struct Window<'a> {
    uffd: &'a Uffd,
    /// Guest address of the first page.
    start: usize,
    /// Where the first page is while it is away; the others follow.
    scratch: usize,
    /// Pages from the first to the last.
    pages: usize,
    /// Registered for missing pages.
    armed: PageSet,
    /// Taken, and neither put back nor consumed.
    away: PageSet,
    /// What became of each page that was to be taken. It has its place here, since no memory is asked for while pages are away.
    became: [Taken; CHUNK_PAGES],
}

impl<'a> Window<'a> {
    /// Arms pages of a place in guest memory. Write tracking rests there meanwhile: the kernel cannot drop one of two modes
    /// of a registration, but it replaces one by the other.
    ///
    /// # Errors
    /// [`Error::Register`]; everything is as it was then.
    pub(crate) fn open(uffd: &'a Uffd, start: usize, scratch: usize, pages: &PageSet) -> Result<Self, Error> {
        let end = pages.runs().last().map_or(0, |run| run.end);
        let mut window = Self::of_registered(uffd, start, scratch, end);
        for run in pages.runs() {
            let address = window.address(run.start);
            if let Err(source) = uffd.register(address, bytes(run.len()), Mode::Missing) {
                late_log::note("arming guest pages", &source, "they stay as they are for now");
                if source.raw_os_error() == Some(libc::ENOMEM) {
                    // The first mappings of the run may be armed: the kernel goes from one to the next. (Else none is, and some may be
                    // another userfaultfd's, whose registration older kernels would end.)
                    window.armed.insert(run);
                }
                return Err(Error::Register { address, source });
            }
            window.armed.insert(run);
        }
        Ok(window)
    }

    /// A window over places, from the first to that before `end`, which the caller has registered for missing pages, and which stay
    /// so when it ends.
    pub(crate) fn of_registered(uffd: &'a Uffd, start: usize, scratch: usize, end: usize) -> Self {
        Self {
            uffd,
            start,
            scratch,
            pages: end,
            armed: PageSet::default(),
            away: PageSet::default(),
            became: [Taken::Absent; CHUNK_PAGES],
        }
    }

    /// Guest address of a page.
    pub(crate) fn address(&self, page: usize) -> usize {
        self.start + bytes(page)
    }

    /// Where a page is while it is away.
    pub(crate) fn taken(&self, page: usize) -> usize {
        self.scratch + bytes(page)
    }

    /// What is away now.
    pub(crate) fn away(&self) -> PageSet {
        self.away
    }

    /// What became of pages that were to be taken, each asked for once. (It does not change when they go back.)
    pub(crate) fn became(&self, pages: Range<usize>) -> &[Taken] {
        &self.became[pages]
    }

    fn note_taken(&mut self, pages: Range<usize>) {
        self.became[pages.clone()].fill(Taken::Yes);
        self.away.insert(pages);
    }

    /// Takes consecutive armed pages; [`Self::became`] tells which. What the kernel holds for a moment is tried again.
    #[allow(unsafe_code)] // moves guest pages
    pub(crate) fn take(&mut self, pages: Range<usize>) {
        let (mut at, mut tries) = (pages.start, 0);
        // One call moves pages of one mapping only. Pages that the service broke lie in mappings of their own.
        let mut one_by_one = false;
        while at < pages.end {
            let len = if one_by_one { 1 } else { pages.end - at };
            // SAFETY: guest memory and scratch memory are only ever accessed through raw addresses.
            let (moved, error) =
                unsafe { self.uffd.move_pages(self.taken(at), self.address(at), bytes(len)) };
            let moved = moved / PAGE_SIZE;
            self.note_taken(at..at + moved);
            at += moved;
            tries = if moved > 0 { 0 } else { tries + 1 };
            match error {
                None => {}
                Some(MoveError::Again) if tries < TRIES => {}
                Some(MoveError::Refused(libc::EINVAL)) if len > 1 => one_by_one = true,
                Some(_) if at == pages.end => {}
                Some(error) => {
                    tries = 0;
                    note_refusal(error);
                    self.became[at] = Taken::of_error(error);
                    at += 1;
                }
            }
        }
    }

    /// Takes consecutive armed pages up to the first that cannot be taken; how many, and why no more.
    pub(crate) fn take_prefix(&mut self, pages: Range<usize>) -> (usize, Taken) {
        let (from, to) = (self.address(pages.start), self.taken(pages.start));
        let (moved, error) = move_away(self.uffd, from, to, bytes(pages.len()));
        let moved = moved / PAGE_SIZE;
        self.note_taken(pages.start..pages.start + moved);
        error.into_iter().for_each(note_refusal);
        (moved, error.map_or(Taken::Yes, Taken::of_error))
    }

    /// Takes a huge page as one, into a place for huge pages. If it is pinned, asking for its pages one by one would only split
    /// it, and older kernels try that for as long as it is pinned.
    #[allow(unsafe_code)] // moves guest pages
    pub(crate) fn take_huge(&mut self) {
        let page_by_page = AnotherWay::of(Call::Move);
        // SAFETY: as in `take`.
        let (moved, error) = unsafe { self.uffd.move_pages(self.scratch, self.start, HUGE_SIZE) };
        drop(page_by_page);
        let moved = moved / PAGE_SIZE;
        self.note_taken(0..moved);
        if moved == 0 && error == Some(MoveError::Pinned) {
            self.became.fill(Taken::Pinned);
        } else {
            self.take(moved..CHUNK_PAGES);
        }
    }

    /// Moves back what is away of some pages; whether all of it went in one move, as a huge page does.
    pub(crate) fn put_back(&mut self, pages: Range<usize>) -> bool {
        let mut as_one = true;
        for run in self.away.runs_within(&pages) {
            let (from, to) = (self.taken(run.start), self.address(run.start));
            as_one &= put_back_pages(self.uffd, from, to, bytes(run.len()));
            self.away.remove(run);
        }
        as_one
    }

    /// Moves everything back that is away; whether that was one move.
    pub(crate) fn put_back_all(&mut self) -> bool {
        self.put_back(0..CHUNK_PAGES)
    }

    /// Tracks writes again and lets everybody go on, before the window's end: what is not there is nobody's to wait for.
    pub(crate) fn let_go(&mut self) {
        let stayed = self.disarm();
        self.wake();
        self.count_as_written(stayed);
    }

    /// As [`Self::put_back`], by copying, which leaves a huge page in scratch memory whole.
    #[allow(unsafe_code)] // copies guest pages
    pub(crate) fn put_copies_back(&mut self, pages: Range<usize>) {
        for run in self.away.runs_within(&pages) {
            let (from, to) = (self.taken(run.start), self.address(run.start));
            // SAFETY: the pages were taken, so nobody writes them, and their places are empty.
            if unsafe { self.uffd.copy(to, from, bytes(run.len())) }.is_err() {
                let each = (0..bytes(run.len())).step_by(PAGE_SIZE);
                each.for_each(|offset| put_back_page(self.uffd, from + offset, to + offset));
            }
            self.away.remove(run);
        }
    }

    /// Fills pages that are away with the zero page, which is what they hold.
    ///
    /// # Errors
    /// Those of the kernel. Some may be filled then; what is not, is still away.
    pub(crate) fn put_zeros(&mut self, pages: Range<usize>) -> io::Result<()> {
        let address = self.address(pages.start);
        let page_by_page = AnotherWay::of(Call::ZeroPage);
        let all = self.uffd.zero_page(address, bytes(pages.len()));
        drop(page_by_page);
        if all.is_err() {
            // As for moving: one mapping a call. What is filled says so.
            for page in pages.clone() {
                match self.uffd.zero_page(self.address(page), PAGE_SIZE) {
                    Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(error),
                    _ => self.away.remove(page..page + 1),
                }
            }
        }
        self.away.remove(pages);
        Ok(())
    }

    /// What is away of some pages does not go back: its place stays empty, which stands for the zeros that it held; or whoever
    /// touches it waits for what is kept elsewhere.
    pub(crate) fn leave_empty(&mut self, pages: Range<usize>) {
        self.away.remove(pages);
    }

    /// Another mapping of the same content took the place of some pages. It is not armed.
    pub(crate) fn replaced(&mut self, pages: Range<usize>) {
        self.away.remove(pages.clone());
        self.armed.remove(pages);
    }

    /// Tracks writes to anonymous memory that took the place of some pages.
    pub(crate) fn track(&mut self, pages: Range<usize>) {
        track_again(self.uffd, &(self.address(pages.start)..self.address(pages.end)));
    }

    /// Whether somebody waits, for a page that is away or at a place where there was none.
    pub(crate) fn somebody_waits(&self) -> bool {
        self.uffd.somebody_waits(Duration::ZERO)
    }

    /// Lets everybody go on who waits in the window.
    pub(crate) fn wake(&self) {
        if self.pages > 0 {
            relocate::wake(self.uffd, &(self.start..self.start + bytes(self.pages)));
        }
    }

    /// Ends the window: what is still away goes back, writes are tracked again, waiters go on.
    pub(crate) fn close(mut self) {
        self.finish();
        std::mem::forget(self); // it owns nothing more
    }

    fn finish(&mut self) {
        self.put_back_all();
        self.let_go();
    }

    /// Tracks writes again; where that worked: what was armed and never taken.
    fn disarm(&mut self) -> PageSet {
        let mut stayed = PageSet::default();
        for run in self.armed.runs() {
            if track_again(self.uffd, &(self.address(run.start)..self.address(run.end))) {
                let untaken = run.filter(|page| self.became[*page] != Taken::Yes);
                untaken.for_each(|page| stayed.insert(page..page + 1));
            }
        }
        self.armed = PageSet::default();
        stayed
    }

    /// Pages that were armed and never taken may have been written meanwhile, and the kernel left the mark of an unwritten page on
    /// those that it had protected: then it would not see later writes either. So the mark goes.
    fn count_as_written(&self, stayed: PageSet) {
        for run in stayed.runs() {
            relocate::unmark(self.uffd, &(self.address(run.start)..self.address(run.end)));
        }
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests;
