//! Building a run with exceptions beside the guest.
//!
//! The run is mapped at an address of ours, its exceptions are filled in there, and then the finished piece moves into
//! the guest's place in one step: nobody ever sees the file where an exception belongs. Mapping it in place first would
//! show the guest somebody else's page there, or a hole of the file.

use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE, bytes};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma;
use std::io;
use std::os::fd::BorrowedFd;
use vmm_dedup_protocol::{SLOTS_PER_SEGMENT, Slot};

/// A stretch of a segment's file, mapped beside the guest, from which pieces are taken in order. Pieces of one such
/// mapping that end up next to each other become one mapping again, those of two do not: the kernel keeps the private
/// pages of each mapping in a family of its own.
#[derive(Debug)]
pub(crate) struct RunBuilder {
    base: usize,
    first: Slot,
    pages: usize,
    /// Pages from the start that are not ours any more.
    gone: usize,
}

impl RunBuilder {
    /// Maps a segment from a slot on, as much as one chunk may need.
    pub(crate) fn new(tracker: &Uffd, segment: BorrowedFd<'_>, first: Slot) -> io::Result<Self> {
        let left = SLOTS_PER_SEGMENT - first.number() % SLOTS_PER_SEGMENT;
        let pages = CHUNK_PAGES.min(left as usize);
        let base = vma::map_segment_anywhere(bytes(pages), segment, first.offset())?;
        let builder = Self {
            base,
            first,
            pages,
            gone: 0,
        };
        // UFFDIO_COPY wants its destination registered.
        tracker.register(base, bytes(pages), Mode::Missing)?;
        Ok(builder)
    }

    /// Whether a piece of that many pages from a slot on is still there.
    pub(crate) fn has(&self, slot: Slot, pages: usize) -> bool {
        self.offset(slot)
            .is_some_and(|offset| offset >= self.gone && offset + pages <= self.pages)
    }

    fn offset(&self, slot: Slot) -> Option<usize> {
        let offset = slot.number().checked_sub(self.first.number())?;
        (slot.segment() == self.first.segment()).then_some(offset as usize)
    }

    /// Gives a piece away, which [`Self::has`] said is there, and frees what lies before it.
    pub(crate) fn take(&mut self, slot: Slot, pages: usize) -> Piece {
        assert!(self.has(slot, pages));
        let offset = self.offset(slot).unwrap_or(self.gone);
        vma::unmap(self.base + bytes(self.gone), bytes(offset - self.gone));
        self.gone = offset + pages;
        Piece {
            address: self.base + bytes(offset),
            len: bytes(pages),
        }
    }
}

impl Drop for RunBuilder {
    fn drop(&mut self) {
        vma::unmap(self.base + bytes(self.gone), bytes(self.pages - self.gone));
    }
}

/// A part of a run, to be filled and moved into place; unmapped if that does not come about.
#[derive(Debug)]
pub(crate) struct Piece {
    address: usize,
    len: usize,
}

impl Piece {
    /// Fills exceptions in, whose pages lie at `from` and the following addresses.
    ///
    /// # Safety
    /// The pages must be readable, and nobody may write them meanwhile.
    #[allow(unsafe_code)] // copies pages
    pub(crate) unsafe fn fill(
        &self,
        tracker: &Uffd,
        page: usize,
        from: usize,
        pages: usize,
    ) -> io::Result<()> {
        assert!((page + pages) * PAGE_SIZE <= self.len);
        // SAFETY: as promised by the caller; the place is ours, registered and empty.
        unsafe { tracker.copy(self.address + bytes(page), from, bytes(pages)) }
    }

    /// Moves the piece over a place of the guest, which becomes an ordinary mapping of the store.
    ///
    /// # Safety
    /// The guest's pages there must have been taken away, and the piece must show what the guest is to see.
    #[allow(unsafe_code)] // replaces guest memory
    pub(crate) unsafe fn move_to(self, tracker: &Uffd, at: usize) -> io::Result<()> {
        // A registered mapping would not join its neighbour in the guest, which is not registered any more.
        tracker.unregister(self.address, self.len)?;
        // SAFETY: as promised by the caller.
        unsafe { vma::move_over(self.address, at, self.len) }?;
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        vma::unmap(self.address, self.len);
    }
}
