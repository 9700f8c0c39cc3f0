//! The shared index: one writer (the store), many readers (the services), no locks.
//!
//! A memfd holds, in 64-bit words: a header, a ring of the keys that entered last, the 128-bit hashes of the
//! slots, a tree of them in the order of their content (if the store keeps one, see [`tree`](mod@crate::tree)), and an
//! open-addressed table with linear probing. Every entry is one atomic word, so a reader sees old or
//! new, never half. A reader that races with the writer may miss an entry for an instant (it merges a pass
//! later) and may find one that is going (the epochs below keep its slot from being freed meanwhile).
//!
//! **Epochs.** The store removes a slot's entry, then advances the epoch, and frees the slot, so that its number
//! may name another page, only when every connected service has reported an epoch at least as high. A service reads the epoch (acquire) *before* the
//! lookups of a batch and reports that value together with the references the batch took. So a service that
//! found the entry reports its reference no later than the epoch that would free the slot, and a service that
//! reports a higher epoch has looked after the removal. `vmm-dedup-store` checks this rule over all interleavings.
//!
//! **Growth.** The table grows by moving to a new memfd. The old one is marked retired and its epoch stays, so a
//! service that still reads it keeps every slot that leaves later from being freed until it has switched.

mod entry;
mod layout;
mod reader;
mod writer;

pub use crate::sizes::NEWS_RING as RING;
pub use entry::Line;
pub use layout::{MAGIC, VERSION, file_len};
pub use reader::{IndexError, IndexReader, News};
pub use writer::{IndexWriter, Placed};

/// Creates the memfd of an index with room for `capacity` entries, and for slots below `slots`: `(file, writer)`. Nobody but the
/// writer can map the file for writing afterwards.
pub fn create(capacity: usize, slots: usize) -> Result<(std::os::fd::OwnedFd, IndexWriter), IndexError> {
    let (file, map) = crate::mapping::sealed_memfd("vmm-dedup-index", file_len(capacity, slots))?;
    Ok((file, IndexWriter::format(map, capacity, slots)?))
}

#[cfg(test)]
mod tests;
