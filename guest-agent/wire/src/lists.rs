//! Lists of blocks and of stretches, as payloads hold them.

use crate::block::{self, Frames};
use crate::fields::{Fields, put_varint};
use crate::frame::{Block, Stretch};
use crate::limits::MOST_PAYLOAD;
use crate::malformed::Malformed;

/// A list of blocks, as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks<'a>(pub(crate) &'a [u8]);

impl<'a> Blocks<'a> {
    /// The blocks, each with the bytes that it begins with. A walk ends with the first error.
    pub fn walk(self) -> impl Iterator<Item = Result<CodedBlock<'a>, Malformed>> {
        let (mut rest, mut next, mut failed) = (self.0, 0_u64, false);
        std::iter::from_fn(move || {
            if rest.is_empty() || failed {
                return None;
            }
            let item = coded_block(&mut rest, &mut next);
            failed = item.is_err();
            Some(item)
        })
    }
}

/// A block of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodedBlock<'a> {
    /// Which.
    pub block: Block,
    /// What is said of it, coded; it can be decoded.
    pub coded: &'a [u8],
}

fn coded_block<'a>(rest: &mut &'a [u8], next: &mut u64) -> Result<CodedBlock<'a>, Malformed> {
    let mut fields = Fields(rest);
    let number = next.saturating_add(fields.varint()?);
    let block = Block::try_new(number)?;
    let mut decoder = block::Decoder::new(fields.0);
    while decoder.next_run()?.is_some() {}
    let (coded, after) = fields.0.split_at(decoder.end()?);
    (*rest, *next) = (after, number + 1);
    Ok(CodedBlock { block, coded })
}

/// Makes a list of blocks.
#[derive(Debug, Default)]
pub struct BlocksBuilder {
    bytes: Vec<u8>,
    next: u64,
}

impl BlocksBuilder {
    /// Whether another block fits for certain.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.bytes.len() + 5 + block::MOST_BYTES <= MOST_PAYLOAD
    }

    /// Appends a block that comes behind those that are there.
    ///
    /// # Panics
    /// If it does not come behind them.
    pub fn push(&mut self, block: Block, frames: &Frames) {
        let number = u64::from(block.number());
        assert!(number >= self.next, "blocks are told in ascending order");
        put_varint(number - self.next, &mut self.bytes);
        block::encode(frames, &mut self.bytes);
        self.next = number + 1;
    }

    /// Whether a block comes behind those that are there.
    #[must_use]
    pub fn takes(&self, block: Block) -> bool {
        u64::from(block.number()) >= self.next
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The list.
    #[must_use]
    pub fn list(&self) -> Blocks<'_> {
        Blocks(&self.bytes)
    }

    /// Begins anew, with the memory that there is.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.next = 0;
    }
}

/// A list of stretches, as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretches<'a>(pub(crate) &'a [u8]);

impl Stretches<'_> {
    /// The stretches, ascending, none touching the next. A walk ends with the first error.
    pub fn walk(self) -> impl Iterator<Item = Result<Stretch, Malformed>> {
        let (mut rest, mut end, mut failed) = (self.0, None, false);
        std::iter::from_fn(move || {
            if rest.is_empty() || failed {
                return None;
            }
            let item = stretch(&mut rest, &mut end);
            failed = item.is_err();
            Some(item)
        })
    }
}

fn stretch(rest: &mut &[u8], end: &mut Option<u64>) -> Result<Stretch, Malformed> {
    let mut fields = Fields(rest);
    let gap = fields.varint()?;
    let first = match *end {
        None => gap,
        Some(_) if gap == 0 => {
            return Err(Malformed::Field {
                field: "gap",
                value: 0,
            });
        }
        Some(end) => gap.saturating_add(end),
    };
    let stretch = Stretch::try_new(first, fields.varint()?)?;
    (*rest, *end) = (fields.0, Some(stretch.numbers().end));
    Ok(stretch)
}

/// Makes a list of stretches.
#[derive(Debug, Default)]
pub struct StretchesBuilder {
    bytes: Vec<u8>,
    end: Option<u64>,
}

impl StretchesBuilder {
    /// Whether another stretch fits for certain.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.bytes.len() + 8 + 20 <= MOST_PAYLOAD
    }

    /// Appends a stretch that comes behind those that are there and does not touch them.
    ///
    /// # Panics
    /// If it does not come behind them.
    pub fn push(&mut self, stretch: Stretch) {
        let frames = stretch.numbers();
        let is_behind = self.end.is_none_or(|end| frames.start > end);
        assert!(is_behind, "stretches are told in ascending order");
        put_varint(frames.start - self.end.unwrap_or(0), &mut self.bytes);
        put_varint(stretch.len(), &mut self.bytes);
        self.end = Some(frames.end);
    }

    /// The list.
    #[must_use]
    pub fn list(&self) -> Stretches<'_> {
        Stretches(&self.bytes)
    }
}
