//! One segment: its blocks, by where they begin, and the gaps between.

use super::Owner;
use super::account::Accounts;
use super::place::{SegmentBytes, UNIT};
use super::source::Memory;
use crate::class::Class;

/// A block: where it begins, the bytes in it, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// In units.
    pub(super) start: u16,
    /// Of what was put; the block takes what its class takes.
    length: u16,
    pub(super) owner: Owner,
}

const _: () = assert!(size_of::<Block>() == 8);
const _: () = assert!(Class::MOST_BYTES <= u16::MAX as usize);

/// Blocks that bookkeeping grows by.
const GROWTH: usize = 16;

impl Block {
    fn at(self) -> usize {
        usize::from(self.start) * UNIT
    }

    fn taken(self) -> usize {
        // Every length of a block has a class.
        Class::holding(self.length.into()).map_or(0, Class::bytes)
    }

    fn end(self) -> usize {
        self.at() + self.taken()
    }
}

/// Memory and the blocks in it.
pub(super) struct Segment<M> {
    memory: M,
    bytes: usize,
    /// In the order of where they begin.
    blocks: Vec<Block>,
    /// Bytes that blocks take.
    taken: usize,
}

impl<M: Memory> Segment<M> {
    pub(super) fn new(memory: M, size: SegmentBytes) -> Self {
        Self {
            memory,
            bytes: size.bytes(),
            blocks: Vec::new(),
            taken: 0,
        }
    }

    pub(super) fn into_memory(self) -> M {
        self.memory
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Bytes that blocks take.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// Bytes in gaps, of any size.
    pub(super) fn free(&self) -> usize {
        self.bytes - self.taken
    }

    /// The first block, if there is one.
    pub(super) fn first(&self) -> Option<Block> {
        self.blocks.first().copied()
    }

    fn find(&self, start: u16) -> Option<usize> {
        self.blocks.binary_search_by_key(&start, |block| block.start).ok()
    }

    pub(super) fn get(&self, start: u16) -> Option<&[u8]> {
        let block = self.blocks[self.find(start)?];
        Some(self.memory.load(block.at(), block.length.into()))
    }

    pub(super) fn owner(&self, start: u16) -> Option<Owner> {
        Some(self.blocks[self.find(start)?].owner)
    }

    /// The gaps: before which block, where, and of how many bytes.
    fn gaps(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let starts = self.blocks.iter().map(|block| block.at()).chain([self.bytes]);
        let ends = [0].into_iter().chain(self.blocks.iter().map(|block| block.end()));
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
        if self.blocks.len() == self.blocks.capacity() {
            self.blocks.try_reserve_exact(GROWTH).ok()?;
        }
        let start = u16::try_from(at / UNIT).ok()?;
        let block = Block {
            start,
            length: u16::try_from(bytes.len()).ok()?,
            owner,
        };
        self.memory.store(at, bytes);
        self.blocks.insert(before, block);
        self.taken += taken;
        Some(start)
    }

    pub(super) fn remove(&mut self, start: u16) -> Option<()> {
        let block = self.blocks.remove(self.find(start)?);
        self.taken -= block.taken();
        Some(())
    }

    /// Moves blocks down so that all gaps become one at the end. `moved` is told of each: its owner, from where and to where.
    /// `buffer` is large enough for any block.
    pub(super) fn slide(&mut self, buffer: &mut Vec<u8>, mut moved: impl FnMut(Owner, u16, u16)) -> usize {
        let (mut end, mut bytes) = (0, 0);
        for block in &mut self.blocks {
            if block.at() > end {
                buffer.clear();
                buffer.extend_from_slice(self.memory.load(block.at(), block.length.into()));
                self.memory.store(end, buffer);
                // Below where it began, so it fits.
                let start = u16::try_from(end / UNIT).unwrap_or(block.start);
                moved(block.owner, block.start, start);
                block.start = start;
                bytes += buffer.len();
            }
            end = block.end();
        }
        bytes
    }

    pub(super) fn account(&self, accounts: &mut Accounts) {
        let payload: u64 = self.blocks.iter().map(|block| u64::from(block.length)).sum();
        accounts.segments += 1;
        accounts.blocks += self.blocks.len() as u64;
        accounts.payload_bytes += payload;
        accounts.class_bytes += self.taken as u64;
        accounts.metadata_bytes += (self.blocks.capacity() * size_of::<Block>()) as u64;
    }
}
