//! Keys that were sighted once: the store's biggest table, one entry for every page in the fleet that has no twin.
//!
//! Eight bytes an entry: 48 bits of key and 16 of owner (the member that sighted it, so that a dead one's
//! sightings can be swept). The keys are stored mixed (a permutation of 48 bits, keyed with a secret of the process,
//! so that a hostile service cannot aim its keys at one place). The table is in 256 shards, so that no step of it is a pass over
//! all: growing and shrinking concern a shard, and who goes is swept shard by shard.
//!
//! There are only so many entries. When all are in use, a member with less than its fair share takes the place of some of the one
//! with most, and others are not remembered: that costs them savings.
//!
//! A key that a second member sighted when the store was full is nobody's from then on ([`PASSED_OVER`]): it stays until there
//! is room again.

mod shard;

use crate::ledger::epochs::MemberId;
use shard::{SHARDS, Shard, shard_of};
use vmm_dedup_protocol::key::Key;

/// The owner of keys that were sighted again when the store was full. No member has this number.
pub(crate) const PASSED_OVER: MemberId = MemberId(u16::MAX);

/// Words that one search for such keys looks at, about.
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
    /// Nobody had it, and there is no room to remember it.
    NoRoom,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Sightings {
    shards: Vec<Shard>,
    used: usize,
    /// Most entries.
    most: usize,
    /// Entries of each owner, by its number.
    of: Vec<u64>,
    /// Owners that have entries.
    owners: usize,
    passed_over: u64,
    secret: [u64; 2],
    /// Where the next search for keys that were passed over begins: a shard, and a place in it.
    searched: (usize, usize),
}

/// The inverse of an odd number modulo 2^64: each of Newton's steps doubles the bits that are right, and an odd number is its own
/// inverse modulo 8.
fn inverse(odd: u64) -> u64 {
    (0..5).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))))
}

impl Sightings {
    /// For at most so many entries.
    pub(crate) fn new(secret: [u64; 2], most: u64) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            used: 0,
            most: usize::try_from(most).unwrap_or(usize::MAX),
            of: Vec::new(),
            owners: 0,
            passed_over: 0,
            secret,
            searched: (0, 0),
        }
    }

    /// Remembers a key, if nobody did.
    pub(crate) fn sight(&mut self, key: Key, owner: MemberId) -> Sighting {
        let mixed = self.mix(key);
        let shard = shard_of(mixed);
        if let Some(owner) = self.shards[shard].owner(mixed) {
            return Sighting::Again(owner);
        }
        if self.used >= self.most && !self.make_room(owner, shard) {
            return Sighting::NoRoom;
        }
        self.shards[shard].insert(mixed, owner);
        self.used += 1;
        self.count(owner, 1);
        Sighting::First
    }

    /// Forgets some of what the member with most sighted, for one that has less than its share. Returns whether that is so.
    fn make_room(&mut self, owner: MemberId, shard: usize) -> bool {
        let share = self.most / (self.owners + usize::from(self.of(owner) == 0)).max(1);
        if owner == PASSED_OVER || self.of(owner) >= share as u64 {
            return false;
        }
        let most = (0u16..)
            .map(MemberId)
            .zip(&self.of)
            .max_by_key(|(_, count)| **count);
        let Some((largest, _)) = most.filter(|(largest, _)| *largest != owner) else {
            return false;
        };
        (shard..SHARDS)
            .chain(0..shard)
            .any(|shard| self.sweep_shard(shard, largest) > 0)
    }

    /// Whether somebody sighted this key.
    #[cfg(test)]
    pub(crate) fn contains(&self, key: Key) -> bool {
        let mixed = self.mix(key);
        self.shards[shard_of(mixed)].owner(mixed).is_some()
    }

    /// Forgets a key if it is this owner's. Returns whether it was.
    pub(crate) fn withdraw(&mut self, key: Key, owner: MemberId) -> bool {
        let mixed = self.mix(key);
        let theirs = self.shards[shard_of(mixed)].owner(mixed) == Some(owner);
        if theirs {
            self.forget(mixed, owner);
        }
        theirs
    }

    /// Forgets a key, whoever sighted it.
    pub(crate) fn remove(&mut self, key: Key) -> Option<MemberId> {
        let mixed = self.mix(key);
        let owner = self.shards[shard_of(mixed)].owner(mixed)?;
        self.forget(mixed, owner);
        Some(owner)
    }

    /// Forgets a key of this owner's.
    fn forget(&mut self, mixed: u64, owner: MemberId) {
        self.shards[shard_of(mixed)].remove(mixed);
        self.used -= 1;
        self.count(owner, -1);
    }

    /// Keeps a key until there is room for its page, whoever withdraws it or goes.
    pub(crate) fn pass_over(&mut self, key: Key) {
        let Sighting::Again(owner) = self.sight(key, PASSED_OVER) else {
            return;
        };
        let mixed = self.mix(key);
        self.shards[shard_of(mixed)].give(mixed, PASSED_OVER);
        self.count(owner, -1);
        self.count(PASSED_OVER, 1);
    }

    /// Some keys that were passed over, at most so many. They stay. To be called again and again: a search ends at the end of the
    /// table, and the next one begins at its beginning.
    pub(crate) fn passed_over(&mut self, most: usize) -> Vec<Key> {
        if self.passed_over == 0 {
            return Vec::new();
        }
        let (mut keys, mut looked_at) = (Vec::new(), 0);
        for _ in 0..SHARDS {
            let (shard, from) = self.searched;
            looked_at += self.shards[shard].bytes() / 8;
            let (found, next) = self.shards[shard].of(PASSED_OVER, from, most - keys.len());
            keys.extend(found.into_iter().map(|mixed| self.unmix(mixed)));
            self.searched = match next {
                Some(at) => (shard, at),
                None => ((shard + 1) % SHARDS, 0),
            };
            if keys.len() == most || looked_at >= SEARCHED_AT_ONCE || self.searched == (0, 0) {
                break;
            }
        }
        keys
    }

    /// Forgets some of what a member sighted. Returns whether there is more.
    pub(crate) fn sweep_some(&mut self, owner: MemberId, step: usize) -> bool {
        if self.of(owner) > 0 && step < SHARDS {
            self.sweep_shard(step, owner);
        }
        self.of(owner) > 0
    }

    fn sweep_shard(&mut self, shard: usize, owner: MemberId) -> u64 {
        let theirs = self.shards[shard].sweep(owner);
        self.used -= usize::try_from(theirs).expect("they were in the table");
        self.count(owner, -i64::try_from(theirs).expect("likewise"));
        theirs
    }

    /// Entries of a member.
    pub(crate) fn of(&self, owner: MemberId) -> u64 {
        if owner == PASSED_OVER {
            return self.passed_over;
        }
        self.of.get(usize::from(owner.0)).copied().unwrap_or(0)
    }

    /// Adds to what an owner has.
    fn count(&mut self, owner: MemberId, n: i64) {
        if owner == PASSED_OVER {
            self.passed_over = self
                .passed_over
                .checked_add_signed(n)
                .expect("what goes was there");
            return;
        }
        let at = usize::from(owner.0);
        if self.of.len() <= at {
            self.of.resize(at + 1, 0);
        }
        let before = self.of[at];
        self.of[at] = before.checked_add_signed(n).expect("what goes was there");
        self.owners += usize::from(before == 0 && n > 0);
        self.owners -= usize::from(before > 0 && self.of[at] == 0);
    }

    /// Reads where a key will be looked for. Loads of many keys overlap, the lookups after them hit the cache.
    pub(crate) fn touch(&self, key: Key) -> u64 {
        let mixed = self.mix(key);
        self.shards[shard_of(mixed)].touch(mixed)
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }

    pub(crate) fn bytes(&self) -> usize {
        self.shards.iter().map(Shard::bytes).sum::<usize>() + self.of.len() * 8
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
}

#[cfg(test)]
mod tests {
    use super::shard::{MIN_CAPACITY, TAIL};
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const SECRET: [u64; 2] = [0x1234_5678_9abc_def0, 0x0fed_cba9_8765_4321];

    fn key(n: u64) -> Key {
        Key::try_new(n).unwrap()
    }

    fn sweep(table: &mut Sightings, owner: MemberId) {
        let steps = (0..SHARDS).take_while(|step| table.sweep_some(owner, *step));
        assert!(steps.count() < SHARDS);
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
            let (mut table, mut model) = (Sightings::new(SECRET, u64::MAX), HashMap::new());
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
                        sweep(&mut table, MemberId(o));
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
                    prop_assert_eq!(table.of(MemberId(o)), theirs);
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
        let mut table = Sightings::new(SECRET, u64::MAX);
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
        let mut table = Sightings::new(SECRET, u64::MAX);
        (0..100_000).for_each(|k| _ = table.sight(key(k), MemberId(1)));
        (0..10).for_each(|k| _ = table.sight(key(k + (1 << 47)), MemberId(2)));
        sweep(&mut table, MemberId(1));
        assert_eq!(table.len(), 10);
        assert!(table.bytes() <= 10 * (MIN_CAPACITY + TAIL) * 8 + 3 * 8);
    }

    #[test]
    fn who_fills_the_table_takes_no_more_than_what_others_leave() {
        const MOST: u64 = 100_000;
        let (greedy, modest) = (MemberId(1), MemberId(2));
        let mut table = Sightings::new(SECRET, MOST);
        (0..2 * MOST).for_each(|k| _ = table.sight(key(k), greedy));
        assert_eq!((table.of(greedy), table.len() as u64), (MOST, MOST));
        assert_eq!(table.sight(key(2 * MOST), greedy), Sighting::NoRoom);
        let theirs = |n: u64| (0..n).map(|k| key(k + (1 << 47)));
        let taken = theirs(MOST / 4).filter(|key| table.sight(*key, modest) == Sighting::First);
        assert_eq!(taken.count() as u64, MOST / 4);
        assert!(theirs(MOST / 4).all(|key| table.contains(key)));
        (0..2 * MOST).for_each(|k| _ = table.sight(key(k), greedy));
        assert!(theirs(MOST / 4).all(|key| table.contains(key)), "it keeps them");
        assert!(table.len() as u64 <= MOST);
    }
}
