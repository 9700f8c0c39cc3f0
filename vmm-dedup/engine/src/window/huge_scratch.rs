//! Where taken huge pages wait.

use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma::Anonymous;
use std::io;

/// Empty places of 2 MiB, into which UFFDIO_MOVE moves a huge page as one mapping: there must be no page table yet.
#[derive(Debug)]
pub(crate) struct HugeScratch {
    area: Anonymous,
    base: usize,
}

impl HugeScratch {
    pub(crate) fn new(tracker: &Uffd, places: usize) -> io::Result<Self> {
        // One range more for alignment, and one that is populated: the kernel moves only into memory that was in use.
        let area = Anonymous::new((places + 2) * CHUNK_PAGES)?;
        area.hide();
        let base = area.base().next_multiple_of(HUGE_SIZE);
        let behind = base + places * HUGE_SIZE;
        area.populate_part(behind - area.base(), PAGE_SIZE)?;
        tracker.register(base, places * HUGE_SIZE, Mode::Missing)?;
        Ok(Self { area, base })
    }

    /// Frees what is in a place. After a huge page that left as one, or is freed as one, no page table is there.
    pub(crate) fn free(&self, number: usize) -> io::Result<()> {
        self.area
            .discard(self.place(number) - self.area.base(), HUGE_SIZE)
    }

    /// Address of a place.
    pub(crate) fn place(&self, number: usize) -> usize {
        let place = self.base + number * HUGE_SIZE;
        debug_assert!(place + HUGE_SIZE < self.area.base() + self.area.pages() * PAGE_SIZE);
        place
    }
}
