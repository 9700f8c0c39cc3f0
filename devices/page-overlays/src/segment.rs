//! Segments of the Overlay Memory Store and their metadata line (section 4.4.1).
//!
//! A segment of less than 4 KiB begins with a line of metadata: 64 pointers of 5 bits, one for each line of the page, and 32
//! bits that tell which slots are free; 352 bits together. Slot 0 is the metadata line itself, so a pointer of 0 means that
//! the overlay has no such line in the segment. In a segment of 4 KiB a line has the place that it has in the page.

use crate::sizes::{LINE_BYTES, LINES, LineBytes, number};

/// The size of a segment (section 4.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SegmentSize {
    B256,
    B512,
    K1,
    K2,
    K4,
}

impl SegmentSize {
    pub(crate) const ALL: [Self; 5] = [Self::B256, Self::B512, Self::K1, Self::K2, Self::K4];

    pub(crate) fn bytes(self) -> u64 {
        256 << self.number()
    }

    /// 0 for the smallest.
    pub(crate) fn number(self) -> usize {
        self as usize
    }

    /// Lines of an overlay that it holds.
    pub(crate) fn lines(self) -> usize {
        match self {
            Self::K4 => LINES,
            _ => (4 << self.number()) - 1,
        }
    }

    /// The next larger one.
    pub(crate) fn larger(self) -> Option<Self> {
        Self::ALL.get(self.number() + 1).copied()
    }

    /// Whether it begins with a line of metadata.
    pub(crate) fn has_metadata(self) -> bool {
        self != Self::K4
    }
}

/// Where a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Its address in main memory, a multiple of its size. The low 8 bits of OMSaddr are free to hold the size.
    pub(crate) address: u64,
    pub(crate) size: SegmentSize,
}

/// Which slot of a segment has which line of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    /// 0: no slot.
    pointers: [u8; LINES],
    /// Bit by slot.
    free: u32,
}

impl Metadata {
    /// Of an empty segment below 4 KiB.
    pub(crate) fn new(size: SegmentSize) -> Self {
        let slots = u32::try_from(size.lines()).expect("a segment has at most 64 lines");
        Self {
            pointers: [0; LINES],
            free: u32::MAX >> (31 - slots.min(31)) & !1,
        }
    }

    /// The slot that has a line.
    pub(crate) fn slot(&self, line: usize) -> Option<u8> {
        Some(self.pointers[line]).filter(|slot| *slot != 0)
    }

    /// The slot for a line, a new one if it has none; `None` if the segment is full.
    pub(crate) fn place(&mut self, line: usize) -> Option<u8> {
        if let Some(slot) = self.slot(line) {
            return Some(slot);
        }
        let slot = self.free.trailing_zeros();
        if slot == u32::BITS {
            return None;
        }
        self.free &= !(1 << slot);
        self.pointers[line] = u8::try_from(slot).expect("a slot has 5 bits");
        Some(self.pointers[line])
    }

    /// As it is in memory: pointers from the lowest bit on, then the free slots.
    pub(crate) fn encode(&self) -> LineBytes {
        let mut bytes = [0; LINE_BYTES];
        for (line, pointer) in self.pointers.iter().enumerate() {
            let (byte, bit) = (line * 5 / 8, line * 5 % 8);
            let bits = u16::from(*pointer) << bit;
            let [low, high] = bits.to_le_bytes();
            bytes[byte] |= low;
            bytes[byte + 1] |= high;
        }
        bytes[40..44].copy_from_slice(&self.free.to_le_bytes());
        bytes
    }

    /// Reads what [`Metadata::encode`] wrote.
    pub(crate) fn decode(bytes: &LineBytes) -> Self {
        let pointer = |line: usize| {
            let (byte, bit) = (line * 5 / 8, line * 5 % 8);
            let [low, _] = (u16::from_le_bytes([bytes[byte], bytes[byte + 1]]) >> bit & 0x1f).to_le_bytes();
            low
        };
        Self {
            pointers: std::array::from_fn(pointer),
            free: u32::from_le_bytes([bytes[40], bytes[41], bytes[42], bytes[43]]),
        }
    }
}

impl Segment {
    /// The address of a slot, or of a line's place in a segment of 4 KiB.
    pub(crate) fn at(self, slot: usize) -> u64 {
        self.address + number(slot * LINE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn segments_hold_what_the_paper_says() {
        let lines = SegmentSize::ALL.map(|size| (size.bytes(), size.lines()));
        assert_eq!(lines, [(256, 3), (512, 7), (1024, 15), (2048, 31), (4096, 64)]);
    }

    #[test]
    fn a_full_segment_has_no_place() {
        for size in SegmentSize::ALL.into_iter().filter(|size| size.has_metadata()) {
            let mut metadata = Metadata::new(size);
            for line in 0..size.lines() {
                assert_eq!(metadata.place(63 - line).map(usize::from), Some(line + 1));
            }
            assert_eq!(metadata.place(0), None);
            assert_eq!(metadata.place(63), Some(1));
        }
    }

    proptest! {
        #[test]
        fn metadata_survives_memory(lines in proptest::collection::vec(0..LINES, 0..40)) {
            let mut metadata = Metadata::new(SegmentSize::K2);
            for line in lines {
                metadata.place(line);
            }
            let bytes = metadata.encode();
            prop_assert_eq!(Metadata::decode(&bytes), metadata);
            prop_assert!(bytes[352 / 8..].iter().all(|byte| *byte == 0));
        }
    }
}
