//! What segments take.

/// What happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) puts: u64,
    pub(super) refused: u64,
    pub(super) frees: u64,
    pub(super) moves: u64,
    pub(super) moved_bytes: u64,
}

/// What there is, in bytes, and what happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// Segments.
    pub segments: u64,
    /// Bytes of all segments: what was taken from the source.
    pub bytes: u64,
    /// Cells, one for each packed page.
    pub cells: u64,
    /// Bytes that were put and not freed.
    pub payload_bytes: u64,
    /// Bytes that their classes take: the payload and what rounding adds.
    pub class_bytes: u64,
    /// Bytes of bookkeeping, beside the segments.
    pub metadata_bytes: u64,
    /// Cells that were put.
    pub puts: u64,
    /// Cells that were refused.
    pub refused: u64,
    /// Cells that were freed.
    pub frees: u64,
    /// Cells that compaction moved.
    pub moves: u64,
    /// Bytes that it copied.
    pub moved_bytes: u64,
}

impl Accounts {
    pub(super) fn of(counts: &Counts) -> Self {
        Self {
            puts: counts.puts,
            refused: counts.refused,
            frees: counts.frees,
            moves: counts.moves,
            moved_bytes: counts.moved_bytes,
            ..Self::default()
        }
    }

    /// Bytes of segments that hold no payload: what classes add, and gaps.
    #[must_use]
    pub fn fragmentation_bytes(&self) -> u64 {
        self.bytes - self.payload_bytes
    }

    /// Bytes of segments that no cell takes.
    #[must_use]
    pub fn gap_bytes(&self) -> u64 {
        self.bytes - self.class_bytes
    }
}
