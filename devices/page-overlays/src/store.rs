//! The Overlay Memory Store: segments of five sizes (sections 4.4.2 and 4.4.3).
//!
//! A list of free segments for each size. A size that has run out gets a segment of the next larger one, split in two; if
//! there are none of 4 KiB, the operating system gives pages. As in the paper, halves are not joined again, and pages are
//! not given back. The lists are kept here, not in the free segments: the paper groups them so that they cost next to no
//! accesses, and none are charged.

use crate::account::StoreCounters;
use crate::memory::MainMemory;
use crate::segment::{Segment, SegmentSize};
use crate::sizes::{PAGE_BYTES, number};

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    free: [Vec<u64>; 5],
    /// Pages that the operating system gives at a time.
    pages_at_a_time: u64,
    pages: u64,
    bytes_in_use: u64,
    pub(crate) counters: StoreCounters,
}

impl Store {
    /// A store that has its first pages (section 4.4.3: proactively, at start).
    pub(crate) fn new(pages_at_a_time: u64, memory: &mut MainMemory) -> Self {
        let mut store = Self {
            free: std::array::from_fn(|_| Vec::new()),
            pages_at_a_time,
            pages: 0,
            bytes_in_use: 0,
            counters: StoreCounters::default(),
        };
        store.get_pages(memory);
        store
    }

    fn get_pages(&mut self, memory: &mut MainMemory) {
        let page = number(PAGE_BYTES);
        let mut new: Vec<u64> = (0..self.pages_at_a_time)
            .map(|_| memory.allocate() * page)
            .collect();
        // The list's last segment is taken first: let that be the lowest.
        new.reverse();
        self.free[SegmentSize::K4.number()].append(&mut new);
        self.pages += self.pages_at_a_time;
    }

    /// Takes a segment.
    pub(crate) fn take(&mut self, size: SegmentSize, memory: &mut MainMemory) -> Segment {
        let address = self.take_address(size, memory);
        self.counters.segments_taken += 1;
        self.bytes_in_use += size.bytes();
        Segment { address, size }
    }

    fn take_address(&mut self, size: SegmentSize, memory: &mut MainMemory) -> u64 {
        if let Some(address) = self.free[size.number()].pop() {
            return address;
        }
        let Some(larger) = size.larger() else {
            self.counters.requests_to_os += 1;
            self.get_pages(memory);
            return self.take_address(size, memory);
        };
        let address = self.take_address(larger, memory);
        self.counters.splits += 1;
        self.free[size.number()].push(address + size.bytes());
        address
    }

    /// Gives a segment back.
    pub(crate) fn release(&mut self, segment: Segment) {
        self.bytes_in_use -= segment.size.bytes();
        self.free[segment.size.number()].push(segment.address);
    }

    /// Bytes of the segments that hold overlays.
    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.bytes_in_use
    }

    /// Pages that the operating system gave.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn small_segments_are_split_off_and_overlap_nothing() {
        let mut memory = MainMemory::new();
        let mut store = Store::new(1, &mut memory);
        let mut taken = BTreeSet::new();
        for _ in 0..20 {
            for size in SegmentSize::ALL {
                let segment = store.take(size, &mut memory);
                assert!(segment.address.is_multiple_of(size.bytes()));
                for quarter in 0..size.bytes() / 256 {
                    assert!(taken.insert(segment.address + quarter * 256));
                }
            }
        }
        assert_eq!(number(taken.len()) * 256, store.bytes_in_use());
        // 20 segments of each size are 155 KiB: 38.75 pages.
        assert_eq!((store.pages(), store.counters.requests_to_os), (39, 38));
    }

    #[test]
    fn what_was_given_back_is_taken_again() {
        let mut memory = MainMemory::new();
        let mut store = Store::new(4, &mut memory);
        let segment = store.take(SegmentSize::K1, &mut memory);
        store.release(segment);
        assert_eq!(store.take(SegmentSize::K1, &mut memory), segment);
        assert_eq!(store.bytes_in_use(), 1024);
    }
}
