//! Page Overlays: a model of hardware that maps single lines of a page elsewhere (Seshadri et al., "Page Overlays: An
//! Enhanced Virtual Memory Framework to Enable Fine-grained Memory Management", ISCA'15). Section and table numbers are
//! the paper's.
//!
//! A virtual page has a page of main memory, and may have an *overlay* that has some of its 64 lines. What is in the
//! overlay is accessed there. The actors, from the core to memory:
//!
//! - the *TLB* has an [`OBitVector`] in each entry: a bit for each line that is in the overlay;
//! - *caches* know a line of an overlay by its overlay address, which is the process and the virtual address
//!   ([`LineAddress`]). An overlaying write changes a line's tag, and sends one message that sets the bit in all TLBs and
//!   in the table;
//! - the *memory controller* finds a line that no cache has: by the Overlay Mapping Table (OMT), of which it caches
//!   entries, and by the metadata of the segment of the Overlay Memory Store that has the overlay's lines. It gives a line
//!   its place only when it is evicted for the first time;
//! - the *operating system* maps, forks, copies on write or lets hardware overlay instead, and makes pages of overlays.
//!
//! The model moves bytes and counts time. Each cache line, segment and metadata line has its bytes, so that a wrong place
//! shows as wrong data: `tests/conformance` compares all that is read with flat arrays. Time is that of a machine with
//! the parameters of table 2 ([`Config::table_2`]); it measures nothing of the machine that it runs on.
//!
//! docs/design/page-overlays.md tells what is modelled and what is left out, and docs/figures.md what the experiments give
//! beside the paper's figures.

mod account;
mod address;
mod cache;
mod config;
mod controller;
mod dice;
mod dram;
pub mod experiments;
mod hierarchy;
mod lru;
mod machine;
mod memory;
mod obits;
mod omt;
mod pipeline;
mod prefetch;
mod processes;
pub mod record;
mod replay;
mod segment;
mod sizes;
mod store;
mod tlb;
mod trace;

pub use account::{
    Account, CacheCounters, CoreCounters, DramCounters, EventCounters, MemoryInUse, OmtCounters,
    PrefetchCounters, StoreCounters, TlbCounters,
};
pub use address::{AddressError, LineAddress, Page, Pid};
pub use config::{
    CacheConfig, Config, ConfigError, CoreConfig, DramConfig, ObitsFetch, OmtConfig, OnWrite, OsConfig,
    Policy, PrefetchConfig, TlbConfig,
};
pub use dice::Dice;
pub use machine::{Contents, Machine, MachineError, Promotion, Scan};
pub use obits::OBitVector;
pub use pipeline::Issue;
pub use replay::{ReplayError, apply, replay};
pub use sizes::{LINE_BYTES, LINES, LineBytes, PAGE_BYTES};
pub use trace::{Action, Bytes, Malformed, Record, TraceError, TraceReader, TraceWriter};
