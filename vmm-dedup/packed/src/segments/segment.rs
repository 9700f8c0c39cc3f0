//! One segment: its cells, by where they begin, and the gaps between.

use super::account::Accounts;
use super::place::{SegmentBytes, UNIT};
use super::source::Memory;
use crate::class::Class;

/// Whose packed page it is: a number of the caller's, given back when a cell moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u32);

/// A cell: where it begins, the bytes in it, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    /// In units.
    pub(super) start: u16,
    /// Of what was put; the cell takes what its class takes.
    length: u16,
    pub(super) owner: Owner,
}

/// Bytes of bookkeeping for each cell.
pub const CELL_METADATA_BYTES: usize = size_of::<Cell>();
const _: () = assert!(CELL_METADATA_BYTES == 8);
const _: () = assert!(Class::MOST_BYTES <= u16::MAX as usize);

/// Cells that bookkeeping grows by.
const GROWTH: usize = 16;

impl Cell {
    fn at(self) -> usize {
        usize::from(self.start) * UNIT
    }

    fn taken(self) -> usize {
        // Every length of a cell has a class.
        Class::holding(self.length.into()).map_or(0, Class::bytes)
    }

    fn end(self) -> usize {
        self.at() + self.taken()
    }
}

/// Memory and the cells in it.
pub(super) struct Segment<M> {
    memory: M,
    bytes: usize,
    /// In the order of where they begin.
    cells: Vec<Cell>,
    /// Bytes that cells take.
    taken: usize,
}

impl<M: Memory> Segment<M> {
    pub(super) fn new(memory: M, size: SegmentBytes) -> Self {
        Self {
            memory,
            bytes: size.bytes(),
            cells: Vec::new(),
            taken: 0,
        }
    }

    pub(super) fn into_memory(self) -> M {
        self.memory
    }

    pub(super) fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// Bytes that cells take.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// Bytes in gaps, of any size.
    pub(super) fn free(&self) -> usize {
        self.bytes - self.taken
    }

    /// The first cell, if there is one.
    pub(super) fn first(&self) -> Option<Cell> {
        self.cells.first().copied()
    }

    fn find(&self, start: u16) -> Option<usize> {
        self.cells.binary_search_by_key(&start, |cell| cell.start).ok()
    }

    pub(super) fn get(&self, start: u16) -> Option<&[u8]> {
        let cell = self.cells[self.find(start)?];
        Some(self.memory.load(cell.at(), cell.length.into()))
    }

    pub(super) fn owner(&self, start: u16) -> Option<Owner> {
        Some(self.cells[self.find(start)?].owner)
    }

    /// The gaps: before which cell, where, and of how many bytes.
    fn gaps(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let starts = self.cells.iter().map(|cell| cell.at()).chain([self.bytes]);
        let ends = [0].into_iter().chain(self.cells.iter().map(|cell| cell.end()));
        let gaps = starts.zip(ends).enumerate();
        gaps.filter_map(|(before, (start, end))| (start > end).then_some((before, end, start - end)))
    }

    /// The largest class that it has a gap for.
    pub(super) fn room(&self) -> Option<Class> {
        Class::fitting(self.gaps().map(|(_, _, bytes)| bytes).max()?)
    }

    /// Puts bytes into the smallest gap that holds them. `None` if there is none, or no memory for the bookkeeping.
    pub(super) fn insert(&mut self, bytes: &[u8], owner: Owner) -> Option<u16> {
        let taken = Class::holding(bytes.len())?.bytes();
        let fitting = self.gaps().filter(|(_, _, gap)| *gap >= taken);
        let (before, at, _) = fitting.min_by_key(|(_, _, gap)| *gap)?;
        if self.cells.len() == self.cells.capacity() {
            self.cells.try_reserve_exact(GROWTH).ok()?;
        }
        let start = u16::try_from(at / UNIT).ok()?;
        let cell = Cell {
            start,
            length: u16::try_from(bytes.len()).ok()?,
            owner,
        };
        self.memory.store(at, bytes);
        self.cells.insert(before, cell);
        self.taken += taken;
        Some(start)
    }

    pub(super) fn remove(&mut self, start: u16) -> Option<()> {
        let cell = self.cells.remove(self.find(start)?);
        self.taken -= cell.taken();
        Some(())
    }

    /// Moves cells down so that all gaps become one at the end. `moved` is told of each: its owner, from where and to where.
    /// `buffer` is large enough for any cell.
    pub(super) fn slide(&mut self, buffer: &mut Vec<u8>, mut moved: impl FnMut(Owner, u16, u16)) -> usize {
        let (mut end, mut bytes) = (0, 0);
        for cell in &mut self.cells {
            if cell.at() > end {
                buffer.clear();
                buffer.extend_from_slice(self.memory.load(cell.at(), cell.length.into()));
                self.memory.store(end, buffer);
                // Below where it began, so it fits.
                let start = u16::try_from(end / UNIT).unwrap_or(cell.start);
                moved(cell.owner, cell.start, start);
                cell.start = start;
                bytes += buffer.len();
            }
            end = cell.end();
        }
        bytes
    }

    pub(super) fn account(&self, accounts: &mut Accounts) {
        let payload: u64 = self.cells.iter().map(|cell| u64::from(cell.length)).sum();
        accounts.segments += 1;
        accounts.cells += self.cells.len() as u64;
        accounts.payload_bytes += payload;
        accounts.class_bytes += self.taken as u64;
        accounts.metadata_bytes += (self.cells.capacity() * size_of::<Cell>()) as u64;
    }
}
