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
//! Rooms, from the kernel upwards. A room imports rooms that stand before it; a test of the workspace holds it to that:
//!
//! - [`sync`](mod@sync): locks, as loom's models walk through them;
//! - [`error`](mod@error): why a service cannot start or go on;
//! - [`seccomp`]: which system calls each thread makes, for who filters them;
//! - [`refusal`]: why a VM, or a part of its memory, is not deduplicated: all texts;
//! - [`compare`]: what compares pages, the CPU or a device: traits, a registry by name, the verifier;
//! - [`config`](mod@config): what an operator sets, and the line or file that holds it;
//! - [`sys`](mod@sys): system calls, one module each;
//! - [`account`](mod@account): what the service counts of its work;
//! - [`memory`](mod@memory): how guest memory is laid out, and what is known of each page and each 2 MiB;
//! - [`hints`](mod@hints): what the guest's agent says of its memory;
//! - [`window`](mod@window): the one way in which guest pages are taken away for a moment;
//! - [`store`](mod@store): the connection to the page store;
//! - [`track`](mod@track): which pages were written, and which are used;
//! - [`pack`](mod@pack): keeps pages that rest in fewer bytes, and brings them back when they are touched;
//! - [`unmerge`](mod@unmerge): takes shared pages out of a guest: for a writer, for a range, for memory that is given up;
//! - [`lookup`](mod@lookup): keys, sightings, hashes, publications: who is a twin of whom;
//! - [`thp`](mod@thp): which huge pages to split, to keep, and to build again (which takes shared pages out as well);
//! - [`merge`](mod@merge): the only code that puts shared pages into a guest, with the argument why it is safe;
//! - [`scan`](mod@scan): the scanning thread, which does all but breaking;
//! - [`service`](mod@service): its handle;
//! - [`supervisor`]: what a VMM holds: starts the service, tries again, and brings everything back when it has to;
//! - [`process`]: the supervisor of a process, for a VMM whose crates do not know each other.
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
#[cfg(feature = "inject")]
pub use scan::pass::share_whatever_it_costs;
pub use service::DedupService;
pub use store::refusal::Refused;
pub use supervisor::{Lease, Options, Pinned, Status, Supervisor};
#[cfg(feature = "inject")]
pub use sys::inject::{Call, Injection, Observer, Site, Times, Watch};
pub use sys::sched::in_service_thread;
pub use unmerge::discard::Discarder;
pub use vmm_dedup_protocol::control::{Explanation, Settings, Switch};
pub use vmm_dedup_protocol::refusal::{Reason, Refusal};
pub use vmm_dedup_protocol::stats::{CpuNs, DeviceWork, Histogram, ServiceStats};
