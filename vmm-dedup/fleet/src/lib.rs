//! Many VMs from one file: `vmm-dedup fleet`.
//!
//! A [`FleetFile`] is expanded to a [`Plan`]: each VM by itself. [`up()`] looks at all that could fail ([`check`]), then
//! starts stores ([`stores`]) and VMMs ([`vmm`]), some at a time, and drives their APIs until the VMs run. Each process is
//! written down in the runtime directory ([`state`]), by number and start time ([`process`]), before it executes its
//! program, so that [`down()`] ends those and no others, also after an `up` that was killed. If anything fails in the first
//! `up`, what was started is stopped. A later one compares ([`changes`]) and starts what is missing.
//!
//! Nothing of the launcher stays in memory but what keeps logs short ([`log_keeper`]): VMs and stores are processes on their own,
//! and [`status()`] and `down` ask them and the kernel. With each VM the state keeps the settings that it was started with ([`spec`]).

#![deny(clippy::print_stdout, clippy::print_stderr)] // `vmm_dedup_host::output` is for that

mod api;
mod at;
mod changes;
mod check;
mod choice;
pub mod dedup_file;
mod down;
mod file;
mod kept;
mod launch;
mod list;
mod log;
mod log_keeper;
mod logs;
mod plan;
mod process;
mod program;
mod restart;
mod rights;
mod runtime;
mod spec;
mod state;
mod status;
mod stores;
mod up;
mod vmm;

pub use api::api;
pub use at::At;
pub use down::{down, down_vms};
pub use file::{FleetFile, Vmm};
pub use list::{list, unkept_logs};
pub use log_keeper::keep_logs;
pub use logs::{Which, logs};
pub use plan::{Plan, StorePlan, VmPlan};
pub use restart::{restart, scale};
pub use status::status;
pub use up::up;
