//! Where what lies in an index file, in words.

use crate::sizes::{INDEX_HEADER_WORDS, MAX_SLOTS, NEWS_RING, PAGE_SIZE};
use crate::tree;

/// First word of an index file: the ASCII bytes `vmmddidx`.
pub const MAGIC: u64 = 0x766d_6d64_6469_6478;
/// Version of the layout below.
pub const VERSION: u64 = 4;
pub(super) const HEADER_WORDS: usize = INDEX_HEADER_WORDS;
pub(super) const WORD_MAGIC: usize = 0;
pub(super) const WORD_VERSION: usize = 1;
pub(super) const WORD_EPOCH: usize = 2;
pub(super) const WORD_NEWS: usize = 3;
pub(super) const WORD_CAPACITY: usize = 4;
pub(super) const WORD_RETIRED: usize = 5;

pub(super) const HASHES_AT: usize = HEADER_WORDS + NEWS_RING;
pub(super) const TREE_AT: usize = HASHES_AT + MAX_SLOTS as usize * 2;
pub(super) const TABLE_AT: usize = TREE_AT + tree::words(MAX_SLOTS as usize);
const _: () = assert!(MAX_SLOTS <= tree::MAX_NODES);

/// Bytes of an index file whose table has `capacity` entries. Most of it is a hole: only what is used costs.
pub fn file_len(capacity: usize) -> usize {
    ((TABLE_AT + capacity) * 8).next_multiple_of(PAGE_SIZE)
}
