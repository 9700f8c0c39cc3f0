//! Pages and bytes.

pub(crate) use vmm_dedup_protocol::PAGE_SIZE;

/// Small pages in 2 MiB.
pub(crate) const CHUNK_PAGES: usize = 512;
/// Bytes of a huge page.
pub(crate) const HUGE_SIZE: usize = CHUNK_PAGES * PAGE_SIZE;

/// Bytes of that many pages; the engine's page counts stay far below the overflow.
pub(crate) fn bytes(pages: usize) -> usize {
    pages * PAGE_SIZE
}
