//! The atomics of shared memory.
//!
//! Whatever reads and writes memory that store and services share takes its atomics from here. The crate
//! `vmm-dedup-protocol-loom` compiles the very same sources with those of loom, and walks through what the orderings
//! allow.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

/// Reads a word that nobody but the caller writes. No ordering is needed for that.
pub(crate) fn own(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}
