//! Seams for what compares pages: the CPU, and devices that do it for the CPU.
//!
//! An *engine* has a name and an account ([`Engine`]), and offers some of four works:
//!
//! - [`Keys`] makes keys of pages, which tell pages apart and show that a page has changed;
//! - [`TreeSearch`] finds the twin of a page in a tree of pages that is ordered by content, or in a set;
//! - [`Verify`] tells whether pages that were taken from a guest are equal to the slots that are to replace them;
//! - [`Deltas`] makes the difference of two pages, and pages out of others by such differences.
//!
//! Keys, searches and deltas are suggestions: an engine that errs there costs time or savings. Verification decides what a guest
//! reads. So the service asks through a [`Verifier`]. That asks the CPU, by the same trait, unless settings name another engine; then
//! it has the CPU compare whatever that engine calls equal, unless the operator has said to trust it.
//!
//! Programs list the engines that they link in [`Engines`], by name. The engine library itself has the CPU alone: [`Cpu`]
//! offers all of them, and is what everything falls back to.
//!
//! What holds for all works:
//! - Calls return soon: an engine bounds how long it waits for its device, and then says [`Error::Device`].
//! - An item that cannot be read is an error of that item; the others of its batch have their answers.
//! - After [`Error::Device`] an engine is asked nothing any more; it is dropped.
//! - An engine reads the pages that it is given and nothing else of the caller's memory. It writes none of them.
//! - A device sees files: those that it was given by [`Engine::map`], and what its driver copies into memory of its own.
//!   Memory of a guest is never mapped for a device, since that would pin it.
//!
//! Each engine passes the suites in `conformance` (feature `conformance`) for what it offers. KSM's algorithm on any engine
//! is in `ksm` (feature `ksm-model`).

mod account;
mod arena;
mod checked_search;
mod comparing;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod cpu;
mod deltas;
mod engine;
mod jhash;
mod keys;
#[cfg(any(test, feature = "ksm-model"))]
pub mod ksm;
mod meanwhile;
pub(crate) mod registry;
mod retry;
mod tree_search;
mod verifier;
mod verify;

pub use account::{Account, Stopwatch};
pub use arena::Arena;
pub use checked_search::CheckedSearch;
pub use comparing::{among_by_comparing, search_by_comparing};
pub use cpu::{Cpu, KeyKind, LineCounts};
pub use deltas::{DELTA_ENTRY, Delta, Deltas};
pub use engine::{Answer, Engine, Error, PageId, PageView, Pages};
pub use jhash::jhash2;
pub use keys::Keys;
pub use meanwhile::Meanwhile;
pub use registry::{Engines, Entry, Work};
pub(crate) use retry::Retry;
pub use tree_search::{Searched, TreeSearch};
pub use verifier::Verifier;
pub use verify::{Compared, Limits, Pair, PairAnswer, StablePage, Verify, With};
pub use vmm_dedup_protocol::stats::DeviceWork;
