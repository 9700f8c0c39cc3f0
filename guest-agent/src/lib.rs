//! What the agent in a guest tells the dedup service of its VM about the guest's memory.
//!
//! The guest knows things that the host can only guess: which frames are free, which hold page cache (often the same
//! in many guests), which are about to change. The agent will send them over vsock as [`Hint`]s; the service will
//! look at page cache first, leave volatile frames alone, and treat free frames as empty. So far this crate holds
//! the records; the agent and the service's side are not written yet.
//!
//! # Format
//!
//! A stream of records of [`RECORD`] bytes, little-endian: first guest frame number (u64), number of frames (u32),
//! kind (u16), version (u16). A record is complete in itself, so either side may reconnect at any record.
//!
//! # Trust
//!
//! Hints come from the guest and are parsed as hostile. They may only change what is looked at, and when: pages are
//! still taken and compared before they are merged. Only [`HintKind::Free`] could destroy content, that of the
//! guest which sent it; the service may use it only to skip frames until the guest confirms by giving them up
//! (balloon, free page reporting).
//!
//! # Known holes
//!
//! A hint is out of date when it arrives. There is no acknowledgement, and no flow control but that of vsock.

use std::ops::Range;

/// Bytes of one record.
pub const RECORD: usize = 16;
/// Version of the records; others are refused.
pub const VERSION: u16 = 1;
/// Guest physical addresses have at most 52 bits.
const GFN_LIMIT: u64 = 1 << 40;

/// A guest frame number: guest physical address / 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gfn(u64);

impl Gfn {
    /// A frame below 2^52 bytes.
    ///
    /// # Errors
    /// [`Error::Frames`].
    pub fn try_new(number: u64) -> Result<Self, Error> {
        if number < GFN_LIMIT {
            Ok(Self(number))
        } else {
            Err(Error::Frames {
                first: number,
                count: 1,
            })
        }
    }

    /// The frame's number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// One or more consecutive frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frames {
    first: Gfn,
    count: u32,
}

impl Frames {
    /// `count` frames from `first` on.
    ///
    /// # Errors
    /// [`Error::Frames`] if there are none, or if they end beyond the address space.
    pub fn try_new(first: Gfn, count: u32) -> Result<Self, Error> {
        match first.0.checked_add(u64::from(count)) {
            Some(end) if count > 0 && end <= GFN_LIMIT => Ok(Self { first, count }),
            _ => Err(Error::Frames {
                first: first.0,
                count,
            }),
        }
    }

    /// The first frame.
    pub fn first(self) -> Gfn {
        self.first
    }

    /// How many there are.
    pub fn count(self) -> u32 {
        self.count
    }

    /// The frames' numbers.
    pub fn numbers(self) -> Range<u64> {
        self.first.0..self.first.0 + u64::from(self.count)
    }
}

/// What the guest says of its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum HintKind {
    /// Free: the content does not matter to the guest until it writes them.
    Free = 1,
    /// Clean page cache: the content of a file, likely to be found in other guests.
    PageCache = 2,
    /// Written often, or about to be freed: not worth a key.
    Volatile = 3,
    /// None of these any more.
    Ordinary = 4,
}

impl HintKind {
    fn try_new(raw: u16) -> Result<Self, Error> {
        match raw {
            1 => Ok(Self::Free),
            2 => Ok(Self::PageCache),
            3 => Ok(Self::Volatile),
            4 => Ok(Self::Ordinary),
            other => Err(Error::Kind(other)),
        }
    }
}

/// One thing the guest says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// What.
    pub kind: HintKind,
    /// Of which frames.
    pub frames: Frames,
}

impl Hint {
    /// The record.
    pub fn to_bytes(self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..8].copy_from_slice(&self.frames.first.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.frames.count.to_le_bytes());
        bytes[12..14].copy_from_slice(&(self.kind as u16).to_le_bytes());
        bytes[14..].copy_from_slice(&VERSION.to_le_bytes());
        bytes
    }

    /// Parses a record.
    ///
    /// # Errors
    /// [`Error`] names what is out of range.
    pub fn try_from_bytes(bytes: [u8; RECORD]) -> Result<Self, Error> {
        let [g0, g1, g2, g3, g4, g5, g6, g7, c0, c1, c2, c3, k0, k1, v0, v1] = bytes;
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(Error::Version(version));
        }
        let first = Gfn::try_new(u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]))?;
        Ok(Self {
            kind: HintKind::try_new(u16::from_le_bytes([k0, k1]))?,
            frames: Frames::try_new(first, u32::from_le_bytes([c0, c1, c2, c3]))?,
        })
    }
}

/// Why a record is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Another release.
    #[error("the agent's records have version {0}, expected {VERSION}: use one release on both sides")]
    Version(u16),
    /// Unknown kind.
    #[error("unknown kind of hint {0}")]
    Kind(u16),
    /// Frames that do not exist.
    #[error(
        "{count} frames from {first:#x} on: there must be at least one, and none beyond 52 bits of address"
    )]
    Frames {
        /// First frame number.
        first: u64,
        /// How many.
        count: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(first: u64, count: u32) -> Hint {
        Hint {
            kind: HintKind::PageCache,
            frames: Frames::try_new(Gfn::try_new(first).unwrap(), count).unwrap(),
        }
    }

    #[test]
    fn a_hint_survives_the_wire() {
        let sent = hint(0x12_3456, 512);
        assert_eq!(Hint::try_from_bytes(sent.to_bytes()), Ok(sent));
        assert_eq!(sent.frames.numbers(), 0x12_3456..0x12_3656);
    }

    #[test]
    fn the_last_frame_can_be_named() {
        let last = hint(GFN_LIMIT - 1, 1);
        assert_eq!(Hint::try_from_bytes(last.to_bytes()), Ok(last));
    }

    #[test]
    fn records_out_of_range_are_refused() {
        let with = |at: usize, value: u8| {
            let mut bytes = hint(0, 1).to_bytes();
            bytes[at] = value;
            Hint::try_from_bytes(bytes).unwrap_err()
        };
        assert_eq!(with(8, 0), Error::Frames { first: 0, count: 0 });
        assert!(matches!(with(7, 1), Error::Frames { .. }));
        assert_eq!(with(12, 9), Error::Kind(9));
        assert_eq!(with(14, 2), Error::Version(2));
    }

    #[test]
    fn ranges_that_overflow_are_refused() {
        let last = Gfn::try_new(GFN_LIMIT - 1).unwrap();
        assert!(Frames::try_new(last, 2).is_err());
        assert!(Gfn::try_new(u64::MAX).is_err());
    }
}
