//! The number of a page of the store.

use crate::sizes::{HUGE_PAGES, MAX_SLOTS, PAGE_SIZE, SLOTS_PER_SEGMENT};

/// A page of the store. Slots with consecutive numbers in one segment lie next to each other in its file, so
/// that a run of guest pages can map a run of slots in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The slot with the lowest number.
    pub const FIRST: Self = Self(0);

    /// Whether it lies where a huge page of a segment begins.
    pub fn begins_huge_page(self) -> bool {
        (self.0 as usize).is_multiple_of(HUGE_PAGES)
    }

    /// The slot with this number, if the store can have one.
    pub fn try_new(number: u32) -> Option<Self> {
        (number < MAX_SLOTS).then_some(Self(number))
    }

    /// The slot's number in its store.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The number of the segment that holds this slot.
    pub fn segment(self) -> u32 {
        self.0 / SLOTS_PER_SEGMENT
    }

    /// Byte offset of the slot in its segment's file.
    pub fn offset(self) -> usize {
        (self.0 % SLOTS_PER_SEGMENT) as usize * PAGE_SIZE
    }

    /// The slot `n` places further on, if it lies in the same segment.
    pub fn checked_add_in_segment(self, n: u32) -> Option<Self> {
        let next = Self::try_new(self.0.checked_add(n)?)?;
        (next.segment() == self.segment()).then_some(next)
    }

    /// The slot `n` places before, if it lies in the same segment.
    pub fn checked_sub_in_segment(self, n: u32) -> Option<Self> {
        let before = Self::try_new(self.0.checked_sub(n)?)?;
        (before.segment() == self.segment()).then_some(before)
    }
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "slot {}", self.0)
    }
}
