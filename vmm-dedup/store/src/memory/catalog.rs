//! The index file that services read, its growth, and how a slot is found in it.
//!
//! A slot that is the only one of its line key is entered under that key alone: services compare at once, and nobody
//! hashes anything. Once the key is known to be ambiguous, because a second slot has it or a service has a page that
//! differs, the key is *marked* and its slots are entered under their hashes.
//!
//! A full index moves to a bigger file; services are sent the new one and go on reading the old one until they
//! switch (see `vmm_dedup_protocol::index`). Every entry stands for a slot, so made-up keys do not make it grow.
//! Entries that would lie too far from their place in the table are refused: such a slot is not found, and nothing
//! else.

use crate::error::Error;
use crate::memory::segment::read_only;
use std::cmp::Ordering;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmm_dedup_protocol::index::{self, IndexReader, IndexWriter, Line, Placed};
use vmm_dedup_protocol::key::{Key, PageHash};
use vmm_dedup_protocol::tree::Node;
use vmm_dedup_protocol::{MAX_SLOTS, Slot};

const MIN_CAPACITY: usize = 1 << 16;
/// Slots that the first file has room for: 16 segments.
const MIN_SLOTS: usize = 1 << 16;

/// The index and its file.
#[derive(Debug)]
pub(crate) struct Catalog {
    writer: IndexWriter,
    file: Arc<OwnedFd>,
    /// Line keys that are marked.
    marks: usize,
}

impl Catalog {
    pub(crate) fn new() -> Result<Self, Error> {
        Self::with_room(MIN_CAPACITY, MIN_SLOTS)
    }

    fn with_room(capacity: usize, slots: usize) -> Result<Self, Error> {
        let (file, writer) = index::create(capacity, slots).map_err(Error::Index)?;
        let file = Arc::new(read_only(&file).map_err(Error::Memory)?);
        Ok(Self {
            writer,
            file,
            marks: 0,
        })
    }

    pub(crate) fn reader(&self) -> &IndexReader {
        self.writer.reader()
    }

    /// Read-only descriptor and length of the file.
    pub(crate) fn file(&self) -> (Arc<OwnedFd>, u64) {
        let len = index::file_len(self.writer.capacity(), self.writer.slots());
        (self.file.clone(), len as u64)
    }

    /// Whether `entries` more fit this file.
    pub(crate) fn has_room(&self, entries: usize) -> bool {
        (self.writer.used() + entries) * 4 < self.writer.capacity() * 3
    }

    /// Makes room for `entries` more. Returns whether there is a new file, which services must be given.
    pub(crate) fn reserve(&mut self, entries: usize) -> Result<bool, Error> {
        if self.has_room(entries) {
            return Ok(false);
        }
        let needed = (self.writer.used() + entries) * 2;
        self.move_to((self.writer.capacity() / 2 * 3).max(needed), self.writer.slots())?;
        Ok(true)
    }

    /// As [`Self::reserve`], for slots below this number.
    pub(crate) fn reserve_slots(&mut self, slots: usize) -> Result<bool, Error> {
        let there = self.writer.slots();
        if slots <= there {
            return Ok(false);
        }
        let more = (there / 2 * 3).max(slots).min(MAX_SLOTS as usize);
        self.move_to(self.writer.capacity(), more)?;
        Ok(true)
    }

    fn move_to(&mut self, capacity: usize, slots: usize) -> Result<(), Error> {
        let mut next = Self::with_room(capacity, slots)?;
        next.marks = self.writer.retire_into(&mut next.writer);
        *self = next;
        Ok(())
    }

    /// Whether a new page can be entered so that it is found. `hash` is asked only if the line key is taken.
    pub(crate) fn admits(&self, line: Key, hash: impl FnOnce() -> PageHash) -> bool {
        match self.reader().line(line) {
            None => self.writer.admits(line),
            Some(_) => self.writer.admits(hash().key()),
        }
    }

    /// Enters a slot and tells. What is refused in spite of [`Self::admits`] (which does not reserve, and is not asked
    /// about pages that come back from limbo) is not found by anybody who looks for it, and is otherwise a slot like
    /// others. `hash_of` hashes the page of a slot.
    pub(crate) fn insert(&mut self, line: Key, slot: Slot, hash_of: impl Fn(Slot) -> PageHash) {
        self.mark(line, &hash_of);
        match self.reader().line(line) {
            Some(Line::Marked(count)) => {
                self.writer.set_line(line, Line::Marked(count.saturating_add(1)));
                self.insert_hashed(hash_of(slot), slot);
            }
            _ => {
                if self.writer.set_line(line, Line::Sole(slot)) != Placed::Refused {
                    self.writer.add_news(line);
                }
            }
        }
    }

    /// A line key is ambiguous: if a slot is known by it alone, that one is found by its hash from now on.
    pub(crate) fn mark(&mut self, line: Key, hash_of: impl Fn(Slot) -> PageHash) {
        if let Some(Line::Sole(slot) | Line::Series(slot)) = self.reader().line(line) {
            // In this order, so that a reader finds the slot one way or the other.
            self.insert_hashed(hash_of(slot), slot);
            self.writer.set_line(line, Line::Marked(1));
            self.marks += 1;
            self.writer.add_news(line);
        }
    }

    /// Enters a slot in the place of another one that holds the same page, however that was entered. A reader finds the one
    /// or the other. `hash` is asked if hashes matter.
    pub(crate) fn replace(&mut self, line: Key, old: Slot, new: Slot, hash: impl FnOnce() -> PageHash) {
        match self.reader().line(line) {
            Some(Line::Sole(sole)) if sole == old => _ = self.writer.set_line(line, Line::Sole(new)),
            Some(Line::Series(first)) if first == old => _ = self.writer.set_line(line, Line::Series(new)),
            _ => {
                self.writer.insert_slot(hash(), new);
                self.writer.remove_slot(old);
            }
        }
    }

    /// Enters a series in the place of the only slot of a line key, which holds the same page.
    pub(crate) fn replace_by_series(&mut self, line: Key, first: Slot) {
        debug_assert!(matches!(self.reader().line(line), Some(Line::Sole(_))));
        self.writer.set_line(line, Line::Series(first));
    }

    /// Tells of a key although it does not enter.
    pub(crate) fn repeat_news(&self, key: Key) {
        self.writer.add_news(key);
    }

    fn insert_hashed(&mut self, hash: PageHash, slot: Slot) {
        if self.writer.insert_slot(hash, slot) != Placed::Refused {
            self.writer.add_news(hash.key());
        }
    }

    /// Takes a slot out, however it was entered. The epoch must be advanced before it is freed.
    pub(crate) fn remove(&mut self, line: Key, slot: Slot) {
        match self.reader().line(line) {
            Some(Line::Sole(sole) | Line::Series(sole)) if sole == slot => {
                self.writer.remove_line(line);
                return;
            }
            Some(Line::Marked(count @ 2..)) => _ = self.writer.set_line(line, Line::Marked(count - 1)),
            Some(Line::Marked(_)) => {
                self.writer.remove_line(line);
                self.marks = self.marks.saturating_sub(1);
            }
            // Its own line key had no place once, and is another slot's or nobody's.
            _ => {}
        }
        self.writer.remove_slot(slot);
    }

    /// Enters a slot into the tree; `compare` compares its page with that of another. A page that is there already stays.
    pub(crate) fn order(&mut self, slot: Slot, compare: impl Fn(Slot) -> Ordering) {
        if slot.number() as usize >= self.writer.slots() {
            return;
        }
        self.writer.tree().insert(slot.number(), by_slot(compare));
    }

    /// Takes a slot out of the tree, if it is there.
    pub(crate) fn unorder(&mut self, slot: Slot, compare: impl Fn(Slot) -> Ordering) {
        self.writer.tree().remove(slot.number(), by_slot(compare));
    }

    pub(crate) fn advance_epoch(&mut self) -> u64 {
        self.writer.advance_epoch()
    }

    pub(crate) fn marks(&self) -> usize {
        self.marks
    }

    /// Bytes of memory that the file occupies.
    pub(crate) fn bytes(&self) -> u64 {
        rustix::fs::fstat(&self.file).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }
}

/// A comparison of slots as one of the tree's nodes, which are numbered as they are.
fn by_slot(compare: impl Fn(Slot) -> Ordering) -> impl Fn(Node) -> Ordering {
    move |node| Slot::try_new(node).map_or(Ordering::Less, &compare)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(n: u64) -> Key {
        Key::try_new(n << 20).unwrap()
    }

    /// The hash of the page in a slot.
    fn hash(slot: Slot) -> PageHash {
        let n = u128::from(slot.number()) + 1;
        PageHash(n << 64 | n << 20)
    }

    fn slot(n: u32) -> Slot {
        Slot::try_new(n).unwrap()
    }

    #[test]
    fn a_sole_slot_is_found_by_its_line_key_and_two_by_their_hashes() {
        let mut catalog = Catalog::new().unwrap();
        catalog.insert(line(1), slot(1), |_| panic!("nothing is hashed"));
        assert_eq!(catalog.reader().line(line(1)), Some(Line::Sole(slot(1))));
        catalog.insert(line(1), slot(2), hash);
        assert_eq!(catalog.reader().line(line(1)), Some(Line::Marked(2)));
        for slot in [slot(1), slot(2)] {
            assert_eq!(catalog.reader().slot_of(hash(slot)), Some(slot));
        }
    }

    #[test]
    fn an_ambiguous_key_stays_marked_as_long_as_a_slot_has_it() {
        let mut catalog = Catalog::new().unwrap();
        catalog.mark(line(1), hash);
        assert_eq!(catalog.reader().line(line(1)), None);
        catalog.insert(line(1), slot(1), hash);
        catalog.mark(line(1), hash);
        catalog.mark(line(1), hash);
        assert_eq!(
            (catalog.reader().line(line(1)), catalog.marks),
            (Some(Line::Marked(1)), 1)
        );
        catalog.insert(line(1), slot(2), hash);
        catalog.remove(line(1), slot(1));
        assert_eq!(catalog.reader().slot_of(hash(slot(1))), None);
        assert_eq!(catalog.reader().line(line(1)), Some(Line::Marked(1)));
        catalog.remove(line(1), slot(2));
        assert_eq!((catalog.reader().line(line(1)), catalog.marks), (None, 0));
        assert_eq!(catalog.writer.used(), 0);
    }

    #[test]
    fn a_page_that_moves_is_found_as_it_was() {
        let mut catalog = Catalog::new().unwrap();
        let same = |_| PageHash(7 << 64 | 1 << 20);
        catalog.insert(line(1), slot(1), same);
        catalog.replace(line(1), slot(1), slot(9), || panic!("nothing is hashed"));
        assert_eq!(catalog.reader().line(line(1)), Some(Line::Sole(slot(9))));
        catalog.replace_by_series(line(1), slot(32));
        catalog.replace(line(1), slot(32), slot(64), || panic!("nothing is hashed"));
        assert_eq!(catalog.reader().line(line(1)), Some(Line::Series(slot(64))));
        catalog.mark(line(1), same);
        catalog.replace(line(1), slot(64), slot(5), || same(slot(5)));
        assert_eq!(catalog.reader().line(line(1)), Some(Line::Marked(1)));
        assert_eq!(catalog.reader().slot_of(same(slot(5))), Some(slot(5)));
        catalog.remove(line(1), slot(5));
        assert_eq!((catalog.writer.used(), catalog.marks), (0, 0));
    }

    #[test]
    fn keys_aimed_at_one_place_leave_the_counts_right() {
        let mut catalog = Catalog::new().unwrap();
        // 0x0e8b_2f51 is the inverse of the index's multiplier: these tags have neighbouring homes.
        let tags = (0..1u32 << 16).map(|low| 0x0e8b_2f51u32.wrapping_mul(1 << 31 | low));
        let lines: Vec<Key> = tags
            .filter_map(|tag| Key::try_new(u64::from(tag) << 16))
            .filter(|key| !key.is_full())
            .take(6000)
            .collect();
        assert_eq!(lines.len(), 6000);
        for round in 0..2 {
            for (n, line) in (0u32..).zip(&lines) {
                catalog.reserve(2).unwrap();
                catalog.insert(*line, slot(n), hash);
            }
            let found = lines
                .iter()
                .filter(|line| catalog.reader().line(**line).is_some());
            let found = found.count();
            assert!(found > 500 && found < 2000, "{found}");
            // Those that found a place become hashed, some of the others meet them there.
            for line in &lines {
                catalog.reserve(2).unwrap();
                catalog.mark(*line, hash);
            }
            assert_eq!(catalog.marks, found);
            for (n, line) in (0u32..).zip(&lines) {
                catalog.remove(*line, slot(n));
            }
            assert_eq!((catalog.writer.used(), catalog.marks), (0, 0), "round {round}");
        }
    }

    #[test]
    fn the_index_has_room_for_the_slots_there_are() {
        let mut catalog = Catalog::new().unwrap();
        assert!(catalog.file().1 <= 4 << 20, "{} bytes", catalog.file().1);
        let far = slot(3_000_000);
        catalog.insert(line(1), slot(1), hash);
        catalog.mark(line(1), hash);
        assert!(!catalog.reserve_slots(MIN_SLOTS).unwrap());
        assert!(catalog.reserve_slots(far.number() as usize + 1).unwrap());
        catalog.insert(line(1), far, hash);
        for slot in [slot(1), far] {
            assert_eq!(catalog.reader().slot_of(hash(slot)), Some(slot));
        }
        // 24 bytes for each slot.
        assert!(catalog.file().1 <= (4 << 20) + 3_000_001 * 24);
        assert!(catalog.reserve_slots(MAX_SLOTS as usize).unwrap());
    }

    #[test]
    fn slots_make_the_index_grow() {
        let mut catalog = Catalog::new().unwrap();
        let start = catalog.file().1;
        for n in 0..200_000u32 {
            catalog.reserve(2).unwrap();
            catalog.reserve_slots(n as usize + 1).unwrap();
            catalog.insert(line(n.into()), slot(n), hash);
        }
        assert!(catalog.file().1 > start);
        assert_eq!(catalog.reader().line(line(77)), Some(Line::Sole(slot(77))));
        assert_eq!(catalog.marks, 0);
    }
}
