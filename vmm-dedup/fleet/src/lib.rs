//! Many VMs from one file: `vmm-dedup fleet`.
//!
//! A [`FleetFile`] is expanded to a [`Plan`]: each VM by itself. [`up()`] looks at all that could fail ([`check`]), then
//! starts stores ([`stores`]) and VMMs ([`vmm`]), some at a time, and drives their APIs until the VMs run. Each process is
//! written down in the runtime directory ([`state`]), by number and start time ([`process`]), before it executes its
//! program, so that [`down()`] ends those and no others, also after an `up` that was killed. If anything fails in `up`,
//! what was started is stopped.
//!
//! Nothing of the launcher stays in memory: VMs and stores are processes on their own, and [`status()`] and `down` ask
//! them and the kernel. A store that has gone is started again by the next `up`.

mod at;
mod check;
pub mod dedup_file;
mod down;
mod file;
mod log;
mod plan;
mod process;
mod program;
mod runtime;
mod state;
mod status;
mod stores;
mod up;
mod vmm;

pub use at::At;
pub use down::down;
pub use file::{FleetFile, Vmm};
pub use plan::{Plan, StorePlan, VmPlan};
pub use status::status;
pub use up::up;
