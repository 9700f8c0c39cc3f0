//! How often a key occurs: SmartMD's counting Bloom filter (USENIX ATC'17, "Monitor Repetition Rate").
//!
//! Eight counters of three bits for each small page of memory and three hash functions: 3 bytes a page, 3/2^12 of the
//! memory it watches. A counter that reached seven stays there, so that a removal never makes a key look rarer than it
//! is: an estimate is never too low, and with eight counters a page seldom too high (at full load a key that is
//! not there looks present with a probability of (1 - e^(-3/8))^3 = 3 %).

use vmm_dedup_protocol::key::Key;

/// Counters for each page.
const PER_PAGE: usize = 8;
/// Hash functions.
const HASHES: usize = 3;
/// Bits of a counter.
const BITS: usize = 3;
/// Counters in a word; its last bit stays unused.
const PER_WORD: usize = 64 / BITS;
/// Where a counter stays for good.
const FULL: u64 = (1 << BITS) - 1;

/// Counts keys of pages.
#[derive(Debug)]
pub(crate) struct Filter {
    words: Vec<u64>,
    counters: u64,
}

impl Filter {
    /// For that many pages.
    pub(crate) fn new(pages: usize) -> Self {
        // As many words as hold 24 bits a page; rounding down keeps it within 3 bytes a page.
        let words = (pages * PER_PAGE * BITS / 64).max(1);
        Self {
            words: vec![0; words],
            counters: (words * PER_WORD) as u64,
        }
    }

    /// One more page with this key.
    pub(crate) fn insert(&mut self, key: Key) {
        for at in self.places(key) {
            let value = self.get(at);
            if value < FULL {
                self.set(at, value + 1);
            }
        }
    }

    /// One page less, which must have been inserted.
    pub(crate) fn remove(&mut self, key: Key) {
        for at in self.places(key) {
            let value = self.get(at);
            if value > 0 && value < FULL {
                self.set(at, value - 1);
            }
        }
    }

    /// How many pages have this key, at most (seven stands for seven and more).
    pub(crate) fn count(&self, key: Key) -> u64 {
        self.places(key)
            .map(|at| self.get(at))
            .into_iter()
            .min()
            .unwrap_or(0)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Places of a key: `(word, shift)`. Keys are hashes already, so three mixes of one do for three functions. Two that
    /// fall on one place would count a page twice there: the later one moves to the next counter.
    #[allow(clippy::cast_possible_truncation)] // indices into memory
    fn places(&self, key: Key) -> [(usize, usize); HASHES] {
        let mut taken = [u64::MAX; HASHES];
        for hash in 0..HASHES {
            let mixed = (key.raw() ^ (hash as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            // The upper half of a product picks evenly without a division.
            let mut at = ((u128::from(mixed) * u128::from(self.counters)) >> 64) as u64;
            while taken[..hash].contains(&at) {
                at = (at + 1) % self.counters;
            }
            taken[hash] = at;
        }
        taken.map(|at| {
            let at = at as usize;
            (at / PER_WORD, at % PER_WORD * BITS)
        })
    }

    fn get(&self, (word, shift): (usize, usize)) -> u64 {
        self.words[word] >> shift & FULL
    }

    fn set(&mut self, (word, shift): (usize, usize), value: u64) {
        self.words[word] = self.words[word] & !(FULL << shift) | value << shift;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn key(n: u64) -> Key {
        Key::try_new(n.wrapping_mul(0x94d0_49bb_1331_11eb) >> 17).unwrap()
    }

    proptest! {
        /// The property that the repetition rate rests on: a twin is never overlooked.
        #[test]
        fn a_count_is_never_too_low(steps in proptest::collection::vec((0u64..40, any::<bool>()), 0..400)) {
            let mut filter = Filter::new(64);
            let mut truth: HashMap<u64, u64> = HashMap::new();
            for (n, insert) in steps {
                let there = truth.entry(n).or_default();
                if insert {
                    *there += 1;
                    filter.insert(key(n));
                } else if *there > 0 {
                    *there -= 1;
                    filter.remove(key(n));
                }
                for (n, there) in &truth {
                    prop_assert!(filter.count(key(*n)) >= (*there).min(7));
                }
            }
        }
    }

    #[test]
    fn it_takes_three_bytes_a_page() {
        for pages in [512, 4096, 1 << 20] {
            let bytes = Filter::new(pages).bytes();
            assert!(
                bytes * 4096 <= pages * 4096 * 3 && bytes + 8 > pages * 3,
                "{pages} pages: {bytes}"
            );
        }
    }

    #[test]
    fn few_unique_pages_look_repeated_at_full_load() {
        let pages = 1 << 16;
        let mut filter = Filter::new(pages);
        (0..pages as u64).for_each(|n| filter.insert(key(n)));
        let wrong = (0..pages as u64).filter(|n| filter.count(key(*n)) > 1).count();
        // Each of three counters is met by another key with probability 1 - e^(-3/8 * 64/63): 3.2 %.
        assert!(wrong < pages * 5 / 100, "{wrong} of {pages}");
    }

    #[test]
    fn what_was_removed_is_gone() {
        let mut filter = Filter::new(1024);
        (0..100).for_each(|n| filter.insert(key(n)));
        (0..100).for_each(|n| filter.remove(key(n)));
        assert!(filter.words.iter().all(|word| *word == 0));
    }
}
