//! PageForge's registers (BAR 0). All are 32 bits wide, little-endian.
//!
//! The device's model uses this crate, and so does the payload guest, which drives the device without an operating
//! system: hence no standard library, and nothing but numbers. [`SOURCE`] is for that guest's build.
//!
//! | offset | name | | meaning |
//! | --- | --- | --- | --- |
//! | 0x00 | MAGIC | ro | [`MAGIC`] |
//! | 0x04 | SHAPE | ro | modules in bits 0-7, version of this layout (1) in 16-31 |
//! | 0x08 | TABLES | ro | tables in the window |
//! | 0x0c | RING | ro | jobs that the ring in the window holds |
//! | 0x10 | DOORBELL | wo | bit m triggers module m |
//! | 0x14 | RING_TAIL | rw | number of the job behind the last to be done; writing it is the ring's doorbell |
//! | 0x18 | INTERRUPTS | rw | bit m: module m has set Scanned; bit 31: the ring is empty. Ones written clear bits |
//! | 0x1c | ENABLE | rw | which of these bits raise interrupts: vector 0 for the ring, 1 + m for module m |
//! | 0x20 | RESET | wo | anything written resets the device, but for the client's memory and vectors |
//! | 0x24 | REFUSED | rw | why the last function or access was refused ([`Refusal`]), 0 if none was; writing clears it |
//! | 0x28 | RING_OFFSETS | rw | `update_ECC_offset` of the ring's modules: a line of each KiB in each byte |
//! | 0x40 | ACCOUNT | ro | counters of 64 bits, low half first, see [`Counter`] |
//! | 0x400 + 0x40 m | module m | | see below |
//! | 0x2000 | | | the MSI-X table, which clients emulate |
//!
//! The five functions of the paper's table 1 take their operands from the module's registers:
//!
//! | offset | name | | meaning |
//! | --- | --- | --- | --- |
//! | 0x00 | PPN_LOW | rw | page number, low half |
//! | 0x04 | PPN_HIGH | rw | high half, at most 0xff |
//! | 0x08 | INDEX | rw | of the entry, at most 30 |
//! | 0x0c | LESS | rw | pointers, at most 0xff; from 31 on they name no entry |
//! | 0x10 | MORE | rw | |
//! | 0x14 | LAST_REFILL | rw | L, in bit 0 |
//! | 0x18 | PTR | rw | where to start |
//! | 0x1c | OFFSETS | rw | a line of each KiB, below 16, in each byte |
//! | 0x20 | FUNCTION | wo | calls one: see [`Function`] |
//! | 0x24 | INFO | ro | what `get_PFE_info` read: bits as in the window's `Info` |
//! | 0x28 | KEY | ro | the hash key that it read |
//!
//! The functions fill the table; the doorbell makes the hardware start. While a module works, every function but
//! `get_PFE_info` is refused.
//!
//! Accesses must be aligned and 4 or 8 bytes wide. Others read zeros, write nothing and set REFUSED, as nothing on a PCI
//! bus could report them.

#![no_std]

/// This file, for a build that compiles it for a guest. (There it has no meaning: cargo gives it.)
pub const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lib.rs");

/// What MAGIC reads: "PFor" in ASCII, lowest byte first.
pub const MAGIC: u32 = u32::from_le_bytes(*b"PFor");
/// Version of the layout.
pub const LAYOUT: u32 = 1;
/// Bytes of BAR 0.
pub const REGISTERS_BYTES: usize = 16 << 10;
/// Most modules that a device can have.
pub const MAX_MODULES: usize = 16;
/// Where the MSI-X table begins.
pub const MSIX_TABLE: u32 = 0x2000;
/// Where the MSI-X pending bits begin.
pub const MSIX_PENDING: u32 = 0x3000;

/// See the crate's text, as for those that follow.
pub const SHAPE: u32 = 0x04;
/// Tables in the window.
pub const TABLES: u32 = 0x08;
/// Jobs that the ring holds.
pub const RING: u32 = 0x0c;
/// Triggers modules.
pub const DOORBELL: u32 = 0x10;
/// The ring's doorbell.
pub const RING_TAIL: u32 = 0x14;
/// Which modules are done, and whether the ring is empty.
pub const INTERRUPTS: u32 = 0x18;
/// Which of those bits raise interrupts.
pub const ENABLE: u32 = 0x1c;
/// Resets the device.
pub const RESET: u32 = 0x20;
/// Why the last function or access was refused.
pub const REFUSED: u32 = 0x24;
/// Offsets of the key's lines, for the ring's modules.
pub const RING_OFFSETS: u32 = 0x28;
/// Where the counters begin.
pub const ACCOUNT: u32 = 0x40;

/// Registers of a module, counted from its first.
pub const MODULES: u32 = 0x400;
/// Bytes from a module's registers to those of the next.
pub const MODULE_STRIDE: u32 = 0x40;
/// A page number's low half.
pub const PPN_LOW: u32 = 0x00;
/// Its high half.
pub const PPN_HIGH: u32 = 0x04;
/// An entry's index.
pub const INDEX: u32 = 0x08;
/// The pointer Less.
pub const LESS: u32 = 0x0c;
/// The pointer More.
pub const MORE: u32 = 0x10;
/// L.
pub const LAST_REFILL: u32 = 0x14;
/// Where to start.
pub const PTR: u32 = 0x18;
/// Offsets of the key's lines.
pub const OFFSETS: u32 = 0x1c;
/// Calls a function.
pub const FUNCTION: u32 = 0x20;
/// What `get_PFE_info` read.
pub const INFO: u32 = 0x24;
/// The key that it read.
pub const KEY: u32 = 0x28;

/// The bit of INTERRUPTS and ENABLE that stands for the ring.
pub const RING_BIT: u32 = 1 << 31;

/// The functions of table 1, and one to invalidate entries, without which an entry once filled would stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Function {
    /// `insert_PPN`: PPN, INDEX, LESS, MORE.
    InsertPpn = 1,
    /// `insert_PFE`: PPN, LAST_REFILL, PTR.
    InsertPfe = 2,
    /// `update_PFE`: LAST_REFILL, PTR.
    UpdatePfe = 3,
    /// `get_PFE_info`: into INFO and KEY.
    GetPfeInfo = 4,
    /// `update_ECC_offset`: OFFSETS.
    UpdateEccOffset = 5,
    /// Invalidates all Other Pages.
    Clear = 6,
}

impl Function {
    /// The function that a value written to FUNCTION calls.
    pub fn of_code(code: u32) -> Option<Self> {
        let all = [
            Self::InsertPpn,
            Self::InsertPfe,
            Self::UpdatePfe,
            Self::GetPfeInfo,
            Self::UpdateEccOffset,
            Self::Clear,
        ];
        all.into_iter().find(|function| *function as u32 == code)
    }
}

/// Why something was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Refusal {
    /// The module works, or the ring does.
    Busy = 1,
    /// INDEX names no entry.
    Index = 2,
    /// The page number has more than 40 bits.
    Ppn = 3,
    /// A pointer has more than 8 bits.
    Pointer = 4,
    /// An offset names no line of a KiB.
    Offset = 5,
    /// There is no such function.
    Function = 6,
    /// There is no candidate: `insert_PFE` comes first.
    NoCandidate = 7,
    /// The ring does not hold so many jobs.
    Ring = 8,
    /// A register accessed with a width or an alignment that it does not have, or none there.
    Access = 9,
}

/// The counters, in order, each 8 bytes: what the model's account holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // they are the account's, which tells of each
pub enum Counter {
    Tables,
    Comparisons,
    CacheLines,
    DramLines,
    NetworkLines,
    KeyLines,
    Keys,
    Cycles,
    CyclesSquared,
    /// CPU time that the model has taken, ns: not the hardware's, which has none.
    ModelNs,
}

/// Number of counters.
pub const COUNTERS: usize = Counter::ModelNs as usize + 1;
