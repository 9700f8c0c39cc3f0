//! A set-associative table that forgets what was used longest ago: TLBs and the OMT cache.

use crate::sizes::{index, number};

#[derive(Debug)]
struct Slot<V> {
    key: u64,
    used: u64,
    value: V,
}

/// Values by key. The key's low bits choose its set.
#[derive(Debug)]
pub(crate) struct LruTable<V> {
    sets: Vec<Vec<Slot<V>>>,
    ways: usize,
    clock: u64,
}

impl<V> LruTable<V> {
    /// A table; `entries` / `ways` sets.
    pub(crate) fn new(entries: usize, ways: usize) -> Self {
        Self {
            sets: (0..entries / ways).map(|_| Vec::with_capacity(ways)).collect(),
            ways,
            clock: 0,
        }
    }

    fn set(&self, key: u64) -> usize {
        index(key % number(self.sets.len()))
    }

    /// The value, which counts as used.
    pub(crate) fn get(&mut self, key: u64) -> Option<&mut V> {
        self.clock += 1;
        let (set, clock) = (self.set(key), self.clock);
        let slot = self.sets[set].iter_mut().find(|slot| slot.key == key)?;
        slot.used = clock;
        Some(&mut slot.value)
    }

    /// The value, without using it.
    pub(crate) fn peek(&mut self, key: u64) -> Option<&mut V> {
        let set = self.set(key);
        self.sets[set]
            .iter_mut()
            .find(|slot| slot.key == key)
            .map(|slot| &mut slot.value)
    }

    /// Puts in a value whose key is not there; returns what had to go.
    pub(crate) fn insert(&mut self, key: u64, value: V) -> Option<(u64, V)> {
        self.clock += 1;
        let (set, used) = (self.set(key), self.clock);
        let slots = &mut self.sets[set];
        debug_assert!(slots.iter().all(|slot| slot.key != key));
        let new = Slot { key, used, value };
        if slots.len() < self.ways {
            slots.push(new);
            return None;
        }
        let oldest = slots.iter_mut().min_by_key(|slot| slot.used)?;
        let gone = std::mem::replace(oldest, new);
        Some((gone.key, gone.value))
    }

    /// Takes a value out.
    pub(crate) fn remove(&mut self, key: u64) -> Option<V> {
        let set = self.set(key);
        let slots = &mut self.sets[set];
        let at = slots.iter().position(|slot| slot.key == key)?;
        Some(slots.swap_remove(at).value)
    }

    /// Takes all values out whose keys are wanted.
    pub(crate) fn remove_all(&mut self, wanted: impl Fn(u64) -> bool) {
        for slots in &mut self.sets {
            slots.retain(|slot| !wanted(slot.key));
        }
    }

    /// The keys.
    pub(crate) fn keys(&self) -> Vec<u64> {
        self.sets.iter().flatten().map(|slot| slot.key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_of_a_set_goes() {
        let mut table = LruTable::new(4, 2);
        // Two sets: even keys and odd ones.
        for key in [1, 2, 3] {
            assert!(table.insert(key, key * 10).is_none());
        }
        assert_eq!(table.get(1), Some(&mut 10));
        assert_eq!(table.insert(5, 50), Some((3, 30)));
        assert_eq!(table.remove(5), Some(50));
        assert_eq!(table.keys(), [2, 1]);
    }
}
