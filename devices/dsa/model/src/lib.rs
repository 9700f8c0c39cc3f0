//! A model of Intel DSA: what software sees of the device, and when.
//!
//! ```text
//!  registers --> commands --> control: state, tables, errors
//!                   |            ^
//!                   v            |
//!  portals ------> works: queues --> dispatch --> operate (memory) --> endings --> records, interrupts
//!                           ^           |
//!                           batches <---'
//! ```
//!
//! [`Core`] is the device as a machine of states over a clock that its owner keeps: it does what was due by a time, in the
//! order in which it was due, and says when it wants to be looked at again. So the same model runs in a test as fast as
//! it can, on the wall clock behind a socket, and on a clock of its own where time is only accounted for.
//!
//! A descriptor's effect on memory comes when it leaves its queue; its record and interrupt come when its time is over.
//! Nothing in between can be seen by software that keeps to the rules: memory of a descriptor in flight belongs to the
//! device.
//!
//! # Time
//!
//! All queues share one way to memory, of [`Timing::bytes_per_us`]; a record comes [`Timing::latency_ns`] after its
//! transfer. A comparison takes as long as reading all of both buffers, wherever they differ. Engines only bound how many
//! batches run at once.
//!
//! # What goes wrong
//!
//! Whatever software does wrong ends in a record, a software error or a command's error; none of it in a panic.
//! [`Faults`] are what goes wrong by chance.
//!
//! # Known holes
//!
//! No event log, no performance counters, no interrupt message store, no traffic classes. Where
//! Linux's sources do not tell the number of an error (a descriptor for a queue that is off, or full), the number is this
//! project's.

mod batch;
mod blocks;
mod board;
mod check;
mod commands;
mod control;
mod core;
mod dice;
mod endings;
mod lens;
mod memory;
mod operate;
mod queue;
mod registers;
mod shape;
mod works;

pub use self::core::Core;
pub use board::Board;
pub use dice::Faults;
pub use memory::{Flat, Memory, Missing, PAGE, READABLE, WRITABLE};
pub use shape::{Shape, Timing};
pub use works::{Account, Submitted, Way};
