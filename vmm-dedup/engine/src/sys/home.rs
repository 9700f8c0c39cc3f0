//! The process that made something, as opposed to its children: a child by fork has what the process had in memory, but none of its
//! threads. To look needs no system call, which the looking thread's filter may forbid.
#![allow(unsafe_code)] // a page of our own

use crate::sys::vma::{self, Anonymous};

/// A page that reads as zeros in children.
#[derive(Debug)]
pub(crate) struct Home(Option<Anonymous>);

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

impl Home {
    /// This process. (Where the kernel lacks memory for a page, children are taken for it.)
    pub(crate) fn new() -> Self {
        let page = Anonymous::new(1).ok();
        let page = page.filter(|page| vma::advise(page.base(), 4096, libc::MADV_WIPEONFORK).is_ok());
        if let Some(page) = &page {
            // SAFETY: it is mapped, aligned and ours alone.
            unsafe { (page.base() as *mut u32).write_volatile(1) };
        }
        Self(page)
    }

    /// Whether it is this process still.
    pub(crate) fn is_here(&self) -> bool {
        // SAFETY: it is mapped and aligned, and written by nobody any more.
        let word = |page: &Anonymous| unsafe { (page.base() as *const u32).read_volatile() };
        self.0.as_ref().is_none_or(|page| word(page) == 1)
    }
}
