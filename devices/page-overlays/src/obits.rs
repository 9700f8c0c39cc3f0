//! The `OBitVector` (section 3.1): which lines of a page are in its overlay.

use crate::sizes::LINES;

/// One bit for each line of a page, line 0 in the lowest bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OBitVector(u64);

impl OBitVector {
    /// No line is in the overlay.
    pub const EMPTY: Self = Self(0);

    /// Lines from 0 to 63, of which a bit each.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether a line (below 64) is in the overlay.
    pub fn has(self, line: usize) -> bool {
        debug_assert!(line < LINES);
        self.0 >> line & 1 != 0
    }

    /// Puts a line (below 64) into the overlay.
    pub fn insert(&mut self, line: usize) {
        debug_assert!(line < LINES);
        self.0 |= 1 << line;
    }

    /// Number of lines in the overlay.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there is no overlay.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The lines in the overlay, in order.
    pub fn lines(self) -> impl Iterator<Item = usize> {
        (0..LINES).filter(move |line| self.has(*line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_order() {
        let mut bits = OBitVector::EMPTY;
        for line in [63, 0, 17] {
            bits.insert(line);
        }
        assert_eq!(bits.lines().collect::<Vec<_>>(), [0, 17, 63]);
        assert_eq!((bits.count(), bits.has(17), bits.has(18)), (3, true, false));
    }
}
