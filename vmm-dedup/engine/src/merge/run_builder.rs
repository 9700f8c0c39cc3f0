//! Building runs with exceptions beside the guest.
//!
//! A run is mapped at an address of ours, its exceptions are filled in there, and then the finished piece moves into
//! the guest's place in one step: nobody ever sees the file where an exception belongs. Mapping it in place first would
//! show the guest somebody else's page there, or a hole of the file.
//!
//! All that needs memory is done before the window opens, or pages are frozen: the piece is mapped, and each exception gets a page
//! of zeros. (The kernel's own copy on write would do as well, but it would fill the hole of the file first.) While pages are away
//! the exceptions' bytes are copied into these pages, and the piece is moved. What a window does not use of its pieces is
//! unmapped when it is closed.

use crate::lookup::request::{MergeRequest, Role};
use crate::merge::run::{Outcome, continues};
use crate::store::connection::Store;
use crate::sys::guest;
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE, bytes};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use vmm_dedup_protocol::key::PAGE_WORDS;
use vmm_dedup_protocol::{SLOTS_PER_SEGMENT, Slot};

/// What becomes of pages whose run could not be built or mapped.
pub(super) const STAYS: &str = "its pages stay private for now";
/// The same where the kernel may lack mappings.
pub(super) const STAYS_FOR_MAPPINGS: &str =
    "its pages stay private for now; if that goes on, raise vm.max_map_count";

/// What places of exceptions hold at first.
static ZEROS: [[u64; PAGE_WORDS]; 4] = [[0; PAGE_WORDS]; 4];

/// Builds the runs with exceptions of one window after the other.
#[derive(Debug, Default)]
pub(crate) struct RunBuilder {
    stretch: Option<Stretch>,
}

impl RunBuilder {
    /// Maps the runs of a window that have exceptions, with a place for each of these. To be called before its pages are taken.
    pub(crate) fn prepare(&mut self, tracker: &Uffd, store: &Store, requests: &[MergeRequest]) -> Pieces {
        let mut pieces = Pieces::default();
        let mut start = 0;
        for run in requests.chunk_by(continues) {
            let part = start..start + run.len();
            start = part.end;
            if run.iter().any(is_exception) {
                pieces.runs.push((part, self.prepare_run(tracker, store, run)));
            }
        }
        // What is left over of them is noted while pages are away.
        if !pieces.runs.is_empty() {
            pieces.rest.reserve(requests.len());
        }
        pieces
    }

    /// To be called after some windows.
    pub(crate) fn clean_up(&mut self) {
        self.stretch = None;
    }

    fn prepare_run(&mut self, tracker: &Uffd, store: &Store, run: &[MergeRequest]) -> Result<Piece, Outcome> {
        let slot = run[0].slot.ok_or(Outcome::Refused)?;
        let file = store.file_to_map(slot).ok_or(Outcome::Refused)?;
        let stretch = self.stretch_for(tracker, file, slot, run.len());
        let piece = stretch.and_then(|stretch| stretch.take(slot, run.len()));
        let piece = piece.ok_or(Outcome::NoVma)?;
        let mut at = 0;
        for part in run.chunk_by(|a, b| is_exception(a) == is_exception(b)) {
            if is_exception(&part[0]) {
                piece.make_room(tracker, at..at + part.len()).map_err(|error| {
                    late_log::note("making room for the exceptions of a run", &error, STAYS);
                    Outcome::Refused
                })?;
            }
            at += part.len();
        }
        piece.close(tracker).map_err(|error| {
            late_log::note("mapping a run beside the guest", &error, STAYS_FOR_MAPPINGS);
            Outcome::NoVma
        })?;
        Ok(piece)
    }

    /// Where a run from a slot on can be built; what is there of the last one, if this one goes on behind it.
    fn stretch_for(
        &mut self,
        tracker: &Uffd,
        file: BorrowedFd<'_>,
        slot: Slot,
        pages: usize,
    ) -> Option<&mut Stretch> {
        let stretch = &mut self.stretch;
        if !stretch.as_ref().is_some_and(|stretch| stretch.has(slot, pages)) {
            let made = Stretch::new(tracker, file, slot);
            let note = |error: &io::Error| {
                late_log::note("mapping a run beside the guest", error, STAYS_FOR_MAPPINGS)
            };
            *stretch = made.inspect_err(note).ok();
        }
        stretch.as_mut()
    }
}

pub(super) fn is_exception(request: &MergeRequest) -> bool {
    request.role == Role::Exception
}

/// A stretch of a segment's file, mapped beside the guest, from which pieces are taken in order. Pieces of one such
/// mapping that end up next to each other become one mapping again, those of two do not: the kernel keeps the private
/// pages of each mapping in a family of its own.
#[derive(Debug)]
struct Stretch {
    segment: u32,
    /// The number of the slot at which the rest begins.
    first: u32,
    rest: Piece,
}

impl Stretch {
    /// Maps a segment from a slot on, as much as one chunk may need.
    fn new(tracker: &Uffd, segment: BorrowedFd<'_>, first: Slot) -> io::Result<Self> {
        let left = SLOTS_PER_SEGMENT - first.number() % SLOTS_PER_SEGMENT;
        Ok(Self {
            segment: first.segment(),
            first: first.number(),
            rest: Piece::map_beside(tracker, segment, first, CHUNK_PAGES.min(left as usize))?,
        })
    }

    /// Whether a piece of that many pages from a slot on is still there.
    fn has(&self, slot: Slot, pages: usize) -> bool {
        self.offset(slot)
            .is_some_and(|offset| bytes(offset + pages) <= self.rest.len)
    }

    fn offset(&self, slot: Slot) -> Option<usize> {
        let offset = slot.number().checked_sub(self.first)?;
        (slot.segment() == self.segment).then_some(offset as usize)
    }

    /// Gives a piece away, and frees what lies before it; [`None`] if it is not there any more.
    fn take(&mut self, slot: Slot, pages: usize) -> Option<Piece> {
        let offset = self.offset(slot).filter(|_| self.has(slot, pages))?;
        let mut piece = self.rest.split_off(offset);
        self.rest = piece.split_off(pages);
        self.first = slot
            .number()
            .saturating_add(u32::try_from(pages).unwrap_or(u32::MAX));
        Some(piece)
    }
}

/// The pieces of a window, or why there is none. To be dropped when nothing is away any more.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// Requests, counted from the first, and what was built for them.
    runs: Vec<(Range<usize>, Result<Piece, Outcome>)>,
    /// What was left over.
    rest: Vec<Piece>,
}

impl Pieces {
    /// The piece for some consecutive requests of a run with exceptions. The last ones of a run are to be asked for first.
    pub(crate) fn take(&mut self, requests: &Range<usize>) -> Result<Piece, Outcome> {
        let of_run =
            |(run, _): &&mut (Range<usize>, _)| run.start <= requests.start && requests.end <= run.end;
        let (run, piece) = self.runs.iter_mut().find(of_run).ok_or(Outcome::Refused)?;
        let piece = piece.as_mut().map_err(|outcome| *outcome)?;
        let behind = piece.split_off(requests.end - run.start);
        self.rest.extend((behind.len > 0).then_some(behind));
        run.end = requests.start;
        Ok(piece.split_off(requests.start - run.start))
    }

    /// A piece that was taken and is not needed.
    pub(super) fn leave(&mut self, piece: Piece) {
        self.rest.push(piece);
    }
}

/// A part of a run, to be filled and moved into place; unmapped if that does not come about.
#[derive(Debug)]
pub(crate) struct Piece {
    address: usize,
    len: usize,
}

impl Piece {
    /// Maps consecutive slots of a segment from one on. Places in it can be filled until it is [closed](Self::close).
    pub(super) fn map_beside(
        tracker: &Uffd,
        segment: BorrowedFd<'_>,
        first: Slot,
        pages: usize,
    ) -> io::Result<Self> {
        let len = bytes(pages);
        let address = vma::map_segment_anywhere(len, segment, first.offset())?;
        let piece = Self { address, len };
        // UFFDIO_COPY wants its destination registered.
        tracker.register(address, len, Mode::Missing)?;
        Ok(piece)
    }

    /// Ends the filling of places.
    pub(super) fn close(&self, tracker: &Uffd) -> io::Result<()> {
        // A registered mapping would not join its neighbour in the guest, which is not registered any more.
        tracker.unregister(self.address, self.len)
    }

    /// Gives some pages a page of their own each, a copy of what lies at `from`.
    ///
    /// # Safety
    /// As many pages at `from` must be readable, and nobody may write them meanwhile.
    #[allow(unsafe_code)] // fills pages
    pub(super) unsafe fn copy_in(&self, tracker: &Uffd, pages: Range<usize>, from: usize) -> io::Result<()> {
        assert!(bytes(pages.end) <= self.len);
        // SAFETY: as promised by the caller; the place is ours, registered and empty.
        unsafe { tracker.copy(self.address + bytes(pages.start), from, bytes(pages.len())) }
    }

    /// Puts pages of our own into places of exceptions.
    #[allow(unsafe_code)] // fills pages
    fn make_room(&self, tracker: &Uffd, pages: Range<usize>) -> io::Result<()> {
        let zeros = ZEROS.as_ptr() as usize;
        for first in pages.clone().step_by(ZEROS.len()) {
            let some = first..pages.end.min(first + ZEROS.len());
            // SAFETY: the zeros are as long, and never written.
            unsafe { self.copy_in(tracker, some, zeros) }?;
        }
        Ok(())
    }

    /// Leaves this the pages before one.
    fn split_off(&mut self, page: usize) -> Self {
        let kept = bytes(page);
        assert!(kept <= self.len);
        let rest = Self {
            address: self.address + kept,
            len: self.len - kept,
        };
        self.len = kept;
        rest
    }

    /// Fills an exception in, whose page lies at `from`.
    ///
    /// # Safety
    /// It must have been an exception when the run was prepared, the page must be readable, and nobody may write it meanwhile.
    #[allow(unsafe_code)] // copies pages
    pub(crate) unsafe fn fill(&mut self, page: usize, from: usize) {
        assert!((page + 1) * PAGE_SIZE <= self.len);
        let mut words = [0; PAGE_WORDS];
        // SAFETY: as promised by the caller; the place is a page of ours ([`Self::make_room`]), which nobody else knows.
        unsafe {
            guest::copy_page(from, &mut words);
            guest::store_page(self.address + bytes(page), &words);
        }
    }

    /// Moves the piece over a place of the guest, which becomes an ordinary mapping of the store.
    ///
    /// # Safety
    /// The guest's pages there must have been taken away, and the piece must show what the guest is to see.
    #[allow(unsafe_code)] // replaces guest memory
    pub(crate) unsafe fn move_to(self, at: usize) -> io::Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { vma::move_over(self.address, at, self.len) }?;
        std::mem::forget(self);
        Ok(())
    }

    /// The mapping, which is the caller's from now on.
    pub(super) fn into_address(self) -> usize {
        let address = self.address;
        std::mem::forget(self);
        address
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        vma::unmap(self.address, self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::vma::Anonymous;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    const PAGES: usize = 8;

    #[test]
    #[allow(unsafe_code)] // memory of the test's own
    fn filling_a_place_in_fills_no_hole_of_the_file() {
        let Ok(tracker) = Uffd::tracker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let file = rustix::fs::memfd_create("holes", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(bytes(PAGES) as u64).unwrap();
        let area = Anonymous::new(PAGES).unwrap();
        area.populate_part(0, bytes(PAGES)).unwrap();
        for page in 0..PAGES {
            // SAFETY: a page of the area's.
            unsafe { guest::store_page(area.base() + bytes(page), &[page as u64 + 1; PAGE_WORDS]) };
        }
        let first = Slot::try_new(0).unwrap();
        let piece = Piece::map_beside(&tracker, file.as_fd(), first, PAGES).unwrap();
        // SAFETY: the area has as many pages.
        unsafe { piece.copy_in(&tracker, 2..5, area.base() + bytes(2)) }.unwrap();
        piece.close(&tracker).unwrap();
        let mut page = [0; PAGE_WORDS];
        for at in 2..5 {
            // SAFETY: a page that was just filled in.
            unsafe { guest::copy_page(piece.address + bytes(at), &mut page) };
            assert_eq!(page, [at as u64 + 1; PAGE_WORDS]);
        }
        assert_eq!(file.metadata().unwrap().blocks(), 0);
    }
}
