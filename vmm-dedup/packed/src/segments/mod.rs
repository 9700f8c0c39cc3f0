//! Where packed pages are kept: segments, which are cut into cells by size class.
//!
//! A *cell* holds the bytes of one packed page and takes what its class takes. A *segment* is memory of one size, which the
//! caller's [`Source`] gives and takes back. A cell goes into the gap of the fullest segment that has one for it, so that
//! holes are used before new memory is. What churn leaves behind, [`Segments::compact`] gathers: cells of the emptiest
//! segments move to the others, their owners are told, and the memory returns.
//!
//! Bookkeeping is 8 bytes a cell, beside what the owner keeps to find it (a [`Place`]). All of it is in the account.
//!
//! Whoever asks for a place that holds nothing gets an error. If the source has no memory, nothing has changed.

mod account;
mod all;
mod compact;
mod error;
mod place;
mod rooms;
mod segment;
mod source;
#[cfg(test)]
mod tests;

pub use account::Accounts;
pub use all::Segments;
pub use compact::{Compacted, Move};
pub use error::{NoCell, PutError};
pub use place::{Place, SegmentBytes};
pub use segment::{CELL_METADATA_BYTES, Owner};
pub use source::{Heap, Memory, NoMemory, Source};
