//! The comparator in the output buffer of a chip (sections III.B and III.C).

use crate::page::{CHIPS, Page, ROUNDS};

/// The 8 bits that a chip sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary(u8);

impl Summary {
    const F1: u8 = 0x80;
    const F2: u8 = 0x40;

    /// The chip's words are equal; the other bits do not matter.
    pub const EQUAL: Self = Self(Self::F1);

    /// The first words that differ are those of round `ind` (below 64), and P's is greater if `f2` is set.
    pub fn different(f2: bool, ind: u8) -> Self {
        debug_assert!(usize::from(ind) < ROUNDS);
        Self(if f2 { Self::F2 } else { 0 } | ind & 0x3f)
    }

    /// The bits: f1, f2, ind, from the top.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Whether the chip's words are all equal.
    pub fn f1(self) -> bool {
        self.0 & Self::F1 != 0
    }

    /// Whether the first bit that differs is set in P.
    pub fn f2(self) -> bool {
        self.0 & Self::F2 != 0
    }

    /// The round, and so the line, that differs first.
    pub fn ind(self) -> u8 {
        self.0 & 0x3f
    }
}

/// What chip `chip` (below 8) sends for two pages. The comparator looks at 64 bits in each round and stops at the first
/// that are not zero.
pub fn summarize(p: &Page, q: &Page, chip: usize) -> Summary {
    let different = (0..64u8).find_map(|round| {
        let at = usize::from(round) * CHIPS + chip;
        // As a chip holds them: bytes in address order, the first one leftmost.
        let [p, q] = [p[at], q[at]].map(|word| u64::from_be_bytes(word.to_ne_bytes()));
        leftmost_one(p ^ q).map(|ri| Summary::different(p << ri >> 63 == 1, round))
    });
    different.unwrap_or(Summary::EQUAL)
}

/// Position of the leftmost one, counted from the left, by the circuit of figure 2: which of the eight chunks is the
/// first that is not zero (`Ri_h`, from the zero detector's second level), and which bit is the first in each (`Ri_l`).
/// `None` if the zero detector finds nothing.
fn leftmost_one(bits: u64) -> Option<u8> {
    let chunks = bits.to_be_bytes();
    let not_zero = chunks.iter().fold(0, |z, chunk| z << 1 | u8::from(*chunk != 0));
    let high = index_mapping(leftmost_one_detector(not_zero))?;
    let low = index_mapping(leftmost_one_detector(chunks[usize::from(high)]))?;
    Some(high << 3 | low)
}

/// Zeroes all bits but the leftmost one.
fn leftmost_one_detector(byte: u8) -> u8 {
    let mut seen = byte;
    for shift in [1, 2, 4] {
        seen |= seen >> shift;
    }
    byte & !(seen >> 1)
}

/// The position, counted from the left, of the only bit that is set.
fn index_mapping(one: u8) -> Option<u8> {
    let or = |mask: u8| u8::from(one & mask != 0);
    (one != 0).then(|| or(0b0000_1111) << 2 | or(0b0011_0011) << 1 | or(0b0101_0101))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_detector_works_as_in_the_papers_example() {
        assert_eq!(leftmost_one_detector(0b0110_1010), 0b0100_0000);
        assert_eq!(index_mapping(0b0100_0000), Some(1)); // 6 counted from the right, as the paper does
    }

    #[test]
    fn a_summary_has_the_papers_layout() {
        assert_eq!(Summary::different(true, 1).bits(), 0b0100_0001);
        assert_eq!(Summary::EQUAL.bits() >> 7, 1);
    }

    proptest! {
        #[test]
        fn the_circuit_finds_the_leftmost_one(bits: u64, shift in 0..64u32) {
            let bits = bits >> shift;
            let expected = (bits != 0).then(|| u8::try_from(bits.leading_zeros()).unwrap());
            prop_assert_eq!(leftmost_one(bits), expected);
        }
    }
}
