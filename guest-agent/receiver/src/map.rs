//! What a guest says of each frame.
//!
//! A block is kept as it came, coded, with counts. Marks are three bits a frame, only for blocks that have some.

use std::collections::BTreeMap;
use vmm_dedup_agent_wire::block::{self, Decoder, Frames};
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Gfn, Stretch};
use vmm_dedup_agent_wire::message::{CodedBlock, Mark, NOTHING};
use vmm_dedup_agent_wire::said::{Kind, Said, Temperature};

/// How many frames of a block are what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Free.
    pub free: u16,
    /// Pieces of files as they are on the disk.
    pub file_clean: u16,
    /// Other pieces of files.
    pub file_dirty: u16,
    /// Memory of programs.
    pub anonymous: u16,
    /// The kernel's own.
    pub kernel: u16,
    /// Used in the agent's last interval.
    pub hot: u16,
    /// Not in the last one, but not long before.
    pub warm: u16,
    /// Not used for some intervals.
    pub cold: u16,
}

impl Counts {
    fn add(&mut self, said: Said, frames: usize) {
        #[allow(clippy::cast_possible_truncation)] // a block has 512
        let frames = frames as u16;
        match said.kind() {
            Kind::Unknown => {}
            Kind::Free => self.free += frames,
            Kind::FileClean => self.file_clean += frames,
            Kind::FileDirty => self.file_dirty += frames,
            Kind::Anonymous => self.anonymous += frames,
            Kind::Kernel => self.kernel += frames,
        }
        match said.temperature() {
            Temperature::Hot => self.hot += frames,
            Temperature::Warm => self.warm += frames,
            Temperature::Cold => self.cold += frames,
            Temperature::Unknown => {}
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Told {
    /// Empty: nothing is said.
    coded: Box<[u8]>,
    counts: Counts,
}

/// Marks of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks(u8);

impl Marks {
    /// Whether a mark is set.
    #[must_use]
    pub fn has(self, mark: Mark) -> bool {
        self.0 & bit(mark) != 0
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

fn bit(mark: Mark) -> u8 {
    1 << (mark as u8 - 1)
}

/// The bits of a word whose first is `base`, from one place to another.
fn bits_between(from: usize, to: usize, base: usize) -> u64 {
    match to.checked_sub(from) {
        None | Some(0) => 0,
        Some(count) => (u64::MAX >> (64 - count)) << (from - base),
    }
}

const WORDS: usize = BLOCK / 64;

/// The frames of a block that have each mark, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MarkedBlock([[u64; WORDS]; Mark::ALL.len()]);

impl MarkedBlock {
    /// Whether the frame at a place of the block has a mark; none beyond its end has.
    #[must_use]
    pub fn has(&self, place: usize, mark: Mark) -> bool {
        let word = self.0[mark as usize - 1].get(place / 64);
        word.is_some_and(|word| word >> (place % 64) & 1 == 1)
    }
}

/// The marks of all frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MarkMap(BTreeMap<u32, MarkedBlock>);

impl MarkMap {
    /// Sets or lifts a mark; `changed` hears of each block in which that changes something.
    pub(crate) fn mark(&mut self, stretch: Stretch, mark: Mark, set: bool, mut changed: impl FnMut(Block)) {
        let frames = stretch.numbers();
        let mut at = frames.start;
        while let Some(frame) = Gfn::try_new(at).ok().filter(|_| at < frames.end) {
            let (block, from) = (frame.block(), frame.place());
            let left = usize::try_from(frames.end - at).unwrap_or(usize::MAX);
            let count = left.min(BLOCK - from);
            if self.mark_in_block(block.number(), from..from + count, mark, set) {
                changed(block);
            }
            at += count as u64;
        }
    }

    fn mark_in_block(&mut self, block: u32, places: std::ops::Range<usize>, mark: Mark, set: bool) -> bool {
        let entry = match (self.0.get_mut(&block), set) {
            (Some(entry), _) => entry,
            (None, true) => self.0.entry(block).or_default(),
            (None, false) => return false,
        };
        let before = *entry;
        for (word, at) in entry.0[mark as usize - 1].iter_mut().zip(0..) {
            let bits = bits_between(places.start.max(at * 64), places.end.min(at * 64 + 64), at * 64);
            *word = if set { *word | bits } else { *word & !bits };
        }
        let changed = *entry != before;
        if *entry == MarkedBlock::default() {
            self.0.remove(&block);
        }
        changed
    }

    fn of(&self, frame: Gfn) -> Marks {
        let marked = self.of_block(frame.block());
        let set = |mark: &Mark| marked.has(frame.place(), *mark);
        let all = Mark::ALL.into_iter().filter(set);
        Marks(all.fold(0, |bits, mark| bits | bit(mark)))
    }

    fn of_block(&self, block: Block) -> MarkedBlock {
        self.0.get(&block.number()).copied().unwrap_or_default()
    }

    fn count(&self, mark: Mark) -> u64 {
        let words = self.0.values().flat_map(|marked| marked.0[mark as usize - 1]);
        words.map(|word| u64::from(word.count_ones())).sum()
    }

    /// Blocks that differ.
    fn differing(&self, other: &Self) -> Vec<u32> {
        let one_way = |a: &Self, b: &Self| {
            let differs =
                |(block, marked): (&u32, &MarkedBlock)| (b.0.get(block) != Some(marked)).then_some(*block);
            a.0.iter().filter_map(differs).collect::<Vec<_>>()
        };
        [one_way(self, other), one_way(other, self)].concat()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.len() * (size_of::<MarkedBlock>() + 2 * size_of::<u32>())
    }
}

/// A bit for each block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockSet(Vec<u64>);

impl BlockSet {
    fn new(blocks: usize) -> Self {
        Self(vec![0; blocks.div_ceil(64)])
    }

    pub(crate) fn insert(&mut self, block: Block) {
        let at = block.number() as usize;
        if let Some(word) = self.0.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
    }

    fn has(&self, at: usize) -> bool {
        self.0.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    pub(crate) fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Takes out all that are in it, ascending.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Block> {
        let words = self.0.iter_mut().zip(0_u64..);
        words.flat_map(|(word, at)| {
            let bits = std::mem::take(word);
            (0..64)
                .filter(move |bit| bits >> bit & 1 == 1)
                .filter_map(move |bit| Block::try_new(at * 64 + bit).ok())
        })
    }

    fn resize(&mut self, blocks: usize) {
        self.0.resize(blocks.div_ceil(64), 0);
        if let Some(last) = self.0.last_mut().filter(|_| !blocks.is_multiple_of(64)) {
            *last &= (1 << (blocks % 64)) - 1;
        }
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Map {
    /// Frames below this exist.
    end: u64,
    told: Vec<Told>,
    pub(crate) marks: MarkMap,
    /// Blocks of which something else is said than when they were last asked for.
    pub(crate) changed: BlockSet,
    /// Blocks that were told since the snapshot began.
    fresh: BlockSet,
}

impl Map {
    /// Of a guest whose frames end at `end`.
    #[must_use]
    pub fn new(end: u64) -> Self {
        let mut map = Self {
            end: 0,
            told: Vec::new(),
            marks: MarkMap::default(),
            changed: BlockSet::new(0),
            fresh: BlockSet::new(0),
        };
        map.resize(end);
        map
    }

    /// The guest's frames end elsewhere now.
    pub fn resize(&mut self, end: u64) {
        self.end = end;
        let blocks = usize::try_from(end.div_ceil(BLOCK as u64)).unwrap_or(usize::MAX);
        self.told.resize_with(blocks, Told::default);
        self.changed.resize(blocks);
        self.fresh.resize(blocks);
        let beyond = self.marks.0.split_off(&u32::try_from(blocks).unwrap_or(u32::MAX));
        drop(beyond);
    }

    /// Where the guest's frames end.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Keeps what is said of a block; `false` if there is no such block.
    pub(crate) fn tell(&mut self, block: CodedBlock<'_>) -> bool {
        let at = block.block.number() as usize;
        let Some(told) = self.told.get_mut(at) else {
            return false;
        };
        self.fresh.insert(block.block);
        if *told.coded == *block.coded {
            return true;
        }
        let mut counts = Counts::default();
        let (mut decoder, mut is_unknown) = (Decoder::new(block.coded), true);
        // The walk over the list has decoded it once.
        while let Ok(Some((said, frames))) = decoder.next_run() {
            counts.add(said, frames);
            is_unknown &= said == Said::UNKNOWN;
        }
        let coded = if is_unknown {
            Box::default()
        } else {
            block.coded.into()
        };
        *told = Told { coded, counts };
        self.changed.insert(block.block);
        true
    }

    pub(crate) fn begin_snapshot(&mut self) {
        self.fresh.clear();
    }

    /// Forgets blocks that were not told since the snapshot began.
    pub(crate) fn end_snapshot(&mut self) {
        for at in 0..self.told.len() {
            if !self.fresh.has(at) {
                self.forget(at);
            }
        }
    }

    /// Forgets all but marks.
    pub(crate) fn forget_all(&mut self) {
        (0..self.told.len()).for_each(|at| self.forget(at));
    }

    fn forget(&mut self, at: usize) {
        if !self.told[at].coded.is_empty() {
            self.told[at] = Told::default();
            if let Ok(block) = Block::try_new(at as u64) {
                self.changed.insert(block);
            }
        }
    }

    /// Takes these marks for all there are.
    pub(crate) fn replace_marks(&mut self, marks: MarkMap) {
        let differing = self.marks.differing(&marks).into_iter();
        let blocks = differing.filter_map(|block| Block::try_new(u64::from(block)).ok());
        blocks.for_each(|block| self.changed.insert(block));
        self.marks = marks;
    }

    /// What is said of a frame.
    #[must_use]
    pub fn said(&self, frame: Gfn) -> Said {
        let Some(told) = self.told.get(frame.block().number() as usize) else {
            return Said::UNKNOWN;
        };
        if told.coded.is_empty() {
            return Said::UNKNOWN;
        }
        let (mut decoder, mut left) = (Decoder::new(&told.coded), frame.place());
        while let Ok(Some((said, frames))) = decoder.next_run() {
            match left.checked_sub(frames) {
                Some(rest) => left = rest,
                None => return said,
            }
        }
        Said::UNKNOWN
    }

    /// What is said of each frame of a block.
    #[must_use]
    pub fn frames(&self, block: Block) -> Frames {
        let mut frames = NOTHING;
        if let Some(told) = self.told.get(block.number() as usize)
            && block::decode(&told.coded, &mut frames).is_err()
        {
            return NOTHING;
        }
        frames
    }

    /// How many frames of a block are what.
    #[must_use]
    pub fn counts(&self, block: Block) -> Counts {
        let told = self.told.get(block.number() as usize);
        told.map(|told| told.counts).unwrap_or_default()
    }

    /// The marks of a frame.
    #[must_use]
    pub fn marks(&self, frame: Gfn) -> Marks {
        self.marks.of(frame)
    }

    /// The marks of each frame of a block.
    #[must_use]
    pub fn marked_in(&self, block: Block) -> MarkedBlock {
        self.marks.of_block(block)
    }

    /// How many frames have a mark.
    #[must_use]
    pub fn marked(&self, mark: Mark) -> u64 {
        self.marks.count(mark)
    }

    /// Bytes of memory that this takes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let coded: usize = self.told.iter().map(|told| told.coded.len()).sum();
        coded
            + self.told.capacity() * size_of::<Told>()
            + (self.changed.0.capacity() + self.fresh.0.capacity()) * size_of::<u64>()
            + self.marks.memory_bytes()
    }
}
