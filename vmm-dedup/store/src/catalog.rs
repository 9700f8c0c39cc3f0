//! The index file that services read, its growth, and the counts of its marks.
//!
//! A full index moves to a bigger file; services are sent the new one and go on reading the old one until they
//! switch (see `vmm_dedup_protocol::index`). Marks below which no slot ever came are dropped then, so marks that a
//! hostile service makes up cost it only until the next move, and the size of the next file is bounded by what the
//! VMs' declared pages can need. Marks and slots that would lie too far from their place in the table are refused: a
//! page without its mark is not merged, and nothing else.

use crate::error::Error;
use crate::segments::read_only;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::index::{self, IndexReader, IndexWriter, Placed};
use vmm_dedup_protocol::key::{Key, PageHash};

const MIN_CAPACITY: usize = 1 << 16;

/// The index and its file.
#[derive(Debug)]
pub(crate) struct Catalog {
    writer: IndexWriter,
    file: Arc<OwnedFd>,
    marks: usize,
    /// Marks with a count of zero.
    unused_marks: usize,
}

impl Catalog {
    pub(crate) fn new() -> Result<Self, Error> {
        Self::with_capacity(MIN_CAPACITY)
    }

    fn with_capacity(capacity: usize) -> Result<Self, Error> {
        let (file, writer) = index::create(capacity).map_err(Error::Index)?;
        let file = Arc::new(read_only(&file).map_err(Error::Memory)?);
        Ok(Self {
            writer,
            file,
            marks: 0,
            unused_marks: 0,
        })
    }

    pub(crate) fn reader(&self) -> &IndexReader {
        self.writer.reader()
    }

    /// Read-only descriptor and length of the file.
    pub(crate) fn file(&self) -> (Arc<OwnedFd>, u64) {
        (self.file.clone(), index::file_len(self.writer.capacity()) as u64)
    }

    /// Whether `entries` more fit this file.
    pub(crate) fn has_room(&self, entries: usize) -> bool {
        (self.writer.used() + entries) * 4 < self.writer.capacity() * 3
    }

    /// Makes room for `entries` more. Returns whether there is a new file, which services must be given.
    /// `declared` bounds how many marks can be of use: the pages of all VMs.
    pub(crate) fn reserve(&mut self, entries: usize, declared: usize) -> Result<bool, Error> {
        if self.has_room(entries) {
            return Ok(false);
        }
        let staying = self.writer.used().saturating_sub(self.unused_marks) + entries;
        let useful = staying
            .saturating_mul(2)
            .saturating_add(declared)
            .max(MIN_CAPACITY);
        let capacity = (self.writer.capacity() / 2 * 3).min(useful).max(staying * 2);
        let mut next = Self::with_capacity(capacity)?;
        next.marks = self.writer.retire_into(&mut next.writer);
        *self = next;
        Ok(true)
    }

    /// Marks a line key as ambiguous and tells, if there is a place for it.
    pub(crate) fn mark(&mut self, line: Key) {
        if self.writer.mark_count(line).is_none() && self.writer.set_mark(line, 0) == Placed::New {
            self.marks += 1;
            self.unused_marks += 1;
            self.writer.announce(line);
        }
    }

    /// Whether a new page of these keys can be entered so that it is found.
    pub(crate) fn admits(&self, hash: PageHash, line: Key) -> bool {
        self.writer.admits(hash.key()) && (self.writer.mark_count(line).is_some() || self.writer.admits(line))
    }

    /// Enters a slot and tells. Returns whether its line key was not marked before (it is now). What is refused in
    /// spite of [`Self::admits`] (which does not reserve, and is not asked about pages that come back from limbo)
    /// is not found by anybody who looks for it, and is otherwise a slot like others.
    pub(crate) fn insert(&mut self, hash: PageHash, line: Key, slot: Slot) -> bool {
        let placed = self.writer.insert_slot(hash, slot);
        let count = self.writer.mark_count(line);
        let marked = self.writer.set_mark(line, count.unwrap_or(0).saturating_add(1));
        if marked == Placed::New {
            self.marks += 1;
            self.writer.announce(line);
        }
        if count == Some(0) {
            self.unused_marks = self.unused_marks.saturating_sub(1);
        }
        if placed != Placed::Refused {
            self.writer.announce(hash.key());
        }
        count.is_none()
    }

    /// Takes a slot out. The epoch must be advanced before it is reused.
    pub(crate) fn remove(&mut self, line: Key, slot: Slot) {
        self.writer.remove_slot(slot);
        match self.writer.mark_count(line) {
            Some(count @ 2..) => _ = self.writer.set_mark(line, count - 1),
            Some(count) => {
                self.writer.remove_mark(line);
                self.marks = self.marks.saturating_sub(1);
                self.unused_marks = self.unused_marks.saturating_sub(usize::from(count == 0));
            }
            None => {}
        }
    }

    /// The hash of the page that a slot holds or held last.
    pub(crate) fn hash_of(&self, slot: Slot) -> PageHash {
        self.writer.hash_of(slot)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn line(n: u64) -> Key {
        Key::try_new(n << 20).unwrap()
    }

    fn hash(n: u64) -> PageHash {
        PageHash(u128::from(n) << 64 | u128::from(n) << 20)
    }

    fn slot(n: u32) -> Slot {
        Slot::try_new(n).unwrap()
    }

    #[test]
    fn marks_live_as_long_as_a_slot_below_them() {
        let mut catalog = Catalog::new().unwrap();
        catalog.mark(line(1));
        catalog.insert(hash(1), line(1), slot(1));
        catalog.insert(hash(2), line(1), slot(2));
        catalog.remove(line(1), slot(1));
        assert!(catalog.reader().is_marked(line(1)));
        catalog.remove(line(1), slot(2));
        assert!(!catalog.reader().is_marked(line(1)));
        assert_eq!((catalog.marks, catalog.unused_marks), (0, 0));
    }

    #[test]
    fn made_up_marks_do_not_make_the_index_grow() {
        let mut catalog = Catalog::new().unwrap();
        catalog.insert(hash(1), line(1 << 25), slot(1));
        for n in 0..1_000_000 {
            catalog.reserve(1, 1000).unwrap();
            catalog.mark(line(n));
        }
        assert!(
            catalog.writer.capacity() <= 2 * MIN_CAPACITY,
            "{}",
            catalog.writer.capacity()
        );
        assert_eq!(catalog.reader().slot_of(hash(1)), Some(slot(1)));
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
                catalog.reserve(2, 0).unwrap();
                catalog.mark(*line);
                catalog.insert(hash(u64::from(n)), *line, slot(n));
            }
            assert!(catalog.marks > 500 && catalog.marks < 2000, "{}", catalog.marks);
            // Some slots have their homes there, too, and are refused.
            let slots = catalog.writer.used() - catalog.marks;
            assert!((5900..=6000).contains(&slots), "{slots}");
            assert_eq!(catalog.unused_marks, 0);
            for (n, line) in (0u32..).zip(&lines) {
                catalog.remove(*line, slot(n));
            }
            let left = (catalog.writer.used(), catalog.marks, catalog.unused_marks);
            assert_eq!(left, (0, 0, 0), "round {round}");
        }
    }

    #[test]
    fn slots_make_the_index_grow() {
        let mut catalog = Catalog::new().unwrap();
        let start = catalog.file().1;
        for n in 0..200_000u32 {
            catalog.reserve(2, 0).unwrap();
            catalog.insert(hash(n.into()), line(n.into()), slot(n));
        }
        assert!(catalog.file().1 > start);
        assert_eq!(catalog.reader().slot_of(hash(77)), Some(slot(77)));
        assert_eq!(catalog.marks, 200_000);
    }
}
