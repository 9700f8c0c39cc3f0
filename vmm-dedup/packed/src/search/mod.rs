//! Base search: which pages may be near to a page.
//!
//! Three ways, measured on memory of real guests. The *zero page* is a base that costs nothing. The *neighbour's base* shows
//! the way where two guests hold the same text at a constant distance (kernels under KASLR): if page n was near to page m, then
//! page n + 1 is a candidate's neighbour, m + 1. And an *index* of four single lines of each page, the four that line keys
//! read, names pages that have one of them. What is found is proposed; packing decides.
//!
//! The index has a fixed size: what does not fit into it pushes something else out, and is counted. Proposals are capped.

mod index;
mod ways;

pub use index::{LineHashes, LineIndex, Position};
pub use ways::{BaseSearch, Bases, Counters, MOST_PROPOSALS, Proposal, Way};
