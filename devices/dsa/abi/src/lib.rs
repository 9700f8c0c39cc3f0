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
mod error;
mod integrity;
mod operation;
pub mod portal;
pub mod registers;
mod sizes;

pub use command::{Command, CommandError, CommandStatus, CommandWord, wq_mask};
pub use completion::{
    Comparison, CompletionRecord, DELTA_DIFFERS, DELTA_EQUAL, DELTA_TOO_BIG, Fault, Status,
};
pub use descriptor::{DeltaSpace, Descriptor, DeviceAddress, Pasid};
pub use error::Error;
pub use integrity::{
    INTEGRITY_FIELD, Integrity, Tags, destination_flags, guard_flags, mismatch, source_flags,
};
pub use operation::{Opcode, flags};
pub use sizes::{DELTA_ENTRY, MAX_DELTA_SOURCE, MIN_BATCH, MIN_DELTA_SPACE};

#[cfg(not(target_endian = "little"))]
compile_error!("DSA is a device of x86 processors: its records are little-endian");
