//! What filters of system calls must allow to the engine's threads, and to threads that call it.
//!
//! [`CALLS`] has each call once: which [`Part`]s of the engine make it in every run, and which only in some runs or on some hosts, and
//! [`Why`]. A thread inherits the filter of the one that starts it, so [`allowed`] of a part has what the threads need that it starts.
//!
//! A test runs services, breaks, healing, discards, loans, pins, refusals, a lost store, failures, panics and stops with each part
//! under exactly its own filter. It fails if a part does what the table has not of it, or does not what it has of it; what it does not play it lists
//! with the reasons. All of [`Why::Trouble`] is played: calls fail, stores go, what is packed is broken, and threads die.
//!
//! Engines that are registered by others ([`Engines`](crate::compare::Engines)) may do more. Under a filter pages that the kernel
//! copied are healed without forks, or not at all.

mod calls;
#[cfg(feature = "seccomp")]
mod filter;
mod part;
pub(crate) mod request;
mod why;

pub use calls::{CALLS, Call, allowed};
#[cfg(feature = "seccomp")]
pub use filter::{restrict_this_thread, rules};
pub use part::Part;
pub use why::Why;
