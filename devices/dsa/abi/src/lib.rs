//! Intel Data Streaming Accelerator (DSA; Linux's driver is `idxd`): what the device and software exchange.
//!
//! - [`Descriptor`]: 64 bytes that software writes to a work queue's [`portal`](mod@portal);
//! - [`CompletionRecord`]: 32 bytes that the device writes when a descriptor has ended;
//! - [`registers`]: BAR 0, with the [commands](command) and the tables of [work queues and groups](config).
//!
//! The driver and the model of the device share this crate, so that neither can differ from the other; that both are
//! right is shown by software of others that drives the model (Linux's `idxd`, Intel's `dsa_test`).
//!
//! # Sources
//!
//! Each type names its own. Layouts, opcodes, flags and statuses: Linux, include/uapi/linux/idxd.h; registers, commands,
//! tables: drivers/dma/idxd/registers.h (both of Linux 6.12 and later). Which flags an operation takes, and what it asks
//! of its operands: Intel DML, include/dml/detail/common/flags.hpp and sources/core/src/validation.cpp. Opcode 0x0a and the
//! flags of CRC operations: intel/idxd-config, accfg/idxd.h and test/dsa.c. Layouts are asserted at compile time.
//!
//! # How operations behave
//!
//! - `COMPARE` tells whether two buffers are equal, and the offset of the first byte that differs. It gives no order.
//! - `CRC_GENERATE` makes CRC32C; with the seed 0 the usual one.
//! - `CREATE_DELTA` notes the words in which two buffers differ, `APPLY_DELTA` writes them.
//! - A `BATCH` names a list of descriptors. Its members run out of order unless fenced, and go on past one that has
//!   failed, unless a fence follows it.
//! - A page fault without block-on-fault ends a descriptor early ([`Status::PageFault`]): whoever wants the rest touches
//!   the address, advances by the bytes that are done, and submits again.
//! - A completion record is live until its status is non-zero: read the status with acquire order, then copy the record.

mod command;
mod completion;
pub mod config;
mod descriptor;
mod operation;
pub mod portal;
pub mod registers;

pub use command::{Command, CommandError, CommandStatus, CommandWord, wq_mask};
pub use completion::{
    Comparison, CompletionRecord, DELTA_DIFFERS, DELTA_EQUAL, DELTA_TOO_BIG, Fault, Status,
};
pub use descriptor::{DeltaSpace, Descriptor, DeviceAddress, Pasid};
pub use operation::{Opcode, flags};

#[cfg(not(target_endian = "little"))]
compile_error!("DSA is a device of x86 processors: its records are little-endian");

/// Longest delta: source sizes up to 512 KiB in 8-byte words have 16-bit indices (DML, validation.cpp).
pub const MAX_DELTA_SOURCE: u32 = 512 << 10;

/// Bytes of one entry of a delta record: a 16-bit index of an 8-byte word, and its new value.
pub const DELTA_ENTRY: u32 = 10;

/// Least space for a delta record, bytes (DML, validation.cpp).
pub const MIN_DELTA_SPACE: u32 = 80;

/// Fewest members of a batch.
pub const MIN_BATCH: u32 = 2;

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
