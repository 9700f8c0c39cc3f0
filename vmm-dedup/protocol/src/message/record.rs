//! What all records have in common: their header, kinds and limits.

use crate::malformed::VERSION;
use crate::sizes::STAGING_PAGES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// "vmd1".
pub const MAGIC: u32 = 0x3164_6d76;
/// Longest record, below the default socket buffer.
pub const MAX_MESSAGE: usize = 64 << 10;
/// Most sightings, withdrawals and reference changes in one batch, each.
pub const MAX_BATCH: usize = 2048;
/// Most ambiguous keys in one batch.
pub const MAX_AMBIGUOUS: usize = 512;
/// Longest gap between guest pages that the layout of slots repeats.
pub const MAX_GAP: u16 = 7;

/// Kinds of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs)] // each is described at its body
pub enum Kind {
    Hello = 1,
    Welcome = 2,
    Batch = 3,
    BatchReply = 4,
    Publish = 5,
    Published = 6,
    Report = 7,
    StatsRequest = 8,
    Stats = 9,
    Segment = 10,
    SegmentRetired = 11,
    Index = 12,
    Error = 13,
    Refused = 14,
    Set = 15,
    Explain = 16,
    Done = 17,
    Explained = 18,
    NotDone = 19,
    Goodbye = 20,
    Evacuated = 21,
    Released = 22,
    TakeOver = 23,
}

impl Kind {
    pub(super) fn try_new(raw: u16) -> Option<Self> {
        use Kind::*;
        let all = [
            Hello,
            Welcome,
            Batch,
            BatchReply,
            Publish,
            Published,
            Report,
            StatsRequest,
            Stats,
            Segment,
            SegmentRetired,
            Index,
            Error,
            Refused,
            Set,
            Explain,
            Done,
            Explained,
            NotDone,
            Goodbye,
            Evacuated,
            Released,
            TakeOver,
        ];
        all.into_iter().find(|kind| *kind as u16 == raw)
    }
}

/// Start of every record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    pub(super) magic: u32,
    pub(super) version: u16,
    pub(super) kind: u16,
    /// Bytes of the whole record.
    pub(super) len: u32,
    reserved: u32,
}

pub(super) const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 16);

/// Builds one record of `kind` from the parts of its body.
pub fn encode(kind: Kind, parts: &[&[u8]]) -> Vec<u8> {
    let len = HEADER + parts.iter().map(|p| p.len()).sum::<usize>();
    assert!(len <= MAX_MESSAGE, "callers bound their lists");
    #[allow(clippy::cast_possible_truncation)] // <= MAX_MESSAGE
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        kind: kind as u16,
        len: len as u32,
        reserved: 0,
    };
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(header.as_bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

const _: () = assert!(HEADER + 8 * STAGING_PAGES <= MAX_MESSAGE);
