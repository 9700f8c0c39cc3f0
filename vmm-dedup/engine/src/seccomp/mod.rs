//! What a filter must allow to the supervisor's thread, and so to all threads that it starts, which inherit its filter.
//!
//! [`CALLS`] is kept true by a test that runs services, breaks, healing, discards, loans, pins, refusals and stops under exactly
//! this filter, and that fails if an entry is missing or is never used. What threads of the VMM do that only call is in [`CALLERS`].
//!
//! Engines that are registered by others ([`Engines`](crate::compare::Engines)) may do more. Under a filter pages that the kernel
//! copied are healed without forks, or not at all.

mod calls;
#[cfg(feature = "seccomp")]
mod filter;

pub use calls::{CALLERS, CALLS, Call, RARE};
#[cfg(feature = "seccomp")]
pub use filter::{restrict_this_thread, rules};
