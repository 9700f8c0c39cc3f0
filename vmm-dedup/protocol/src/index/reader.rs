//! A service's side of an index file.

use super::entry::{Entry, Line, home, tag, tag_of};
use super::layout::{
    HASHES_AT, HEADER_WORDS, MAGIC, VERSION, WORD_CAPACITY, WORD_EPOCH, WORD_MAGIC, WORD_NEWS, WORD_RETIRED,
    WORD_SLOTS, WORD_VERSION, table_at, tree_at,
};
use crate::key::{Key, PageHash};
use crate::mapping::Mapping;
use crate::sizes::{MAX_SLOTS, NEWS_RING};
use crate::slot::Slot;
use crate::sync::{AtomicU64, Ordering};
use crate::tree::TreeReader;

/// Most words a lookup reads before it gives up; the writer keeps the table sparse enough never to need it.
pub(super) const MAX_PROBES: usize = 4096;

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
    #[error("the index announces {capacity} entries and {slots} slots, which do not fit its {len} bytes")]
    Truncated {
        /// Entries announced.
        capacity: u64,
        /// Slots announced.
        slots: u64,
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
    /// As many as the ring holds, or more: look everything up again.
    Overrun,
}

/// A service's view of the index.
#[derive(Debug)]
pub struct IndexReader {
    pub(super) map: Mapping,
    pub(super) capacity: usize,
    pub(super) slots: usize,
}

impl IndexReader {
    /// Checks the header of a mapped index file.
    pub fn new(map: Mapping) -> Result<Self, IndexError> {
        let words = map.words();
        if words.len() <= HASHES_AT {
            return Err(IndexError::Truncated {
                capacity: 0,
                slots: 0,
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
        let slots = words[WORD_SLOTS].load(Ordering::Acquire);
        let truncated = IndexError::Truncated {
            capacity,
            slots,
            len: map.len(),
        };
        let (Ok(capacity), Ok(slots)) = (usize::try_from(capacity), usize::try_from(slots)) else {
            return Err(truncated);
        };
        let room = || words.len().checked_sub(table_at(slots));
        if slots > MAX_SLOTS as usize || capacity == 0 || room().is_none_or(|room| capacity > room) {
            return Err(truncated);
        }
        Ok(Self { map, capacity, slots })
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
            Entry::Slot(slot) if self.hash_of(slot) == Some(hash) => Some(slot),
            _ => None,
        })
    }

    /// A slot whose page has this whole-page key: 47 bits of the hash agree, the rest is for the comparison.
    pub fn slot_of_key(&self, key: Key) -> Option<Slot> {
        self.find(key, |entry| match entry {
            Entry::Slot(slot) if self.hash_of(slot).is_some_and(|hash| hash.key() == key) => Some(slot),
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
        TreeReader::new(&self.map.words()[tree_at(self.slots)..table_at(self.slots)])
    }

    /// Position in the news, to be given to [`Self::news_since`] later.
    pub fn news_position(&self) -> u64 {
        self.map.words()[WORD_NEWS].load(Ordering::Acquire)
    }

    /// Keys that entered since `position`. The writer stores a key before it counts it, so the oldest of a full ring may be
    /// the next one already: who is a whole ring behind is overrun.
    pub fn news_since(&self, position: u64) -> News {
        let head = self.news_position();
        if head < position || head - position >= NEWS_RING as u64 {
            return News::Overrun;
        }
        let keys = (position..head).filter_map(|at| Key::try_new(self.ring_word(at).load(Ordering::Acquire)));
        let keys: Vec<Key> = keys.collect();
        // The writer may have lapped us while we read.
        if self.news_position() - position >= NEWS_RING as u64 {
            News::Overrun
        } else {
            News::Keys(keys)
        }
    }

    pub(super) fn ring_word(&self, at: u64) -> &AtomicU64 {
        #[allow(clippy::cast_possible_truncation)] // < NEWS_RING
        &self.map.words()[HEADER_WORDS + (at % NEWS_RING as u64) as usize]
    }

    fn hash_of(&self, slot: Slot) -> Option<PageHash> {
        self.hash_by(slot, |word| word.load(Ordering::Acquire))
    }

    /// The words of the hash of the page in a slot, if the file has room for the slot.
    pub(super) fn hash_words(&self, slot: Slot) -> Option<&[AtomicU64]> {
        let at = slot.number() as usize;
        (at < self.slots).then(|| &self.map.words()[HASHES_AT + at * 2..][..2])
    }

    /// The hash of the page in a slot; `load` loads a word.
    pub(super) fn hash_by(&self, slot: Slot, load: impl Fn(&AtomicU64) -> u64) -> Option<PageHash> {
        let words = self.hash_words(slot)?;
        Some(PageHash(
            u128::from(load(&words[1])) << 64 | u128::from(load(&words[0])),
        ))
    }

    pub(super) fn table(&self) -> &[AtomicU64] {
        &self.map.words()[table_at(self.slots)..][..self.capacity]
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
