//! Where the pages of a segment have moved: a word for each slot, behind the pages in the segment's file. The store writes
//! them, services read them.
//!
//! A forward names a slot that held the same page when it was written. Whoever maps that slot in the place of the old one
//! compares the bytes first, and reads a forward under the same epochs as the index (see
//! [`index`](mod@crate::index)).

use crate::mapping::Mapping;
use crate::sizes::{PAGE_SIZE, SEGMENT_BYTES};
use crate::slot::Slot;
use crate::sync::{AtomicU64, Ordering};

/// The word of a slot in a mapping of its segment's file; `None` if the mapping is shorter than such a file.
fn word(segment: &Mapping, slot: Slot) -> Option<&AtomicU64> {
    segment.words().get(SEGMENT_BYTES / 8 + slot.offset() / PAGE_SIZE)
}

/// Where the page of a slot has moved, by a mapping of the slot's segment.
pub fn read(segment: &Mapping, slot: Slot) -> Option<Slot> {
    let raw = word(segment, slot)?.load(Ordering::Acquire);
    Slot::try_new(u32::try_from(raw.checked_sub(1)?).ok()?)
}

/// Tells where the page of a slot has moved. What the new slot holds must have been written before. The mapping must be
/// writable.
pub fn write(segment: &Mapping, slot: Slot, to: Slot) {
    if let Some(word) = word(segment, slot) {
        word.store(u64::from(to.number()) + 1, Ordering::Release);
    }
}
