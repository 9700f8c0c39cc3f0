//! Overlays: the lines in which a page differs from its base (Seshadri et al., ISCA'15, section 4).
//!
//! The packed page is the paper's OBitVector, 64 bits, little-endian, bit `i` for line `i`, and then those lines of 64 bytes
//! in ascending order. The paper's segments begin with a line of pointers, so that hardware can add a line; a packed page gets
//! no new lines, and has none.

use super::contract::Codec;
use super::error::{PackError, RebuildError};
use super::kind::Kind;
use crate::page::{LINE_BYTES, LINES, Page, differing_lines};

/// Bytes of the bit vector.
const VECTOR_BYTES: usize = 8;

/// The codec.
#[derive(Clone, Copy, Debug)]
pub struct Overlay {
    most_lines: u32,
}

impl Overlay {
    /// A limit that fits where pages are compressed as well: with more lines than that, compression is nearly always smaller.
    pub const MOST_LINES_BESIDE_COMPRESSION: u32 = 16;
    /// A limit that fits where overlays are the only codec: 31 lines and their vector fill the paper's largest segment below
    /// that of a whole page (2 KiB).
    pub const MOST_LINES_ALONE: u32 = 31;

    /// Overlays of at most so many lines, 64 being all of a page.
    #[must_use]
    pub fn new(most_lines: u32) -> Self {
        Self { most_lines }
    }

    /// Bytes of an overlay that has so many lines.
    #[must_use]
    pub fn bytes(lines: u32) -> usize {
        VECTOR_BYTES + lines as usize * LINE_BYTES
    }
}

/// The numbers of a vector's lines, ascending.
fn numbers(vector: u64) -> impl Iterator<Item = usize> {
    (0..LINES).filter(move |i| vector >> i & 1 != 0)
}

impl Codec for Overlay {
    fn kind(&self) -> Kind {
        Kind::Overlay
    }

    fn pack(&mut self, page: &Page, base: Option<&Page>, into: &mut [u8]) -> Result<usize, PackError> {
        let kind = Kind::Overlay;
        let base = base.ok_or(PackError::NoBase { kind })?;
        let vector = differing_lines(page, base);
        let differing = vector.count_ones();
        if differing > self.most_lines {
            return Err(PackError::TooManyLines {
                differing,
                most: self.most_lines,
            });
        }
        let (length, room) = (Self::bytes(differing), into.len());
        let packed = into.get_mut(..length).ok_or(PackError::TooLarge { kind, room })?;
        let (head, lines) = packed.split_at_mut(VECTOR_BYTES);
        head.copy_from_slice(&vector.to_le_bytes());
        for (line, i) in lines.chunks_exact_mut(LINE_BYTES).zip(numbers(vector)) {
            line.copy_from_slice(&page[i * LINE_BYTES..][..LINE_BYTES]);
        }
        Ok(length)
    }

    fn rebuild(&mut self, packed: &[u8], base: Option<&Page>, page: &mut Page) -> Result<(), RebuildError> {
        let kind = Kind::Overlay;
        let base = base.ok_or(RebuildError::NoBase { kind })?;
        let malformed = |reason: &str| RebuildError::Malformed {
            kind,
            length: packed.len(),
            reason: reason.to_owned(),
        };
        let (vector, lines) = packed
            .split_first_chunk::<VECTOR_BYTES>()
            .ok_or_else(|| malformed("the bit vector is cut off"))?;
        let vector = u64::from_le_bytes(*vector);
        if packed.len() != Self::bytes(vector.count_ones()) {
            return Err(malformed("the bit vector names another number of lines"));
        }
        page.copy_from_slice(base);
        for (line, i) in lines.chunks_exact(LINE_BYTES).zip(numbers(vector)) {
            page[i * LINE_BYTES..][..LINE_BYTES].copy_from_slice(line);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::ZERO_PAGE;

    #[test]
    fn the_vector_comes_first_and_then_the_lines() {
        let mut page = ZERO_PAGE;
        page[64 * 2] = 7;
        page[64 * 63 + 1] = 9;
        let mut packed = [0xff; 4096];

        let length = Overlay::new(2).pack(&page, Some(&ZERO_PAGE), &mut packed);

        assert_eq!(length, Ok(8 + 2 * 64));
        assert_eq!(packed[..8], (1u64 << 2 | 1 << 63).to_le_bytes());
        assert_eq!((packed[8], packed[8 + 64 + 1]), (7, 9));
    }

    #[test]
    fn more_lines_than_the_limit_are_refused() {
        let mut page = ZERO_PAGE;
        page[..64 * 17].fill(1);
        let packed = Overlay::new(16).pack(&page, Some(&ZERO_PAGE), &mut [0; 4096]);
        assert_eq!(
            packed,
            Err(PackError::TooManyLines {
                differing: 17,
                most: 16
            })
        );
    }

    #[test]
    fn a_vector_that_names_other_lines_than_there_are_is_refused() {
        for (vector, lines) in [(1u64, 0usize), (0, 1), (u64::MAX, 63), (3, 1)] {
            let packed = [&vector.to_le_bytes()[..], &vec![0; lines * 64]].concat();
            let rebuilt = Overlay::new(64).rebuild(&packed, Some(&ZERO_PAGE), &mut { ZERO_PAGE });
            assert!(
                matches!(rebuilt, Err(RebuildError::Malformed { .. })),
                "{rebuilt:?}"
            );
        }
    }
}
