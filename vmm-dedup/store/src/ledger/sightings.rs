//! Keys that were sighted once: the store's biggest table, one entry for every page in the fleet that has no twin.
//!
//! Eight bytes an entry: 48 bits of key and 16 of owner (the member that sighted it, so that a dead one's
//! sightings can be swept). The keys are stored mixed (a permutation of 48 bits, keyed with a secret of the process,
//! so that a hostile service cannot aim its keys at one place), and the place of an entry is its mixed key scaled to
//! the capacity, or the next ones. Entries are kept in order, gaps between them. So a search ends at the first
//! greater entry, deletion shifts back what stands behind its place (no tombstones), and growing is one sequential
//! pass: it can grow in small steps (a quarter) and stay between 68 and 85 % full.
//!
//! A key that a second member sighted when the store was full is nobody's from then on ([`PASSED_OVER`]): it stays until there
//! is room again.

use crate::ledger::epochs::MemberId;
use vmm_dedup_protocol::key::Key;

const MIN_CAPACITY: usize = 1 << 10;

/// Words behind the last place, so that nothing wraps around. The last one is always a gap.
const TAIL: usize = 256;

/// The owner of keys that were sighted again when the store was full. No member has this number.
pub(crate) const PASSED_OVER: MemberId = MemberId(u16::MAX);

/// Words that one search for such keys looks at.
const SEARCHED_AT_ONCE: usize = 1 << 20;

/// Multipliers of the permutation.
const FIRST: u64 = 0x9e37_79b9_7f4a_7c15;
const LAST: u64 = 0xbf58_476d_1ce4_e5b9;
const MASK: u64 = (1 << 48) - 1;

/// What a sighting says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sighting {
    /// Nobody had it; it is remembered.
    First,
    /// This member had sighted it already; its entry stays.
    Again(MemberId),
}

/// The table.
#[derive(Debug)]
pub(crate) struct Sightings {
    words: Vec<u64>,
    used: usize,
    /// Entries of each owner, by its number.
    of: Vec<u64>,
    passed_over: u64,
    secret: [u64; 2],
    /// Where the next search for keys that were passed over begins.
    searched: usize,
}

#[allow(clippy::cast_possible_truncation)] // the low 16 bits
fn owner_of(word: u64) -> MemberId {
    MemberId(word as u16)
}

/// The inverse of an odd number modulo 2^64: each of Newton's steps doubles the bits that are right, and an odd number is its own
/// inverse modulo 8.
fn inverse(odd: u64) -> u64 {
    (0..5).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))))
}

impl Sightings {
    pub(crate) fn new(secret: [u64; 2]) -> Self {
        Self {
            words: vec![0; MIN_CAPACITY + TAIL],
            used: 0,
            of: Vec::new(),
            passed_over: 0,
            secret,
            searched: 0,
        }
    }

    /// Remembers a key, if nobody did.
    pub(crate) fn sight(&mut self, key: Key, owner: MemberId) -> Sighting {
        debug_assert!(owner.0 != 0, "zero words are gaps");
        if (self.used + 1) * 20 > self.capacity() * 17 {
            self.rebuild(self.capacity() / 4 * 5, |_| true);
        }
        let mixed = self.mix(key);
        match self.find(mixed) {
            Ok(at) => Sighting::Again(owner_of(self.words[at])),
            Err(at) => {
                self.used += 1;
                *self.count_mut(owner) += 1;
                self.insert(at, mixed << 16 | u64::from(owner.0));
                Sighting::First
            }
        }
    }

    /// Whether somebody sighted this key.
    #[cfg(test)]
    pub(crate) fn contains(&self, key: Key) -> bool {
        self.find(self.mix(key)).is_ok()
    }

    /// Forgets a key if it is this owner's. Returns whether it was.
    pub(crate) fn withdraw(&mut self, key: Key, owner: MemberId) -> bool {
        match self.find(self.mix(key)) {
            Ok(at) if owner_of(self.words[at]) == owner => {
                self.delete(at);
                true
            }
            _ => false,
        }
    }

    /// Forgets a key, whoever sighted it.
    pub(crate) fn remove(&mut self, key: Key) -> Option<MemberId> {
        let at = self.find(self.mix(key)).ok()?;
        let owner = owner_of(self.words[at]);
        self.delete(at);
        Some(owner)
    }

    /// Keeps a key until there is room for its page, whoever withdraws it or goes.
    pub(crate) fn pass_over(&mut self, key: Key) {
        let Sighting::Again(owner) = self.sight(key, PASSED_OVER) else {
            return;
        };
        let at = self.find(self.mix(key)).expect("it was sighted");
        *self.count_mut(owner) -= 1;
        *self.count_mut(PASSED_OVER) += 1;
        self.words[at] |= u64::from(PASSED_OVER.0);
    }

    /// Some keys that were passed over, at most so many. They stay. To be called until there are no more.
    pub(crate) fn passed_over(&mut self, most: usize) -> Vec<Key> {
        if self.passed_over == 0 {
            return Vec::new();
        }
        if self.searched >= self.words.len() {
            self.searched = 0;
        }
        let end = self.words.len().min(self.searched + SEARCHED_AT_ONCE);
        let mut keys = Vec::new();
        while self.searched < end && keys.len() < most {
            let word = self.words[self.searched];
            if word != 0 && owner_of(word) == PASSED_OVER {
                keys.push(self.unmix(word >> 16));
            }
            self.searched += 1;
        }
        keys
    }

    /// Forgets all that a member sighted.
    pub(crate) fn sweep(&mut self, owner: MemberId) {
        let theirs = std::mem::take(self.count_mut(owner));
        if theirs > 0 {
            let left = self.used - usize::try_from(theirs).expect("they are in the table");
            self.rebuild(left / 3 * 4, |word| owner_of(word) != owner);
        }
    }

    /// Entries of a member.
    pub(crate) fn count(&self, owner: MemberId) -> u64 {
        if owner == PASSED_OVER {
            return self.passed_over;
        }
        self.of.get(usize::from(owner.0)).copied().unwrap_or(0)
    }

    fn count_mut(&mut self, owner: MemberId) -> &mut u64 {
        if owner == PASSED_OVER {
            return &mut self.passed_over;
        }
        let at = usize::from(owner.0);
        if self.of.len() <= at {
            self.of.resize(at + 1, 0);
        }
        &mut self.of[at]
    }

    /// Reads where a key will be looked for. Loads of many keys overlap, the lookups after them hit the cache.
    pub(crate) fn touch(&self, key: Key) -> u64 {
        self.words[self.home(self.mix(key))]
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.words.len() + self.of.len()) * 8
    }

    fn capacity(&self) -> usize {
        self.words.len() - TAIL
    }

    /// A permutation of the 48-bit numbers: each step can be undone.
    fn mix(&self, key: Key) -> u64 {
        let mut mixed = (key.raw() ^ self.secret[0]) & MASK;
        mixed = mixed.wrapping_mul(FIRST) & MASK;
        mixed ^= mixed >> 24;
        mixed = mixed.wrapping_mul(self.secret[1] | 1) & MASK;
        mixed ^= mixed >> 25;
        mixed = mixed.wrapping_mul(LAST) & MASK;
        mixed ^ mixed >> 24
    }

    /// The key that was mixed so. Of 48 bits, a shift by half of them or more undoes itself.
    fn unmix(&self, mixed: u64) -> Key {
        let mut key = mixed ^ mixed >> 24;
        key = key.wrapping_mul(inverse(LAST)) & MASK;
        key ^= key >> 25;
        key = key.wrapping_mul(inverse(self.secret[1] | 1)) & MASK;
        key ^= key >> 24;
        key = key.wrapping_mul(inverse(FIRST)) & MASK;
        Key::try_new((key ^ self.secret[0]) & MASK).expect("it has 48 bits")
    }

    /// Where an entry belongs.
    #[allow(clippy::cast_possible_truncation)] // < capacity
    fn home(&self, mixed: u64) -> usize {
        ((u128::from(mixed) * self.capacity() as u128) >> 48) as usize
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
        unreachable!("the last word is a gap")
    }

    /// Puts a word here and what follows one place further, up to the next gap.
    fn insert(&mut self, at: usize, word: u64) {
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

    fn delete(&mut self, mut at: usize) {
        *self.count_mut(owner_of(self.words[at])) -= 1;
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const SECRET: [u64; 2] = [0x1234_5678_9abc_def0, 0x0fed_cba9_8765_4321];

    fn key(n: u64) -> Key {
        Key::try_new(n).unwrap()
    }

    #[derive(Clone, Debug)]
    enum Step {
        Sight(u64, u16),
        Withdraw(u64, u16),
        Remove(u64),
        Sweep(u16),
        PassOver(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (keys, owners) = (0u64..3000, 1u16..4);
        let step = prop_oneof![
            20 => (keys.clone(), owners.clone()).prop_map(|(k, o)| Step::Sight(k, o)),
            5 => (keys.clone(), owners.clone()).prop_map(|(k, o)| Step::Withdraw(k, o)),
            2 => keys.prop_map(Step::Remove),
            1 => owners.prop_map(Step::Sweep),
            3 => (0u64..3000).prop_map(Step::PassOver),
        ];
        proptest::collection::vec(step, 0..4000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_like_a_map(steps in steps()) {
            let (mut table, mut model) = (Sightings::new(SECRET), HashMap::new());
            for step in steps {
                match step {
                    Step::Sight(k, o) => {
                        let expected = model.get(&k).map_or(Sighting::First, |o| Sighting::Again(MemberId(*o)));
                        prop_assert_eq!(table.sight(key(k), MemberId(o)), expected);
                        model.entry(k).or_insert(o);
                    }
                    Step::Withdraw(k, o) => {
                        let theirs = model.get(&k) == Some(&o);
                        prop_assert_eq!(table.withdraw(key(k), MemberId(o)), theirs);
                        if theirs {
                            model.remove(&k);
                        }
                    }
                    Step::Remove(k) => {
                        prop_assert_eq!(table.remove(key(k)), model.remove(&k).map(MemberId));
                    }
                    Step::Sweep(o) => {
                        table.sweep(MemberId(o));
                        model.retain(|_, owner| *owner != o);
                    }
                    Step::PassOver(k) => {
                        table.pass_over(key(k));
                        model.insert(k, PASSED_OVER.0);
                    }
                }
                prop_assert_eq!(table.len(), model.len());
                for o in [1, 2, 3, PASSED_OVER.0] {
                    let theirs = model.values().filter(|owner| **owner == o).count() as u64;
                    prop_assert_eq!(table.count(MemberId(o)), theirs);
                }
            }
            for k in 0..3000 {
                prop_assert_eq!(table.contains(key(k)), model.contains_key(&k));
            }
            let mut passed_over: Vec<u64> = model.iter().filter(|(_, o)| **o == PASSED_OVER.0).map(|(k, _)| *k).collect();
            let mut found = Vec::new();
            while found.len() < passed_over.len() {
                found.extend(table.passed_over(7).into_iter().map(Key::raw));
            }
            found.sort_unstable();
            passed_over.sort_unstable();
            prop_assert_eq!(found, passed_over);
        }
    }

    #[test]
    fn an_entry_costs_no_more_than_eleven_bytes_on_average() {
        let mut table = Sightings::new(SECRET);
        let (mut sum, mut n) = (0.0, 0.0);
        for k in 0..500_000u64 {
            table.sight(key((k * 0x1_0001) & 0xffff_ffff_ffff), MemberId(1));
            if k > 5000 {
                #[allow(clippy::cast_precision_loss)]
                let per_entry = table.bytes() as f64 / table.len() as f64;
                (sum, n) = (sum + per_entry, n + 1.0);
            }
        }
        assert!(sum / n <= 11.0, "{} bytes", sum / n);
    }

    #[test]
    fn what_was_swept_gives_its_memory_back() {
        let mut table = Sightings::new(SECRET);
        (0..100_000).for_each(|k| _ = table.sight(key(k), MemberId(1)));
        (0..10).for_each(|k| _ = table.sight(key(k + (1 << 47)), MemberId(2)));
        table.sweep(MemberId(1));
        assert_eq!((table.len(), table.bytes()), (10, (MIN_CAPACITY + TAIL + 3) * 8));
    }
}
