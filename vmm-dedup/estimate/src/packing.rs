//! What packing says: see [`crate::pack`].

use serde::Serialize;

/// What packing of pages without a twin would save, beyond zero pages and sharing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Packing {
    /// Whose pages were bases: `own` or `domain`.
    pub bases: &'static str,
    /// Pages whose content no other page has: packed were some of these.
    pub pages: u64,
    /// Pages of all memories, for ratios.
    pub all_pages: u64,
    /// Bytes of the index by which bases are found.
    pub index_bytes: u64,
    /// How bases were found.
    pub search: Search,
    /// What each codec did to all pages that it was tried on.
    pub tried: Vec<Tried>,
    /// What would be saved, by each codec alone and together.
    pub plans: Vec<Plan>,
    /// How long all that took, in seconds.
    pub seconds: f64,
}

/// How bases were found: by counts of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Search {
    /// Pages that a base was searched for.
    pub searched: u64,
    /// Pages that were proposed as bases.
    pub proposed: u64,
    /// Proposals that were left out because a page had too many.
    pub capped: u64,
    /// Entries of the index that others pushed out.
    pub pushed_out: u64,
    /// Pages for which the page of zeros was best.
    pub zero: u64,
    /// Pages for which the neighbour of the neighbour's base was best.
    pub neighbour: u64,
    /// Pages for which a page was best that has one of the indexed lines.
    pub line: u64,
}

/// A codec, tried on pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Tried {
    /// The codec.
    pub codec: &'static str,
    /// How often it was tried: once a page, or once for each page that was proposed as base.
    pub tries: u64,
    /// How often something smaller than a page came out.
    pub offers: u64,
    /// CPU time of a try, in microseconds.
    pub pack_us: f64,
}

/// Some codecs together, and what they would save. Every page was packed, rebuilt and compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// What it is called.
    pub name: &'static str,
    /// How bases are kept: `whole` or `packed`.
    pub bases_kept: &'static str,
    /// What each codec packed; codecs that packed nothing are left out.
    pub codecs: Vec<Packed>,
    /// Pages that were packed.
    pub pages: u64,
    /// Pages that are bases.
    pub bases: u64,
    /// Bytes that came out.
    pub payload_bytes: u64,
    /// Bytes of the segments that hold them: `payload_bytes` and `fragmentation_bytes`.
    pub segment_bytes: u64,
    /// Bytes of the segments that hold nothing: what size classes add, and gaps.
    pub fragmentation_bytes: u64,
    /// Bytes of bookkeeping: of pages, cells, segments, bases, and the index if bases are searched.
    pub metadata_bytes: u64,
    /// Bytes saved: those of the pages that were packed, less segments and bookkeeping.
    pub saved_bytes: i64,
    /// CPU time of packing a page by the codec that was chosen, in microseconds.
    pub pack_us: f64,
    /// CPU time of rebuilding a page, in microseconds; with its base, if that is packed.
    pub rebuild_us: f64,
    /// Half of the rebuilds took no longer, in microseconds by the clock.
    pub rebuild_p50_us: f64,
    /// 99 of 100 rebuilds took no longer, in microseconds by the clock.
    pub rebuild_p99_us: f64,
    /// Pages that were to be packed and are not: a live process changed them meanwhile, or another page came back.
    pub refused: u64,
    /// How long this took, in seconds.
    pub seconds: f64,
}

/// What a codec packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Packed {
    /// The codec.
    pub codec: &'static str,
    /// Pages that it packed.
    pub pages: u64,
    /// Bytes that came out.
    pub payload_bytes: u64,
    /// Half of its rebuilds took no longer, in microseconds by the clock.
    pub rebuild_p50_us: f64,
    /// 99 of 100 of its rebuilds took no longer, in microseconds by the clock.
    pub rebuild_p99_us: f64,
}
