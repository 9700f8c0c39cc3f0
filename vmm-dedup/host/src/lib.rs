//! What the project's commands ask of the host that they run on.
//!
//! The command line, the fleet launcher and the benches are crates of their own. What they share is here, from the
//! bottom up:
//!
//! - [`Failure`]: why a command ended, for the user and as an exit code;
//! - [`output`]: the one place through which commands write; [`units`] and [`table`]: figures and tables for people;
//! - [`kvm`], [`userfaultfd`], [`memory`], [`process`]: what the machine has, and what runs on it;
//! - [`children`]: processes that end with the command, and [`termination`], which ends them on ^C as well;
//! - [`silence`]: why a store does not answer; [`account`]: what a page store and its VMs say of themselves;
//! - [`runtime`], [`registry`]: where stores are found; [`view`]: what all of them say;
//! - [`users`]: users of the host, and what one of them may do;
//! - [`store`]: where a store is, and a store for the time of one command.
//!
//! Nothing here knows a subcommand, but that `vmm-dedup store` starts a store.

#![deny(clippy::print_stdout, clippy::print_stderr)] // `output` is for that

pub mod account;
pub mod children;
mod failure;
pub mod kvm;
pub mod memory;
pub mod output;
pub mod process;
pub mod registry;
pub mod runtime;
pub mod silence;
pub mod store;
pub mod table;
pub mod termination;
pub mod units;
pub mod userfaultfd;
pub mod users;
pub mod view;

pub use failure::Failure;
