//! PageForge: a small device in the memory controller that compares pages and makes hash keys (Skarlatos, Kim,
//! Torrellas, "PageForge: A Near-Memory Content-Aware Page-Merging Architecture", MICRO'17).
//!
//! - [`Module`]: a model of the hardware, which says what that would find and how many cycles it would take
//!   ([`Account`]);
//! - [`Device`]: modules behind [`registers`], and a [`Ring`] of jobs with tables in a [`window`] that software maps;
//! - [`server`]: the device on PCI, over vfio-user, for any VMM and for the driver;
//! - [`driver`]: the device as an engine of the service, in this process or behind that socket.
//!
//! docs/engines.md has the design's reasons, and docs/figures.md the figures beside the paper's.
//!
//! # How the device works
//!
//! Software fills the *Scan Table* ([`ScanTable`]) with a candidate (the PFE entry) and up to 31 *Other Pages*, a
//! root and four levels of a tree, and starts the device. The device compares the candidate with the page that `Ptr`
//! names, line by line in lockstep, and follows `Less` or `More` by the first line that differs:
//!
//! - all lines equal: Duplicate and Scanned are set, and `Ptr` tells with which entry;
//! - `Ptr` comes to an invalid entry: only Scanned is set; software loads the next part of the tree, which it knows
//!   from the value of `Ptr` ([`Pointer`]).
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
//! # What the paper leaves open
//!
//! - The order of the minikeys in a key, and what an ECC code is lowest in: ours is page order, and memory order.
//!   Taken literally, as it is here, a minikey is the code of the first word of its line alone, since each word has
//!   its own: a key depends on 32 bytes, for which 256 are read.
//! - How software learns where in the tree a search left the table: by the value of `Ptr`, see [`Pointer`].
//! - What happens on a page that does not exist, or on pointers that form a loop: Scanned is set, with an error
//!   ([`RunError`]).

mod device;
pub mod driver;
mod ecc;
mod error;
mod hash_key;
mod memory;
mod module;
mod ring;
mod scan_table;
pub mod server;
mod sizes;
mod timing;
pub mod window;

pub use device::{Board, Device};
pub use error::Error;
pub use hash_key::{EccOffsets, HashKey, KEY_LINES, LINES_PER_SECTION};
pub use memory::{LINE_BYTES, Line, Memory, PAGE_LINES};
pub use module::Module;
pub use ring::Ring;
pub use scan_table::{
    Candidate, Compared, EntryIndex, OTHER_PAGES, OtherPage, PPN_BITS, PfeInfo, Pointer, Ppn, RunError,
    ScanTable, Walk,
};
pub use timing::{Account, Costs, FREQUENCY_HZ, Role, Source};
pub use vmm_dedup_pageforge_registers as registers;
