//! Packing, tried: what it would save beyond zero pages and sharing.
//!
//! Looked at are pages whose content no other page has. A second scan *gathers* where they are, with the hashes of the four
//! lines that the index of bases holds. Then each is *tried*: bases are searched, and every codec packs it, alone and with
//! the nearest candidates; what is kept of that are lengths. A *plan* is a set of codecs: for each, the pages are given bases
//! (which page is one is decided for all together) and codecs, by those lengths. Then everything is *measured*: each page is
//! packed as planned, its bytes get a place in segments, it is rebuilt and compared, and the clock tells how long that took.
//!
//! Nothing is taken from a formula but what plans decide by. Memory is bounded: pages are read again whenever they are needed,
//! and the segments of a plan keep accounts without bytes.
//!
//! Holes: all pages count as cold, whatever they are used for. Pages that are shared are no bases, though they would cost
//! nothing: on real guests 2 % of the pages are near to one. The engine meets pages one after the other and cannot decide for
//! all together, so that it may find fewer bases.

mod clock;
mod gather;
mod measure;
mod plans;
mod tries;
mod work;

pub use crate::packing::{Packed, Packing, Plan, Search, Tried};
pub use vmm_dedup_packed::{Bases, SegmentBytes, Weights};

use crate::error::Error;
use crate::memory::Memory;
use crate::scan::Reading;
use gather::Gathered;
use std::time::Instant;

/// What is tried.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whose pages may be bases.
    pub bases: Bases,
    /// Bytes of a segment.
    pub segment: SegmentBytes,
    /// What counts beside bytes where codecs are chosen.
    pub weights: Weights,
    /// Most pages of all memories. Tables take up to 300 bytes for each that has no twin.
    pub most_pages: u64,
}

impl Default for Settings {
    /// Bases of the same memory, segments of 64 KiB, and 16 GiB at most.
    fn default() -> Self {
        Self {
            bases: Bases::default(),
            segment: SegmentBytes::default(),
            weights: Weights::default(),
            most_pages: 1 << 22,
        }
    }
}

/// Packs every page without a twin, by each codec alone and by all together. The progress that `reading` tells is that of the
/// scans first, and then in pages times plans.
///
/// # Errors
/// If a memory cannot be read (any more), there is too much of it, or there is no memory for tables.
pub fn pack(memories: &[Memory], settings: &Settings, reading: &Reading<'_>) -> Result<Packing, Error> {
    let start = Instant::now();
    let all_pages: u64 = memories.iter().map(Memory::pages).sum();
    let most = settings.most_pages;
    if all_pages > most {
        return Err(Error::TooManyToPack {
            pages: all_pages,
            most,
        });
    }
    let gathered = Gathered::take(memories, reading)?;
    let plans = plans::all(settings.weights);
    let steps = 1 + plans.len() as u64;
    let work = work::Work::new(&gathered, reading, steps);
    let (tries, search) = tries::all(&work, settings.bases)?;
    let plans = plans
        .iter()
        .map(|plan| measure::measure(&work, plan, &tries, settings.segment))
        .collect::<Result<Vec<Plan>, Error>>()?;
    Ok(Packing {
        bases: match settings.bases {
            Bases::Own => "own",
            Bases::Domain => "domain",
        },
        pages: gathered.len() as u64,
        all_pages,
        index_bytes: gathered.index().bytes() as u64,
        search,
        tried: tries.tried(),
        plans,
        seconds: start.elapsed().as_secs_f64(),
    })
}
