//! The index, the ring of news, the tree and the forwards of `vmm-dedup-protocol`, compiled from the very same sources, on loom's
//! atomics and with small sizes.
//!
//! loom runs a model, a few threads that each make a few steps, in all orders, and lets every load see every value that
//! the memory orderings allow, which is more than this machine's processor does. So an ordering that is too weak shows,
//! although x86 would forgive it. `cargo test -p vmm-dedup-protocol-loom` runs the models (`tests`), in seconds; CI does
//! so with all other tests.
//!
//! What is not real here: the mapping is memory of the process instead of a file, and there are 4 slots, 3 keys in the
//! ring of news and a header of 8 words. Pages are cells of the models, so a segment's file has no bytes before its forwards.

#[path = "../../src/forward.rs"]
pub mod forward;
#[path = "../../src/key.rs"]
pub mod key;
#[path = "../../src/slot.rs"]
mod slot;
#[path = "../../src/tree.rs"]
pub mod tree;

pub mod index;
pub mod mapping;

/// loom's atomics in the place of the standard library's.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

    /// Reads a word that nobody but the caller writes: loom reports it if somebody does. An atomic load would not do. Of
    /// each atomic loom remembers the last access only, so a thread that loads before it stores hides that store from
    /// another thread's earlier load, and orders are left out.
    #[allow(unsafe_code)] // loom's name for a load that races with no store
    pub(crate) fn own(word: &AtomicU64) -> u64 {
        // SAFETY: it is memory safe in any case; what it demands, that no store races with it, loom checks.
        unsafe { word.unsync_load() }
    }
}

pub use slot::Slot;

pub use sizes::{HUGE_PAGES, MAX_SLOTS, NEWS_RING, PAGE_SIZE, SEGMENT_BYTES, SERIES, SLOTS_PER_SEGMENT};

/// Small ones in the place of the real ones.
mod sizes {
    /// Bytes of a page, as they are.
    pub const PAGE_SIZE: usize = 4096;
    /// Bytes of a segment's pages.
    pub const SEGMENT_BYTES: usize = 0;
    /// Slots in one segment.
    pub const SLOTS_PER_SEGMENT: u32 = 4;
    /// Highest number of slots.
    pub const MAX_SLOTS: u32 = 4;
    /// Slots of a series.
    pub const SERIES: u32 = 2;
    /// Small pages in a huge page, as they are.
    pub const HUGE_PAGES: usize = 512;
    /// Keys that the ring of news holds.
    pub const NEWS_RING: usize = 3;
    /// Words of the index file's header.
    pub(crate) const INDEX_HEADER_WORDS: usize = 8;
}
