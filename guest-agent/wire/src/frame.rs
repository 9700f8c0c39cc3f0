//! Guest frames.

use crate::malformed::Malformed;
use std::ops::Range;

/// Guest physical addresses have at most 52 bits.
const LIMIT: u64 = 1 << 40;
/// Frames in a block: 2 MiB, aligned as a huge page is.
pub const BLOCK: usize = 512;
/// Blocks below [`LIMIT`].
const BLOCK_LIMIT: u32 = 1 << 31;

/// A guest frame number: guest physical address / 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gfn(u64);

impl Gfn {
    /// A frame below 2^52 bytes.
    ///
    /// # Errors
    /// [`Malformed::Frames`].
    pub fn try_new(number: u64) -> Result<Self, Malformed> {
        if number < LIMIT {
            Ok(Self(number))
        } else {
            Err(Malformed::Frames {
                first: number,
                count: 1,
            })
        }
    }

    /// The frame's number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }

    /// The block that it is in.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // 40 bits less 9
    pub fn block(self) -> Block {
        Block((self.0 / BLOCK as u64) as u32)
    }

    /// Its place in its block.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // below BLOCK
    pub fn place(self) -> usize {
        (self.0 % BLOCK as u64) as usize
    }
}

/// 512 frames: guest physical address / 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(u32);

impl Block {
    /// A block below 2^52 bytes.
    ///
    /// # Errors
    /// [`Malformed::Field`].
    pub fn try_new(number: u64) -> Result<Self, Malformed> {
        u32::try_from(number)
            .ok()
            .filter(|number| *number < BLOCK_LIMIT)
            .map(Self)
            .ok_or(Malformed::Field {
                field: "block",
                value: number,
            })
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// Its first frame.
    #[must_use]
    pub fn first(self) -> Gfn {
        Gfn(u64::from(self.0) * BLOCK as u64)
    }
}

/// One or more consecutive frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stretch {
    first: u64,
    count: u64,
}

impl Stretch {
    /// `count` frames from `first` on.
    ///
    /// # Errors
    /// [`Malformed::Frames`] if there are none, or if they end beyond the address space.
    pub fn try_new(first: u64, count: u64) -> Result<Self, Malformed> {
        match first.checked_add(count) {
            Some(end) if count > 0 && end <= LIMIT => Ok(Self { first, count }),
            _ => Err(Malformed::Frames { first, count }),
        }
    }

    /// The frames' numbers.
    #[must_use]
    pub fn numbers(self) -> Range<u64> {
        self.first..self.first + self.count
    }

    /// The frames.
    pub fn frames(self) -> impl Iterator<Item = Gfn> {
        self.numbers().map(Gfn)
    }

    /// Blocks that it touches.
    #[must_use]
    pub fn blocks(self) -> u64 {
        let frames = self.numbers();
        (frames.end - 1) / BLOCK as u64 - frames.start / BLOCK as u64 + 1
    }

    /// How many frames.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // there is always one
    pub fn len(self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_frame_can_be_named_and_none_behind_it() {
        let last = LIMIT - 1;
        assert_eq!(Gfn::try_new(last).unwrap().block(), Block(BLOCK_LIMIT - 1));
        assert_eq!(Stretch::try_new(last, 1).unwrap().numbers(), last..LIMIT);
        assert!(Gfn::try_new(LIMIT).is_err() && Stretch::try_new(last, 2).is_err());
        assert!(Stretch::try_new(u64::MAX, 2).is_err() && Stretch::try_new(0, 0).is_err());
        assert!(Block::try_new(u64::from(BLOCK_LIMIT)).is_err());
        let blocks = |first, count| Stretch::try_new(first, count).unwrap().blocks();
        assert_eq!((blocks(511, 1), blocks(511, 2), blocks(0, 1024)), (1, 2, 2));
    }

    #[test]
    fn frames_lie_in_blocks_of_two_mebibytes() {
        let frame = Gfn::try_new(0x12_3456).unwrap();
        assert_eq!((frame.block().number(), frame.place()), (0x91a, 0x56));
        assert_eq!(frame.block().first().number(), 0x12_3400);
    }
}
