//! Where a cell is, in 32 bits.

use crate::class::Class;

/// Cells begin at multiples of so many bytes: the head that each class has beside its lines.
pub(super) const UNIT: usize = 8;
/// Units that a cell's start, 16 bits, can name.
const MOST_UNITS: usize = 1 << 16;

/// Where a cell begins: a number of 8-byte units, through all segments. Places name 32 GiB of packed pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(u32);

impl Place {
    /// The place of a number that was kept.
    #[must_use]
    pub fn of_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// Its number, to be kept.
    #[must_use]
    pub fn raw(self) -> u32 {
        self.0
    }
}

/// Bytes of a segment: a power of two from 4 KiB to 512 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBytes(usize);

impl Default for SegmentBytes {
    /// 64 KiB: the end that no cell fills is then below 1 %.
    fn default() -> Self {
        Self(1 << 16)
    }
}

impl SegmentBytes {
    const LEAST: usize = 4096;
    const MOST: usize = MOST_UNITS * UNIT;

    /// So many bytes; `None` unless that is a power of two in range.
    #[must_use]
    pub fn try_new(bytes: usize) -> Option<Self> {
        let fits = bytes.is_power_of_two() && (Self::LEAST..=Self::MOST).contains(&bytes);
        fits.then_some(Self(bytes))
    }

    /// The number.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.0
    }

    fn units_log2(self) -> u32 {
        (self.0 / UNIT).trailing_zeros()
    }

    /// How many segments places can name.
    pub(super) fn most_segments(self) -> u32 {
        u32::MAX >> self.units_log2()
    }

    /// A place's segment, and the unit in it.
    pub(super) fn split(self, place: Place) -> (u32, u16) {
        let log2 = self.units_log2();
        let unit = place.0 & ((1 << log2) - 1);
        // At most 16 bits are left.
        #[allow(clippy::cast_possible_truncation)]
        (place.0 >> log2, unit as u16)
    }

    pub(super) fn join(self, segment: u32, unit: u16) -> Place {
        Place(segment << self.units_log2() | u32::from(unit))
    }
}

const _: () = assert!(SegmentBytes::LEAST >= Class::MOST_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_segment_and_a_unit_of_it() {
        for bytes in [4096, 1 << 16, 1 << 19] {
            let size = SegmentBytes::try_new(bytes).unwrap();
            let last_unit = u16::try_from(bytes / UNIT - 1).unwrap();
            for (segment, unit) in [(0, 0), (1, last_unit), (size.most_segments() - 1, 7)] {
                assert_eq!(size.split(size.join(segment, unit)), (segment, unit));
            }
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for bytes in [0, 2048, 4097, 1 << 20, 3 << 14] {
            assert_eq!(SegmentBytes::try_new(bytes), None);
        }
    }
}
