//! PageForge: a small device in the memory controller that compares pages and makes hash keys (Skarlatos, Kim,
//! Torrellas, "PageForge: A Near-Memory Content-Aware Page-Merging Architecture", MICRO'17).
//!
//! This crate will hold a model of the device, served over vfio-user, and its driver, which plugs into the engine
//! as a comparing backend. So far it holds what both sides agree on: the Scan Table and the hash key.
//!
//! # How the device works
//!
//! Software fills the *Scan Table* ([`ScanTable`]) with a candidate (the PFE entry) and up to 31 *Other Pages*, a
//! root and four levels of a tree, and starts the device. The device compares the candidate with the page that `Ptr`
//! names, line by line in lockstep, and follows `Less` or `More` by the first line that differs:
//!
//! - all lines equal: Duplicate and Scanned are set, and `Ptr` tells with which entry;
//! - `Ptr` comes to an invalid entry: only Scanned is set; software loads the next part of the tree.
//!
//! Meanwhile it makes the candidate's *hash key* ([`HashKey`]): of one line in each KiB, at an offset that software
//! chose ([`EccOffsets`]), the 8 low bits of the ECC code, 32 bits in all for 256 bytes read. The key is ready at the
//! latest when a table with Last Refill set is done, or a duplicate was found. A key only rules pages out: before a
//! merge, the engine compares what it took itself.
//!
//! # What the device may read
//!
//! The page store and a staging buffer, never guest memory: that is private, and mapping it for DMA would pin it.
//!
//! # Known holes
//!
//! The paper gives neither a register layout nor the order of minikeys in a key; both are ours to define. The
//! model, the server and the driver are not written yet.

mod hash_key;
mod scan_table;

pub use hash_key::{EccOffsets, HashKey, KEY_LINES, LINES_PER_SECTION};
pub use scan_table::{
    Candidate, Compared, EntryIndex, OTHER_PAGES, OtherPage, PfeInfo, Ppn, ScanTable, Walk,
};

/// Why the device's input is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No such entry.
    #[error("Scan Table entry {0} does not exist: indices are below {OTHER_PAGES}")]
    Index(usize),
    /// No such line.
    #[error("line {0} is not in a 1 KiB section: offsets are below {LINES_PER_SECTION}")]
    Offset(u8),
    /// A physical page number that no address has.
    #[error("page number {0:#x} is beyond 52 bits of physical address")]
    Ppn(u64),
}
