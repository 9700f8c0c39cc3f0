//! What packing tells of itself.

use vmm_dedup_protocol::stats::Histogram;

/// Most pages in a window: whoever touches one of them waits until all were compared.
pub(crate) const WINDOW: usize = 16;

/// What was done so far, and what there is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Pages packed now.
    pub(crate) pages: u64,
    /// Bytes of segments.
    pub(crate) bytes: u64,
    /// Bytes of bookkeeping.
    pub(crate) metadata_bytes: u64,
    pub(crate) packs: u64,
    /// Pages that somebody touched, or that came back ahead of a walk.
    pub(crate) touched: u64,
    /// Pages that came back for other reasons.
    pub(crate) brought_back: u64,
    /// Pages whose bytes were broken.
    pub(crate) broken: u64,
    /// How long a touch took, from when its fault was read.
    pub(crate) rebuild: Histogram,
    /// CPU time of the rebuilding thread.
    pub(crate) cpu_ns: u64,
}

/// What became of the pages of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) packed: u64,
    pub(crate) pinned: u64,
    /// How long pages were away at most, nanoseconds.
    pub(crate) stop_ns: u64,
}
