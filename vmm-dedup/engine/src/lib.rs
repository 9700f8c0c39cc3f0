//! Memory deduplication for a VMM on rust-vmm's crates.
//!
//! A VMM makes a [`Supervisor`] early and tells it what happens to guest memory, and equal pages of all VMs on one page store
//! become one. docs/design.md has an overview of the design, and docs/design a text for each room; in short:
//!
//! ```text
//!            track                key              hash            publish / look up
//!  guest --------------> pages ----------> keys ----------> hashes ------------------> store
//!  memory  PAGEMAP_SCAN  that stood  4 of 64     where keys        index (shared memory),
//!          + WP_ASYNC    still       lines       collide           messages
//!    ^                                                                |
//!    |   take (UFFDIO_MOVE), verify, map (MAP_PRIVATE), wake          |
//!    `----------------------------------------------------------------'
//! ```
//!
//! Each module of the root is a room. docs/design.md lists them from the kernel upwards; a room imports rooms that stand before it,
//! and a test of the workspace holds the crate to that list.
//!
//! It is for x86-64. On other architectures it is compiled, so that a VMM for several needs no `cfg`; but no service starts there
//! ([`Error::Architecture`]), since nothing was tested there.
//!
//! Known holes: a page that the kernel copied on write stays private while it may be pinned and a fork would take too long to
//! tell; a huge page that is written outside its key lines only looks unchanged until it is compared.

mod account;
pub mod compare;
mod config;
mod error;
mod hints;
mod lookup;
mod memory;
mod merge;
mod pack;
pub mod process;
pub mod refusal;
mod scan;
pub mod seccomp;
mod service;
mod store;
pub mod supervisor;
mod sync;
mod sys;
mod thp;
mod track;
mod unmerge;
mod window;

pub use compare::Engines;
pub use config::{AgentSocket, Breaks, Config, Pack, Policy, Sampling, Setup, UseSource, Verification};
pub use error::{Backing, Error};
pub use memory::layout::HostRange;
#[cfg(feature = "blind-heals")]
pub use merge::healer::heal_blindly;
#[cfg(all(feature = "inject", feature = "pack"))]
pub use pack::delay_by_first_bit;
#[cfg(feature = "inject")]
pub use scan::pass::share_whatever_it_costs;
pub use service::DedupService;
pub use store::refusal::Refused;
pub use supervisor::{Lease, Options, Pinned, Served, Status, Supervisor};
#[cfg(feature = "inject")]
pub use sys::inject::{Call, Injection, Observer, Site, Times, Watch};
pub use sys::sched::in_service_thread;
pub use unmerge::discard::Discarder;
pub use vmm_dedup_protocol::control::{Explanation, Settings, Switch};
pub use vmm_dedup_protocol::refusal::{Reason, Refusal};
pub use vmm_dedup_protocol::stats::{CpuNs, DeviceWork, Histogram, ServiceStats};
