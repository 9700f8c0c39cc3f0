//! The store's side of an index file.

use super::entry::{Entry, Line, home, tag, tag_of};
use super::layout::{
    HASHES_AT, HEADER_WORDS, MAGIC, VERSION, WORD_CAPACITY, WORD_EPOCH, WORD_MAGIC, WORD_NEWS, WORD_RETIRED,
    WORD_SLOTS, WORD_VERSION, table_at, tree_at,
};
use super::reader::{IndexError, IndexReader, MAX_PROBES};
use crate::key::{Key, PageHash};
use crate::mapping::Mapping;
use crate::slot::Slot;
use crate::sync::{Ordering, own};
use crate::tree::TreeWriter;

/// Farthest from its home that the writer puts an entry: so lookups find all there is, and a service that aims keys at
/// one home (the hashing is no secret) makes them slow for no more than this. Honest keys at three quarters of any
/// capacity stay within some hundred.
pub(super) const MAX_DISTANCE: usize = MAX_PROBES / 4;

/// What became of an entry that was to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// It is in the table, which has one entry more.
    New,
    /// It replaced the entry of the same key (and slot).
    Replaced,
    /// There are too many entries around its home, or the file has no room for the slot: the table is as it was.
    Refused,
}

/// The store's side of an index file. There must be one writer per file.
#[derive(Debug)]
pub struct IndexWriter {
    reader: IndexReader,
    used: usize,
}

impl IndexWriter {
    /// Lays out an empty index in a fresh, zeroed, writable mapping of [`file_len`](super::file_len)`(capacity, slots)` bytes.
    pub fn format(map: Mapping, capacity: usize, slots: usize) -> Result<Self, IndexError> {
        let words = map.words();
        if words.len() < table_at(slots) + capacity {
            return Err(IndexError::Truncated {
                capacity: capacity as u64,
                slots: slots as u64,
                len: map.len(),
            });
        }
        words[WORD_SLOTS].store(slots as u64, Ordering::Relaxed);
        words[WORD_VERSION].store(VERSION, Ordering::Relaxed);
        words[WORD_CAPACITY].store(capacity as u64, Ordering::Relaxed);
        words[WORD_EPOCH].store(1, Ordering::Relaxed);
        words[WORD_MAGIC].store(MAGIC, Ordering::Release);
        Ok(Self {
            reader: IndexReader::new(map)?,
            used: 0,
        })
    }

    /// What every service sees.
    pub fn reader(&self) -> &IndexReader {
        &self.reader
    }

    /// Entries in the table.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Entries the table has room for.
    pub fn capacity(&self) -> usize {
        self.reader.capacity
    }

    /// Slots below this number can be entered by their hashes, and into the tree.
    pub fn slots(&self) -> usize {
        self.reader.slots
    }

    /// Whether the next insertion should go to a bigger file (three quarters are used).
    pub fn is_full(&self) -> bool {
        self.used * 4 >= self.capacity() * 3
    }

    /// Whether a key that is not in the table yet would be taken.
    pub fn admits(&self, key: Key) -> bool {
        self.gap(tag(key)).is_some()
    }

    /// Enters or replaces what is known of a line key. Replacing is never refused.
    pub fn set_line(&mut self, key: Key, line: Line) -> Placed {
        let old = self.position(tag(key), |entry| matches!(entry, Entry::Line(_)));
        self.put(tag(key), old, Entry::Line(line))
    }

    /// Enters a slot under its page's hash. Also when it is refused, [`Self::hash_of`] tells the hash.
    pub fn insert_slot(&mut self, hash: PageHash, slot: Slot) -> Placed {
        if !self.write_hash(hash, slot) {
            return Placed::Refused;
        }
        let old = self.position(tag(hash.key()), |entry| entry == Entry::Slot(slot));
        self.put(tag(hash.key()), old, Entry::Slot(slot))
    }

    /// The hash of the page in a slot, as entered; `None`: the file has no room for the slot.
    pub fn hash_of(&self, slot: Slot) -> Option<PageHash> {
        self.reader.hash_by(slot, own)
    }

    /// Removes a slot's entry under its hash. Returns whether it was there.
    pub fn remove_slot(&mut self, slot: Slot) -> bool {
        self.hash_of(slot)
            .is_some_and(|hash| self.remove(hash.key(), |entry| entry == Entry::Slot(slot)))
    }

    /// Removes what is known of a line key. Returns whether there was something.
    pub fn remove_line(&mut self, key: Key) -> bool {
        self.remove(key, |entry| matches!(entry, Entry::Line(_)))
    }

    /// Appends a key to the news, after its entry is visible.
    pub fn add_news(&self, key: Key) {
        let head = own(&self.reader.map.words()[WORD_NEWS]);
        self.reader.ring_word(head).store(key.raw(), Ordering::Release);
        self.reader.map.words()[WORD_NEWS].store(head + 1, Ordering::Release);
    }

    /// Advances the epoch, after an entry was removed. Returns the new epoch.
    pub fn advance_epoch(&self) -> u64 {
        let next = own(&self.reader.map.words()[WORD_EPOCH]) + 1;
        self.reader.map.words()[WORD_EPOCH].store(next, Ordering::Release);
        next
    }

    /// Moves everything into `next`, which must be empty and no smaller in anything, and marks this file as left behind. Its readers
    /// keep reporting its last epoch until they switch. Returns how many marked line keys moved: entries that `next`
    /// refuses are lost, which costs savings only.
    pub fn retire_into(&self, next: &mut IndexWriter) -> usize {
        let mut marks = 0;
        let (from, to) = (self.reader.map.words(), next.reader.map.words());
        for at in (HEADER_WORDS..HASHES_AT).chain([WORD_EPOCH, WORD_NEWS]) {
            let word = own(&from[at]);
            if word != 0 {
                to[at].store(word, Ordering::Release);
            }
        }
        for word in self.reader.table() {
            let word = own(word);
            match Entry::decode(word) {
                None => {}
                Some(entry) => {
                    if let Entry::Slot(slot) = entry
                        && let Some(hash) = self.hash_of(slot)
                    {
                        next.write_hash(hash, slot);
                    }
                    let placed = next.put(tag_of(word), None, entry);
                    let marked = matches!(entry, Entry::Line(Line::Marked(_)));
                    marks += usize::from(marked && placed == Placed::New);
                }
            }
        }
        next.tree().adopt(self.reader.tree());
        from[WORD_RETIRED].store(1, Ordering::Release);
        marks
    }

    /// The tree of slots, to be changed.
    pub fn tree(&mut self) -> TreeWriter<'_> {
        let slots = self.slots();
        TreeWriter::new(&self.reader.map.words()[tree_at(slots)..table_at(slots)])
    }

    /// Whether the file has room for the slot.
    fn write_hash(&self, hash: PageHash, slot: Slot) -> bool {
        #[allow(clippy::cast_possible_truncation)] // two halves
        let halves = [hash.0 as u64, (hash.0 >> 64) as u64];
        let Some(words) = self.reader.hash_words(slot) else {
            return false;
        };
        for (word, half) in words.iter().zip(halves) {
            word.store(half, Ordering::Release);
        }
        true
    }

    /// Places where an entry of this tag may be, nearest first. Entries only ever move towards their homes.
    fn places(&self, tag: u32) -> impl Iterator<Item = (usize, u64)> + '_ {
        let (table, capacity) = (self.reader.table(), self.capacity());
        let home = home(tag, capacity);
        (0..=MAX_DISTANCE.min(capacity - 1)).map(move |distance| {
            let at = (home + distance) % capacity;
            (at, own(&table[at]))
        })
    }

    fn position(&self, tag: u32, is: impl Fn(Entry) -> bool) -> Option<usize> {
        self.places(tag)
            .take_while(|(_, word)| *word != 0)
            .find(|(_, word)| tag_of(*word) == tag && Entry::decode(*word).is_some_and(&is))
            .map(|(at, _)| at)
    }

    /// Where a new entry of this tag goes, if there is a place near enough to its home.
    fn gap(&self, tag: u32) -> Option<usize> {
        self.places(tag).find(|(_, word)| *word == 0).map(|(at, _)| at)
    }

    /// Writes an entry over `old` or into the first gap.
    fn put(&mut self, tag: u32, old: Option<usize>, entry: Entry) -> Placed {
        let (at, placed) = match old {
            Some(at) => (at, Placed::Replaced),
            None => {
                assert!(
                    self.used + 1 < self.capacity(),
                    "the caller grows the index before it is full"
                );
                let Some(at) = self.gap(tag) else {
                    return Placed::Refused;
                };
                self.used += 1;
                (at, Placed::New)
            }
        };
        self.reader.table()[at].store(entry.encode(tag), Ordering::Release);
        placed
    }

    /// Closes the gap that a removal leaves by moving later entries of the probe sequence back, so that there are
    /// no tombstones. A reader may see a moving entry twice or miss it for an instant, never a wrong one.
    fn remove(&mut self, key: Key, is: impl Fn(Entry) -> bool) -> bool {
        let Some(mut gap) = self.position(tag(key), is) else {
            return false;
        };
        let capacity = self.capacity();
        let distance = |from: usize, to: usize| (to + capacity - from) % capacity;
        let mut at = gap;
        loop {
            at = (at + 1) % capacity;
            let word = own(&self.reader.table()[at]);
            if word == 0 {
                break;
            }
            if distance(home(tag_of(word), capacity), at) >= distance(gap, at) {
                self.reader.table()[gap].store(word, Ordering::Release);
                gap = at;
            }
        }
        self.reader.table()[gap].store(0, Ordering::Release);
        self.used -= 1;
        true
    }
}
