//! A part of the table of sightings, for keys that begin alike: so that growing, shrinking and sweeping are short.
//!
//! The place of an entry is its mixed key scaled to the capacity, or the next ones. Entries are kept in order, gaps between
//! them. So a search ends at the first greater entry, deletion shifts back what stands behind its place (no tombstones), and
//! growing is one sequential pass: it can grow in small steps (a quarter) and stay between 68 and 85 % full.

use crate::ledger::epochs::MemberId;

/// Bits of a mixed key that say which shard it belongs to, and how many are left.
const SHARD_BITS: u32 = 8;
const REST_BITS: u32 = 48 - SHARD_BITS;

/// How many shards there are.
pub(super) const SHARDS: usize = 1 << SHARD_BITS;

pub(super) const MIN_CAPACITY: usize = 64;

/// Words behind the last place, so that nothing wraps around. The last one is always a gap.
pub(super) const TAIL: usize = 16;

/// Which shard a mixed key belongs to.
#[allow(clippy::cast_possible_truncation)] // 8 bits
pub(super) fn shard_of(mixed: u64) -> usize {
    (mixed >> REST_BITS) as usize
}

#[allow(clippy::cast_possible_truncation)] // the low 16 bits
fn owner_of(word: u64) -> MemberId {
    MemberId(word as u16)
}

/// Entries: 48 bits of mixed key, 16 of owner. It has no memory until it has an entry.
#[derive(Debug, Default)]
pub(super) struct Shard {
    words: Vec<u64>,
    used: usize,
}

impl Shard {
    pub(super) fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Reads where a key will be looked for.
    pub(super) fn touch(&self, mixed: u64) -> u64 {
        self.words.get(self.home(mixed)).copied().unwrap_or(0)
    }

    /// Who sighted a key.
    pub(super) fn owner(&self, mixed: u64) -> Option<MemberId> {
        Some(owner_of(self.words[self.find(mixed).ok()?]))
    }

    /// Adds a key that it does not have.
    pub(super) fn insert(&mut self, mixed: u64, owner: MemberId) {
        debug_assert!(owner.0 != 0, "zero words are gaps");
        if (self.used + 1) * 20 > self.capacity() * 17 {
            self.rebuild(self.capacity() / 4 * 5, |_| true);
        }
        if let Err(at) = self.find(mixed) {
            self.used += 1;
            self.put(at, mixed << 16 | u64::from(owner.0));
        }
    }

    /// Gives a key that it has to another owner.
    pub(super) fn give(&mut self, mixed: u64, owner: MemberId) {
        if let Ok(at) = self.find(mixed) {
            self.words[at] = mixed << 16 | u64::from(owner.0);
        }
    }

    /// Forgets a key.
    pub(super) fn remove(&mut self, mixed: u64) {
        let Ok(mut at) = self.find(mixed) else { return };
        loop {
            let next = self.words[at + 1];
            if next == 0 || self.home(next >> 16) > at {
                break;
            }
            self.words[at] = next;
            at += 1;
        }
        self.words[at] = 0;
        self.used -= 1;
        if self.capacity() > MIN_CAPACITY && self.used < self.capacity() / 3 {
            self.rebuild(self.used / 3 * 4, |_| true);
        }
    }

    /// Forgets what a member sighted; how much that was.
    pub(super) fn sweep(&mut self, owner: MemberId) -> u64 {
        let theirs = self.words.iter().filter(|word| owner_of(**word) == owner);
        let theirs = theirs.count();
        if theirs > 0 {
            self.rebuild((self.used - theirs) / 3 * 4, |word| owner_of(word) != owner);
        }
        if self.used == 0 {
            self.words = Vec::new();
        }
        theirs as u64
    }

    /// The mixed keys of an owner, from a place on, at most so many. Returns the place to go on at, if there may be more.
    pub(super) fn of(&self, owner: MemberId, from: usize, most: usize) -> (Vec<u64>, Option<usize>) {
        let mut keys = Vec::new();
        for (at, word) in self.words.iter().enumerate().skip(from) {
            if keys.len() == most {
                return (keys, Some(at));
            }
            if *word != 0 && owner_of(*word) == owner {
                keys.push(word >> 16);
            }
        }
        (keys, None)
    }

    fn capacity(&self) -> usize {
        self.words.len().saturating_sub(TAIL)
    }

    /// Where an entry belongs.
    #[allow(clippy::cast_possible_truncation)] // < capacity
    fn home(&self, mixed: u64) -> usize {
        let rest = mixed & ((1 << REST_BITS) - 1);
        ((u128::from(rest) * self.capacity() as u128) >> REST_BITS) as usize
    }

    /// Where the entry is, or where it would be.
    fn find(&self, mixed: u64) -> Result<usize, usize> {
        let home = self.home(mixed);
        for (at, word) in (home..).zip(&self.words[home..]) {
            if word >> 16 >= mixed || *word == 0 {
                return if *word != 0 && word >> 16 == mixed {
                    Ok(at)
                } else {
                    Err(at)
                };
            }
        }
        Err(0) // It is empty: else the last word is a gap.
    }

    /// Puts a word here and what follows one place further, up to the next gap.
    fn put(&mut self, at: usize, word: u64) {
        let mut carried = word;
        for place in &mut self.words[at..] {
            let next = std::mem::replace(place, carried);
            if next == 0 {
                break;
            }
            carried = next;
        }
        if self.words.last().is_some_and(|last| *last != 0) {
            self.rebuild(self.capacity() / 4 * 5, |_| true);
        }
    }

    /// Moves what is to be kept, in order, to a table of this capacity, or a bigger one in the unlikely case that too
    /// many entries meet at its end.
    fn rebuild(&mut self, capacity: usize, keep: impl Fn(u64) -> bool) {
        let mut capacity = capacity.max(MIN_CAPACITY);
        let old = std::mem::take(&mut self.words);
        'again: loop {
            self.words = vec![0; capacity + TAIL];
            self.used = 0;
            let mut next = 0;
            for word in old.iter().copied().filter(|word| *word != 0 && keep(*word)) {
                let at = self.home(word >> 16).max(next);
                if at + 1 == self.words.len() {
                    capacity *= 2;
                    continue 'again;
                }
                self.words[at] = word;
                self.used += 1;
                next = at + 1;
            }
            return;
        }
    }
}
