//! Why a descriptor cannot be made.

use crate::sizes::{DELTA_ENTRY, MAX_DELTA_SOURCE, MIN_BATCH, MIN_DELTA_SPACE};

/// Why a descriptor cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Nothing to do.
    #[error("a descriptor for 0 bytes: leave it out")]
    Empty,
    /// Delta operands have to be made of whole words.
    #[error("{field} is {value:#x}, which is not a multiple of 8")]
    Unaligned {
        /// Which operand.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// More than 16-bit word indices reach.
    #[error("a delta of {0} bytes: cut it into pieces of at most {MAX_DELTA_SOURCE}")]
    DeltaTooLong(u32),
    /// The device wants room for some entries.
    #[error("room for a delta record of {0} bytes: give it at least {MIN_DELTA_SPACE}")]
    DeltaSpace(u32),
    /// A record is made of entries.
    #[error("a delta record of {0} bytes: it is made of entries of {DELTA_ENTRY} bytes, at least one")]
    DeltaRecord(u32),
    /// Both copies lie alike within their pages.
    #[error("dualcast to {0:#x} and {1:#x}: both must have the same offset in their pages")]
    Dualcast(u64, u64),
    /// Blocks are whole.
    #[error("{size} bytes of blocks of {block}: submit whole blocks")]
    Blocks {
        /// Bytes.
        size: u32,
        /// Bytes of a block, with its field if it has one.
        block: u32,
    },
    /// Completion records are aligned to their size.
    #[error("the completion record at {0:#x} is not aligned to 32 bytes")]
    CompletionAddress(u64),
    /// Lists are aligned to descriptors.
    #[error("the list at {0:#x} is not aligned to 64 bytes")]
    ListAddress(u64),
    /// A batch has several members.
    #[error("a batch of {0}: submit fewer than {MIN_BATCH} descriptors one by one")]
    Batch(u32),
}
