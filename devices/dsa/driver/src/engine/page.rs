//! The size of a page.

use vmm_dedup_protocol::PAGE_SIZE;

/// A page, as descriptors give its size.
pub(super) const PAGE: u32 = 4096;
const _: () = assert!(PAGE as usize == PAGE_SIZE);
