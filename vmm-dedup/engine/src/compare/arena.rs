//! Pages in a file of shared memory: for benchmarks and tests, and what a device can be given as a whole.

use super::{PageId, PageView, Pages};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::mapping::{Mapping, staging_memfd};

/// Pages that are numbered from 0 on.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    map: Mapping,
}

impl Arena {
    /// `pages` pages of zeros.
    ///
    /// # Errors
    /// If there is not enough memory, or `pages` is 0.
    pub fn new(pages: usize) -> io::Result<Self> {
        let (file, map) = staging_memfd(pages * PAGE_SIZE)?;
        Ok(Self { file, map })
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.map.len() / PAGE_SIZE
    }

    /// The file that holds the pages, page 0 first. It cannot be resized.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Copies a page (below [`Self::pages`]) in from memory of this process; torn if somebody writes that meanwhile.
    ///
    /// # Safety
    /// A page must be readable at `address`.
    #[allow(unsafe_code)] // reads memory by its address
    pub unsafe fn copy_from_address(&self, page: usize, address: usize) {
        // SAFETY: as promised by the caller.
        unsafe { self.map.copy_page_from_address(page, address) };
    }

    /// Writes a page (below [`Self::pages`]).
    pub fn write(&self, page: usize, content: &PageWords) {
        self.map.write_page(page, content);
    }
}

impl Pages for Arena {
    fn view(&self, page: PageId) -> Option<&PageView> {
        let start = usize::try_from(page.0).ok()?.checked_mul(PAGE_WORDS)?;
        let words = self.map.words().get(start..start.checked_add(PAGE_WORDS)?)?;
        words.try_into().ok()
    }
}
