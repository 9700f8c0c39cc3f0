//! Where what lies in an index file, in words.
//!
//! A file has room for the slots there are, not for all that a store may have: whoever reads a hole of a file in memory fills it, and
//! the index is open to everybody's reading.

use crate::sizes::{INDEX_HEADER_WORDS, MAX_SLOTS, NEWS_RING, PAGE_SIZE};
use crate::tree;

/// First word of an index file: the ASCII bytes `vmmddidx`.
pub const MAGIC: u64 = 0x766d_6d64_6469_6478;
/// Version of the layout below.
pub const VERSION: u64 = 5;
pub(super) const HEADER_WORDS: usize = INDEX_HEADER_WORDS;
pub(super) const WORD_MAGIC: usize = 0;
pub(super) const WORD_VERSION: usize = 1;
pub(super) const WORD_EPOCH: usize = 2;
pub(super) const WORD_NEWS: usize = 3;
pub(super) const WORD_CAPACITY: usize = 4;
pub(super) const WORD_RETIRED: usize = 5;
pub(super) const WORD_SLOTS: usize = 6;

pub(super) const HASHES_AT: usize = HEADER_WORDS + NEWS_RING;
const _: () = assert!(MAX_SLOTS <= tree::MAX_NODES);

/// Where the tree of so many slots begins.
pub(super) const fn tree_at(slots: usize) -> usize {
    HASHES_AT + slots * 2
}

/// Where the table begins, behind the tree of so many slots.
pub(super) const fn table_at(slots: usize) -> usize {
    tree_at(slots) + tree::words(slots)
}

/// Bytes of an index file with room for so many slots, whose table has `capacity` entries.
pub fn file_len(capacity: usize, slots: usize) -> usize {
    ((table_at(slots) + capacity) * 8).next_multiple_of(PAGE_SIZE)
}
