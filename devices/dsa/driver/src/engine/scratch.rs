//! Buffers in which deltas are made.

use std::sync::atomic::Ordering;
use vmm_dedup::compare::{Arena, PageId, PageView, Pages};
use vmm_dedup_dsa_abi::DeviceAddress;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::PageWords;

/// Two pages for each delta: its record, and the page that it is applied to.
pub(super) struct Scratch {
    pub(super) pages: Arena,
    /// Where each queue's device sees them.
    pub(super) at: Vec<Option<DeviceAddress>>,
}

impl Scratch {
    pub(super) fn view(&self, page: usize) -> Option<&PageView> {
        self.pages.view(PageId(page as u64))
    }

    pub(super) fn address(&self, queue: usize, page: usize) -> Option<DeviceAddress> {
        self.at[queue]?.checked_add((page * PAGE_SIZE) as u64)
    }

    pub(super) fn words(&self, page: usize) -> Option<PageWords> {
        self.view(page).map(words_of)
    }
}

/// The words of a page that nobody writes.
pub(super) fn words_of(page: &PageView) -> PageWords {
    std::array::from_fn(|word| page[word].load(Ordering::Relaxed))
}
