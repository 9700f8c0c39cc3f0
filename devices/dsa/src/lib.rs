//! Intel Data Streaming Accelerator (DSA, Linux driver `idxd`): records exchanged with the device.
//!
//! This crate will hold a driver that the service can use as an engine, for keys and verification, and a model of the
//! device for machines without one. So far it holds what both share: the 64-byte [`Descriptor`] that is submitted
//! to a work queue and the 32-byte [`CompletionRecord`] that the device writes. The layouts are asserted at compile
//! time against Linux's include/uapi/linux/idxd.h.
//!
//! # What the engine will use
//!
//! - `COMPARE` verifies a page that was taken against a slot: equal, or the offset where the first difference is
//!   found. It gives no order; nothing here needs one.
//! - `CRC_GENERATE` over a page's key lines, for keys in large batches.
//! - `CREATE_DELTA` for pages that differ from a shared one in a few words: entries of 10 bytes, a 16-bit index of
//!   an 8-byte word and its new value.
//!
//! Batches amortise submission, and completion is polled. Through Linux's device nodes a process submits its own
//! virtual addresses (a PASID names it), so nothing is pinned. Through VFIO, memory has to be mapped for DMA and is
//! pinned by that: then the device gets the page store and a staging buffer, never guest memory.
//!
//! # Duties of a driver, when it is written
//!
//! - A page fault without block-on-fault ends a descriptor early ([`Status::PageFault`]): touch the address, advance
//!   both sources by the bytes completed, submit the rest.
//! - Members of a batch run out of order unless fenced.
//! - A completion record is live until its status is non-zero: read the status with acquire order, then copy the
//!   record.
//!
//! # Known holes
//!
//! Submission (MOVDIR64B, ENQCMD), registers, the model and the driver are not written yet.

mod completion;
mod descriptor;

pub use completion::{Comparison, CompletionRecord, Status};
pub use descriptor::{DeltaSpace, Descriptor, DeviceAddress, Opcode, flags};

/// Longest delta: source sizes up to 512 KiB in 8-byte words have 16-bit indices.
pub const MAX_DELTA_SOURCE: u32 = 512 << 10;

/// Bytes of one entry of a delta record.
pub const DELTA_ENTRY: u32 = 10;

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
    /// Completion records are aligned to their size.
    #[error("the completion record at {0:#x} is not aligned to 32 bytes")]
    CompletionAddress(u64),
}
