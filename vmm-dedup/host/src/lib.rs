//! What the project's commands ask of the host that they run on.
//!
//! The command line, the fleet launcher and the benches are crates of their own. What they share is here, from the
//! bottom up:
//!
//! - [`Failure`]: why a command ended, for the user and as an exit code;
//! - [`kvm`], [`memory`]: what the machine has;
//! - [`children`]: processes that end with the command, and [`termination`], which ends them on ^C as well;
//! - [`account`]: what a page store and its VMs say of themselves;
//! - [`store`]: where a store is, and a store for the time of one command.
//!
//! Nothing here knows a subcommand, but that `vmm-dedup store` starts a store.

pub mod account;
pub mod children;
mod failure;
pub mod kvm;
pub mod memory;
pub mod store;
pub mod termination;

pub use failure::Failure;
