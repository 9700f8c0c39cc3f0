//! What a word of the table says.

use crate::key::Key;
use crate::sizes::{MAX_SLOTS, SERIES};
use crate::slot::Slot;

const MARK: u32 = 1 << 31;
const SOLE: u32 = 1 << 30;
const IN_SERIES: u32 = 1 << 29;
const _: () = assert!(MAX_SLOTS < IN_SERIES);

/// What the index says of a line key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// One slot has it, and no page is known that has it and differs: whoever has the key can compare at once.
    Sole(Slot),
    /// As [`Line::Sole`], and the page is in [`SERIES`] consecutive slots from this one on.
    Series(Slot),
    /// Ambiguous: the whole page's hash decides. Counts the slots that have it.
    Marked(u32),
}

impl Line {
    /// The slot for a guest page of this number, if no hash is needed to tell. Neighbours with the same content get
    /// neighbours of a series.
    pub fn slot_for(self, page: u32) -> Option<Slot> {
        match self {
            Line::Sole(slot) => Some(slot),
            Line::Series(first) => first.checked_add_in_segment(page % SERIES),
            Line::Marked(_) => None,
        }
    }
}

/// What a word of the table says of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Of a line key.
    Line(Line),
    /// Of a whole-page key: the slot that holds such a page.
    Slot(Slot),
}

impl Entry {
    pub(super) fn encode(self, tag: u32) -> u64 {
        let payload = match self {
            Entry::Line(Line::Marked(count)) => MARK | count.min(MARK - 1),
            Entry::Line(Line::Sole(slot)) => SOLE | slot.number(),
            Entry::Line(Line::Series(first)) => SOLE | IN_SERIES | first.number(),
            Entry::Slot(slot) => slot.number() + 1,
        };
        (u64::from(tag) << 32) | u64::from(payload)
    }

    #[allow(clippy::cast_possible_truncation)] // the payload is the low half
    pub(super) fn decode(word: u64) -> Option<Self> {
        let payload = word as u32;
        if payload & MARK != 0 {
            return Some(Entry::Line(Line::Marked(payload & !MARK)));
        }
        if payload & SOLE != 0 {
            let slot = Slot::try_new(payload & !(SOLE | IN_SERIES))?;
            let line = if payload & IN_SERIES == 0 {
                Line::Sole(slot)
            } else {
                Line::Series(slot)
            };
            return Some(Entry::Line(line));
        }
        Slot::try_new(payload.checked_sub(1)?).map(Entry::Slot)
    }
}

/// What an entry holds of its key: the upper 32 bits. Two keys with one tag cost a needless hash or comparison.
#[allow(clippy::cast_possible_truncation)] // 48 - 16 bits
pub(super) fn tag(key: Key) -> u32 {
    (key.raw() >> 16) as u32
}

/// Where a tag's probe sequence starts: mixed (its top bit is the key's kind), then scaled to the capacity.
#[allow(clippy::cast_possible_truncation)] // < capacity
pub(super) fn home(tag: u32, capacity: usize) -> usize {
    ((u64::from(tag.wrapping_mul(0x9e37_79b1)) * capacity as u64) >> 32) as usize
}

pub(super) fn tag_of(word: u64) -> u32 {
    (word >> 32) as u32
}
