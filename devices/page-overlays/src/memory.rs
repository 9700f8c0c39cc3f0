//! Main memory: what it holds. When it answers is [`crate::dram`]'s.

use crate::sizes::{LINE_BYTES, LineBytes, PAGE_BYTES, index, number};

/// Pages of main memory. Frame 0 is the page of zeros that sparse data maps to, and is never written.
#[derive(Debug)]
pub(crate) struct MainMemory {
    /// `None` holds zeros.
    frames: Vec<Option<Box<[u8; PAGE_BYTES]>>>,
    free: Vec<u64>,
}

/// The frame of zeros.
pub(crate) const ZERO_FRAME: u64 = 0;

impl MainMemory {
    pub(crate) fn new() -> Self {
        Self {
            frames: vec![None],
            free: Vec::new(),
        }
    }

    /// A frame of zeros.
    pub(crate) fn allocate(&mut self) -> u64 {
        self.free.pop().unwrap_or_else(|| {
            self.frames.push(None);
            number(self.frames.len() - 1)
        })
    }

    /// Gives a frame back. It holds zeros from now on.
    pub(crate) fn release(&mut self, frame: u64) {
        debug_assert_ne!(frame, ZERO_FRAME);
        self.frames[index(frame)] = None;
        self.free.push(frame);
    }

    /// Whether there is memory at an address.
    pub(crate) fn has(&self, address: u64) -> bool {
        address / number(PAGE_BYTES) < number(self.frames.len())
    }

    /// The line at an address (a multiple of 64).
    pub(crate) fn read(&self, address: u64) -> LineBytes {
        let (frame, at) = place(address);
        let mut line = [0; LINE_BYTES];
        if let Some(page) = &self.frames[frame] {
            line.copy_from_slice(&page[at..at + LINE_BYTES]);
        }
        line
    }

    /// Replaces the line at an address (a multiple of 64).
    pub(crate) fn write(&mut self, address: u64, line: &LineBytes) {
        let (frame, at) = place(address);
        debug_assert_ne!(number(frame), ZERO_FRAME);
        let page = self.frames[frame].get_or_insert_with(|| Box::new([0; PAGE_BYTES]));
        page[at..at + LINE_BYTES].copy_from_slice(line);
    }
}

fn place(address: u64) -> (usize, usize) {
    debug_assert!(address.is_multiple_of(number(LINE_BYTES)));
    (index(address) / PAGE_BYTES, index(address) % PAGE_BYTES)
}
