//! Intel DSA as an engine of the dedup service, which makes keys, verifies and searches.
//!
//! ```text
//!  engine: keys, comparisons, searches -----> batches, sizes by latency
//!     |                                          |
//!  channel: slots, records, page faults, resets  |
//!     |                                          |
//!  way: device node | VFIO | model  <------------'
//! ```
//!
//! - [`WorkQueue`] is a queue as the driver reaches it: [`Node`] through Linux's device nodes, [`Vfio`] as a device of this
//!   process's own, [`InProcess`] the model.
//! - [`DsaEngine`] drives several of them.
//!
//! # What the device can reach
//!
//! Through a device node it reads whatever this process can, and writes nothing but completion records: so it is trusted
//! as the CPU is. A device that is given files is given the page store and buffers of the driver's own, and never memory
//! of a guest: that would pin it.
//!
//! # What a wrong device can do
//!
//! It can say that pages are equal that are not: what it says is compared again unless the operator trusts it. Its silence,
//! errors and nonsense cost time at most: see the `channel` module.

mod area;
mod channel;
mod engine;
mod instructions;
mod latency;
mod open;
mod way;

pub use engine::{DsaEngine, Options};
pub use instructions::Instructions;
pub use open::{model, open};
pub use way::{
    InProcess, Node, NodeError, QueueLimits, Reach, Registers, Remedy, SetupError, Trouble, Vfio,
    VfioFailure, Wanted, WorkQueue, abort, bring_up, command, reset, software_error,
};
