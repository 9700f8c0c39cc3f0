//! How much sharing would save, before it is switched on.
//!
//! The actors: *memories* ([`Memory`]), each of one VM, which are read and never written: a live process, a memory
//! dump, a Cloud Hypervisor snapshot or a raw file. A *scan* reads them once, in batches, on several threads, and
//! keeps one small record for each page that is not zero. Sorted by content, the records tell which pages are
//! equal ([`estimate`]). Contents that only one page has can be held against all pages once more, 64-byte line by
//! line, to see what sharing of nearly equal pages would find ([`near`]). And they can be packed, each by each codec, to see
//! what packing would save ([`pack`]).
//!
//! Large inputs are sampled by content: a page is recorded only if the hash of its key lines falls into a certain
//! 1/k of all hashes. All copies of a content are then in the sample, or none, so that sums over the sample times k
//! have the right expectation, and the spread of the sampled contents gives an error bound. (Sampling *pages*
//! would lose most of the pairs.) Key lines are what the engine itself looks at first; they cost 256 bytes a page.
//!
//! Holes, known and accepted: two contents with one 64-bit hash count as equal (in 1 TiB: one page in 500 such
//! estimates). A live guest writes while it is read, so pages that change all the time count as what they happened
//! to hold, and the engine will leave them alone. What is said to be saved is gross: the engine's metadata and
//! mappings, some 1 % of the memory, go off it.

mod contents;
mod error;
mod inputs;
mod memory;
pub mod near;
pub mod pack;
mod packing;
mod plain;
mod process;
mod report;
mod sample;
mod scan;

pub use contents::estimate;
pub use error::Error;
pub use inputs::Inputs;
pub use memory::Memory;
pub use plain::read_plainly;
pub use report::{Amount, Input, Report, Total};
pub use sample::Sample;
pub use scan::Reading;
