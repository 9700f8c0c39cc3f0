//! The shared index: one writer (the store), many readers (the services), no locks.
//!
//! A memfd holds, in 64-bit words: a header, a ring of the keys that entered last, the 128-bit hashes of the
//! slots, a tree of them in the order of their content (if the store keeps one, see [`tree`](mod@crate::tree)), and an
//! open-addressed table with linear probing. Every entry is one atomic word, so a reader sees old or
//! new, never half. A reader that races with the writer may miss an entry for an instant (it merges a pass
//! later) and may find one that is going (the epochs below keep its slot from being reused meanwhile).
//!
//! **Epochs.** The store removes a slot's entry, then advances the epoch, and reuses the slot only when every
//! connected service has reported an epoch at least as high. A service reads the epoch (acquire) *before* the
//! lookups of a batch and reports that value together with the references the batch took. So a service that
//! found the entry reports its reference no later than the epoch that would free the slot, and a service that
//! reports a higher epoch has looked after the removal. `vmm-dedup-store` checks this rule over all interleavings.
//!
//! **Growth.** The table grows by moving to a new memfd. The old one is marked retired and its epoch stays, so a
//! service that still reads it holds back every later reuse until it has switched.

use crate::key::{Key, PageHash};
use crate::mapping::Mapping;
use crate::tree::{self, TreeReader, TreeWriter};
use crate::{MAX_SLOTS, PAGE_SIZE, SERIES, Slot};
use std::sync::atomic::{AtomicU64, Ordering};

/// First word of an index file: the ASCII bytes `vmmddidx`.
pub const MAGIC: u64 = 0x766d_6d64_6469_6478;
/// Version of the layout below.
pub const VERSION: u64 = 4;
/// Keys that the ring of news holds.
pub const RING: usize = 1 << 16;

const HEADER_WORDS: usize = PAGE_SIZE / 8;
const WORD_MAGIC: usize = 0;
const WORD_VERSION: usize = 1;
const WORD_EPOCH: usize = 2;
const WORD_NEWS: usize = 3;
const WORD_CAPACITY: usize = 4;
const WORD_RETIRED: usize = 5;

const HASHES_AT: usize = HEADER_WORDS + RING;
const TREE_AT: usize = HASHES_AT + MAX_SLOTS as usize * 2;
const TABLE_AT: usize = TREE_AT + tree::words(MAX_SLOTS as usize);
const _: () = assert!(MAX_SLOTS <= tree::MAX_NODES);

/// Most words a lookup reads before it gives up; the writer keeps the table sparse enough never to need it.
const MAX_PROBES: usize = 4096;

/// Farthest from its home that the writer puts an entry: so lookups find all there is, and a service that aims keys at
/// one home (the hashing is no secret) makes them slow for no more than this. Honest keys at three quarters of any
/// capacity stay within some hundred.
const MAX_DISTANCE: usize = MAX_PROBES / 4;

const MARK: u32 = 1 << 31;
const SOLE: u32 = 1 << 30;
const IN_SERIES: u32 = 1 << 29;
const _: () = assert!(MAX_SLOTS < IN_SERIES);

/// Bytes of an index file whose table has `capacity` entries. Most of it is a hole: only what is used costs.
pub fn file_len(capacity: usize) -> usize {
    ((TABLE_AT + capacity) * 8).next_multiple_of(PAGE_SIZE)
}

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
enum Entry {
    /// Of a line key.
    Line(Line),
    /// Of a whole-page key: the slot that holds such a page.
    Slot(Slot),
}

impl Entry {
    fn encode(self, tag: u32) -> u64 {
        let payload = match self {
            Entry::Line(Line::Marked(count)) => MARK | count.min(MARK - 1),
            Entry::Line(Line::Sole(slot)) => SOLE | slot.number(),
            Entry::Line(Line::Series(first)) => SOLE | IN_SERIES | first.number(),
            Entry::Slot(slot) => slot.number() + 1,
        };
        (u64::from(tag) << 32) | u64::from(payload)
    }

    #[allow(clippy::cast_possible_truncation)] // the payload is the low half
    fn decode(word: u64) -> Option<Self> {
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
fn tag(key: Key) -> u32 {
    (key.raw() >> 16) as u32
}

/// Where a tag's probe sequence starts: mixed (its top bit is the key's kind), then scaled to the capacity.
#[allow(clippy::cast_possible_truncation)] // < capacity
fn home(tag: u32, capacity: usize) -> usize {
    ((u64::from(tag.wrapping_mul(0x9e37_79b1)) * capacity as u64) >> 32) as usize
}

fn tag_of(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Why a file is no index.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The file's header is not ours.
    #[error(
        "the index has magic {magic:#x} and version {version}, expected {MAGIC:#x} and {VERSION}: store and service must be of one release"
    )]
    Foreign {
        /// First word of the file.
        magic: u64,
        /// Second word of the file.
        version: u64,
    },
    /// The header announces a table that the file does not hold.
    #[error("the index announces {capacity} entries, which do not fit its {len} bytes")]
    Truncated {
        /// Entries announced.
        capacity: u64,
        /// Bytes mapped.
        len: usize,
    },
    /// Mapping failed.
    #[error("the index cannot be mapped")]
    Map(#[from] std::io::Error),
}

/// Keys that entered the index since a position.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// These, oldest first.
    Keys(Vec<Key>),
    /// More than the ring holds: look everything up again.
    Overrun,
}

/// A service's view of the index.
#[derive(Debug)]
pub struct IndexReader {
    map: Mapping,
    capacity: usize,
}

impl IndexReader {
    /// Checks the header of a mapped index file.
    pub fn new(map: Mapping) -> Result<Self, IndexError> {
        let words = map.words();
        if words.len() <= TABLE_AT {
            return Err(IndexError::Truncated {
                capacity: 0,
                len: map.len(),
            });
        }
        let (magic, version) = (
            words[WORD_MAGIC].load(Ordering::Acquire),
            words[WORD_VERSION].load(Ordering::Acquire),
        );
        if (magic, version) != (MAGIC, VERSION) {
            return Err(IndexError::Foreign { magic, version });
        }
        let capacity = words[WORD_CAPACITY].load(Ordering::Acquire);
        match usize::try_from(capacity) {
            Ok(n) if n > 0 && n <= words.len() - TABLE_AT => Ok(Self { capacity: n, map }),
            _ => Err(IndexError::Truncated {
                capacity,
                len: map.len(),
            }),
        }
    }

    /// The epoch to report with the lookups that follow this call.
    pub fn epoch(&self) -> u64 {
        self.map.words()[WORD_EPOCH].load(Ordering::Acquire)
    }

    /// Whether the store has moved on to another index file.
    pub fn retired(&self) -> bool {
        self.map.words()[WORD_RETIRED].load(Ordering::Acquire) != 0
    }

    /// What is known of a line key; `None`: no slot has it.
    pub fn line(&self, key: Key) -> Option<Line> {
        self.find(key, |entry| match entry {
            Entry::Line(line) => Some(line),
            Entry::Slot(_) => None,
        })
    }

    /// The slot whose page has this hash.
    pub fn slot_of(&self, hash: PageHash) -> Option<Slot> {
        self.find(hash.key(), |entry| match entry {
            Entry::Slot(slot) if self.hash_of(slot) == hash => Some(slot),
            _ => None,
        })
    }

    /// A slot whose page has this whole-page key: 47 bits of the hash agree, the rest is for the comparison.
    pub fn slot_of_key(&self, key: Key) -> Option<Slot> {
        self.find(key, |entry| match entry {
            Entry::Slot(slot) if self.hash_of(slot).key() == key => Some(slot),
            _ => None,
        })
    }

    /// Reads the word where a lookup of `key` will begin. The loads of many keys overlap, and the lookups that
    /// follow find them in the cache. The value means nothing.
    pub fn touch(&self, key: Key) -> u64 {
        self.table()[home(tag(key), self.capacity)].load(Ordering::Relaxed)
    }

    /// The slots in the order of their pages' content, numbered as they are. Empty unless the store keeps it.
    pub fn tree(&self) -> TreeReader<'_> {
        TreeReader::new(&self.map.words()[TREE_AT..TABLE_AT])
    }

    /// Position in the news, to be given to [`Self::news_since`] later.
    pub fn news_position(&self) -> u64 {
        self.map.words()[WORD_NEWS].load(Ordering::Acquire)
    }

    /// Keys that entered since `position`.
    pub fn news_since(&self, position: u64) -> News {
        let head = self.news_position();
        if head < position || head - position > RING as u64 {
            return News::Overrun;
        }
        let keys = (position..head).filter_map(|at| Key::try_new(self.ring_word(at).load(Ordering::Acquire)));
        let keys: Vec<Key> = keys.collect();
        // The writer may have lapped us while we read.
        if self.news_position() - position > RING as u64 {
            News::Overrun
        } else {
            News::Keys(keys)
        }
    }

    fn ring_word(&self, at: u64) -> &AtomicU64 {
        #[allow(clippy::cast_possible_truncation)] // < RING
        &self.map.words()[HEADER_WORDS + (at % RING as u64) as usize]
    }

    fn hash_of(&self, slot: Slot) -> PageHash {
        let words = &self.map.words()[HASHES_AT + slot.number() as usize * 2..][..2];
        let (low, high) = (words[0].load(Ordering::Acquire), words[1].load(Ordering::Acquire));
        PageHash(u128::from(high) << 64 | u128::from(low))
    }

    fn table(&self) -> &[AtomicU64] {
        &self.map.words()[TABLE_AT..][..self.capacity]
    }

    fn find<T>(&self, key: Key, mut pick: impl FnMut(Entry) -> Option<T>) -> Option<T> {
        let (table, tag) = (self.table(), tag(key));
        let mut at = home(tag, self.capacity);
        for _ in 0..self.capacity.min(MAX_PROBES) {
            let word = table[at].load(Ordering::Acquire);
            if word == 0 {
                return None;
            }
            if tag_of(word) == tag
                && let Some(found) = Entry::decode(word).and_then(&mut pick)
            {
                return Some(found);
            }
            at = if at + 1 == self.capacity { 0 } else { at + 1 };
        }
        None
    }
}

/// What became of an entry that was to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// It is in the table, which has one entry more.
    New,
    /// It replaced the entry of the same key (and slot).
    Replaced,
    /// There are too many entries around its home: the table is as it was.
    Refused,
}

/// The store's side of an index file. There must be one writer per file.
#[derive(Debug)]
pub struct IndexWriter {
    reader: IndexReader,
    used: usize,
}

impl IndexWriter {
    /// Lays out an empty index in a fresh, zeroed, writable mapping of [`file_len`]`(capacity)` bytes.
    pub fn format(map: Mapping, capacity: usize) -> Result<Self, IndexError> {
        let words = map.words();
        if words.len() < TABLE_AT + capacity {
            return Err(IndexError::Truncated {
                capacity: capacity as u64,
                len: map.len(),
            });
        }
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
        self.write_hash(hash, slot);
        let old = self.position(tag(hash.key()), |entry| entry == Entry::Slot(slot));
        self.put(tag(hash.key()), old, Entry::Slot(slot))
    }

    /// The hash of the page in a slot, as entered.
    pub fn hash_of(&self, slot: Slot) -> PageHash {
        self.reader.hash_of(slot)
    }

    /// Removes a slot's entry under its hash. Returns whether it was there.
    pub fn remove_slot(&mut self, slot: Slot) -> bool {
        let key = self.hash_of(slot).key();
        self.remove(key, |entry| entry == Entry::Slot(slot))
    }

    /// Removes what is known of a line key. Returns whether there was something.
    pub fn remove_line(&mut self, key: Key) -> bool {
        self.remove(key, |entry| matches!(entry, Entry::Line(_)))
    }

    /// Appends a key to the news, after its entry is visible.
    pub fn announce(&self, key: Key) {
        let head = self.reader.news_position();
        self.reader.ring_word(head).store(key.raw(), Ordering::Release);
        self.reader.map.words()[WORD_NEWS].store(head + 1, Ordering::Release);
    }

    /// Advances the epoch, after an entry was removed. Returns the new epoch.
    pub fn advance_epoch(&self) -> u64 {
        let next = self.reader.epoch() + 1;
        self.reader.map.words()[WORD_EPOCH].store(next, Ordering::Release);
        next
    }

    /// Moves everything into `next`, which must be empty and larger, and marks this file as left behind. Its readers
    /// keep reporting its last epoch until they switch. Returns how many marked line keys moved: entries that `next`
    /// refuses are lost, which costs savings only.
    pub fn retire_into(&self, next: &mut IndexWriter) -> usize {
        let mut marks = 0;
        let (from, to) = (self.reader.map.words(), next.reader.map.words());
        for at in (HEADER_WORDS..HASHES_AT).chain([WORD_EPOCH, WORD_NEWS]) {
            let word = from[at].load(Ordering::Relaxed);
            if word != 0 {
                to[at].store(word, Ordering::Release);
            }
        }
        for word in self.reader.table() {
            let word = word.load(Ordering::Relaxed);
            match Entry::decode(word) {
                None => {}
                Some(entry) => {
                    if let Entry::Slot(slot) = entry {
                        next.write_hash(self.hash_of(slot), slot);
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
        TreeWriter::new(&self.reader.map.words()[TREE_AT..TABLE_AT])
    }

    fn write_hash(&self, hash: PageHash, slot: Slot) {
        #[allow(clippy::cast_possible_truncation)] // two halves
        let halves = [hash.0 as u64, (hash.0 >> 64) as u64];
        let words = &self.reader.map.words()[HASHES_AT + slot.number() as usize * 2..][..2];
        for (word, half) in words.iter().zip(halves) {
            word.store(half, Ordering::Release);
        }
    }

    /// Places where an entry of this tag may be, nearest first. Entries only ever move towards their homes.
    fn places(&self, tag: u32) -> impl Iterator<Item = (usize, u64)> + '_ {
        let (table, capacity) = (self.reader.table(), self.capacity());
        let home = home(tag, capacity);
        (0..=MAX_DISTANCE.min(capacity - 1)).map(move |distance| {
            let at = (home + distance) % capacity;
            (at, table[at].load(Ordering::Relaxed))
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
            let word = self.reader.table()[at].load(Ordering::Relaxed);
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

/// Creates the memfd of an index with room for `capacity` entries: `(file, writer)`. Nobody but the writer can map
/// the file for writing afterwards.
pub fn create(capacity: usize) -> Result<(std::os::fd::OwnedFd, IndexWriter), IndexError> {
    let (file, map) = crate::mapping::sealed_memfd("vmm-dedup-index", file_len(capacity))?;
    Ok((file, IndexWriter::format(map, capacity)?))
}

#[cfg(test)]
mod tests;
