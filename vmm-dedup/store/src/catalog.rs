//! The index file that services read, its growth, and the counts of its marks.
//!
//! A full index moves to a bigger file; services are sent the new one and go on reading the old one until they
//! switch (see `vmm_dedup_protocol::index`). Marks below which no slot ever came are dropped then, so marks that a
//! hostile service makes up cost it only until the next move, and the size of the next file is bounded by what the
//! VMs' declared pages can need.

use crate::error::Error;
use crate::segments::read_only;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::index::{self, IndexReader, IndexWriter};
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
        let staying = self.writer.used() - self.unused_marks + entries;
        let useful = staying
            .saturating_mul(2)
            .saturating_add(declared)
            .max(MIN_CAPACITY);
        let capacity = (self.writer.capacity() / 2 * 3).min(useful).max(staying * 2);
        let mut next = Self::with_capacity(capacity)?;
        self.writer.retire_into(&mut next.writer);
        next.marks = self.marks - self.unused_marks;
        *self = next;
        Ok(true)
    }

    /// Marks a line key as ambiguous and tells.
    pub(crate) fn mark(&mut self, line: Key) {
        if self.writer.mark_count(line).is_none() {
            self.writer.set_mark(line, 0);
            self.marks += 1;
            self.unused_marks += 1;
            self.writer.announce(line);
        }
    }

    /// Enters a slot and tells. Returns whether its line key was not marked before (it is now).
    pub(crate) fn insert(&mut self, hash: PageHash, line: Key, slot: Slot) -> bool {
        self.writer.insert_slot(hash, slot);
        let count = self.writer.mark_count(line);
        self.writer.set_mark(line, count.unwrap_or(0) + 1);
        match count {
            None => {
                self.marks += 1;
                self.writer.announce(line);
            }
            Some(0) => self.unused_marks -= 1,
            Some(_) => {}
        }
        self.writer.announce(hash.key());
        count.is_none()
    }

    /// Takes a slot out. The epoch must be advanced before it is reused.
    pub(crate) fn remove(&mut self, line: Key, slot: Slot) {
        self.writer.remove_slot(slot);
        match self.writer.mark_count(line) {
            Some(count @ 2..) => _ = self.writer.set_mark(line, count - 1),
            Some(count) => {
                self.writer.remove_mark(line);
                self.marks -= 1;
                self.unused_marks -= usize::from(count == 0);
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
