//! The account of mappings: how many there are, and how many there may be.

use super::PageMap;

impl PageMap {
    pub(crate) fn vmas(&self) -> i64 {
        self.pages.mappings.added
    }

    /// Mappings of the process, about.
    pub(crate) fn mappings(&self) -> u64 {
        self.pages.mappings.all()
    }

    /// The most that the service may add to it now.
    pub(crate) fn vmas_max(&self) -> i64 {
        self.pages.mappings.most()
    }

    /// Whether so many mappings more are allowed.
    pub(crate) fn has_vmas_for(&self, more: i64) -> bool {
        self.pages.mappings.added + more <= self.pages.mappings.most()
    }

    /// The process's mappings were counted.
    pub(crate) fn set_vmas(&mut self, counted: usize) {
        self.pages.mappings.set_counted(counted);
    }

    /// The kernel has refused one more.
    pub(crate) fn no_vma_is_left(&mut self, pass: u64) {
        self.pages.mappings.note_refusal(pass);
    }

    /// Whether the kernel may be asked for more again from this pass on; told once after a refusal.
    pub(crate) fn asks_for_vmas_again(&mut self, pass: u64) -> bool {
        self.pages.mappings.asks_again(pass)
    }
}
