//! Memory deduplication for a VMM on rust-vmm's crates.
//!
//! Hand [`DedupService::start`] the guest's memory and the path of a page store, and equal pages of all VMs on that
//! store become one. The design, with measurements, is in docs/design.md; in short:
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
//! - [`track`](mod@track): which pages were written, from write protection that the kernel resolves by itself;
//! - [`settle`](mod@settle): keys, sightings, hashes, publications: who is a twin of whom;
//! - [`searcher`](mod@searcher): looking for twins with an engine that compares pages, instead of by keys;
//! - [`mixed`](mod@mixed): which huge pages to split, to keep, and to build again;
//! - [`admit`](mod@admit), [`apply`](mod@apply): which twins are merged now, within which budgets;
//! - [`merge`](mod@merge): the only code that puts shared pages into a guest, with the argument why it is safe;
//! - [`stretch`](mod@stretch), [`aside`](mod@aside): one mapping over shared pages and private ones between them;
//! - [`breaks`](mod@breaks): the only code that takes them out again; [`give_back`](mod@give_back): for whole ranges;
//! - [`resize`](mod@resize): memory that comes and goes; [`discard`](mod@discard): memory that the guest gives up;
//! - [`scanner`](mod@scanner): the thread that does all but breaking; [`service`](mod@service): its handle;
//! - [`answer`](mod@answer): what it answers while it runs; [`refused`](mod@refused): VMs that have no service.
//!
//! Known holes: a page that the kernel copied on write stays private for good (nobody can tell whether it is
//! pinned); a huge page that is hot outside its key lines looks cold until it is hashed.

mod admit;
mod answer;
mod apply;
mod aside;
pub mod backend;
mod bits;
mod breaks;
mod chunk;
mod config;
mod control;
mod discard;
mod error;
mod give_back;
mod hold;
mod item;
mod memory;
mod merge;
mod mixed;
mod pace;
mod page;
mod page_size;
mod propose;
mod publish;
mod refused;
mod report;
mod reserve;
mod resize;
mod scanner;
mod search;
mod searcher;
mod series;
mod service;
mod settle;
mod store;
mod stretch;
mod sys;
mod track;

pub use config::{Breaks, Config};
pub use discard::Discarder;
pub use error::Error;
pub use memory::HostRange;
pub use mixed::policy::Policy;
pub use mixed::source::UseSource;
pub use refused::Refused;
pub use search::{MakeEngine, Search, cpu_engines};
pub use service::DedupService;
pub use sys::sched::in_service_thread;
pub use vmm_dedup_protocol::control::{Explanation, Settings, Switch};
pub use vmm_dedup_protocol::refusal::{Reason, Refusal};
pub use vmm_dedup_protocol::stats::{CpuNs, Histogram, ServiceStats};
