//! Why bytes are not kept, or not there.

use super::place::Place;
use crate::class::Class;

/// Why bytes were not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PutError {
    /// More bytes than the largest class holds.
    #[error("{length} bytes are no packed page, one has at most {most}: keep the page whole", most = Class::MOST_BYTES)]
    TooLong {
        /// How many.
        length: usize,
    },
    /// The source has no memory for another segment, or there is none for its bookkeeping.
    #[error(
        "no memory for another segment of {segment_bytes} bytes: compact, raise the limit, or keep the page whole"
    )]
    NoMemory {
        /// Bytes of a segment.
        segment_bytes: usize,
    },
    /// Places are used up.
    #[error(
        "{segments} segments of {segment_bytes} bytes are all that places can name: take larger segments"
    )]
    NoPlace {
        /// How many there are.
        segments: usize,
        /// Bytes of a segment.
        segment_bytes: usize,
    },
}

/// A place at which no cell begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no cell at place {}: it was freed, or has moved", .0.raw())]
pub struct NoCell(pub Place);
