//! Which candidates what entered the index lately may concern.

use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use vmm_dedup_protocol::index::News;
use vmm_dedup_protocol::key::Key;

/// Bits of the filter for each key of the news. The hot loop over all pages asks the filter first: with three of them set for a key,
/// one candidate in a hundred passes it without being concerned.
const BITS_PER_KEY: usize = 16;

/// The candidates that some news may concern.
pub(crate) fn in_news(map: &PageMap, news: &News) -> Vec<(Page, Key)> {
    let News::Keys(keys) = news else {
        return map.candidates_with(|_| true);
    };
    let keys = Keys::new(keys.iter().map(|key| key.raw()).collect());
    map.candidates_with(|raw| keys.contains(raw))
}

/// Some keys. Most that are not among them cost one load.
struct Keys {
    sorted: Vec<u64>,
    filter: Vec<u64>,
    /// The filter has a power of two of words, less one.
    mask: u64,
}

impl Keys {
    fn new(mut keys: Vec<u64>) -> Self {
        keys.sort_unstable();
        keys.dedup();
        let words = (keys.len() * BITS_PER_KEY).next_power_of_two().max(64) / 64;
        let mut these = Self {
            sorted: keys,
            filter: vec![0; words],
            mask: words as u64 - 1,
        };
        for key in &these.sorted {
            let (word, bits) = these.place(*key);
            these.filter[word] |= bits;
        }
        these
    }

    /// The word of the filter that a key belongs to, and its bits there: other bits of the key choose them.
    #[allow(clippy::cast_possible_truncation)] // a place in a vector
    fn place(&self, key: u64) -> (usize, u64) {
        let bit = |shift: u32| 1 << (key >> shift & 63);
        ((key & self.mask) as usize, bit(24) | bit(30) | bit(36))
    }

    fn contains(&self, key: u64) -> bool {
        let (word, bits) = self.place(key);
        self.filter[word] & bits == bits && self.sorted.binary_search(&key).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_contain_what_they_were_made_of_and_nothing_else(
            keys in proptest::collection::vec(0u64..2000, 0..300),
            asked in proptest::collection::vec(0u64..100_000, 0..300),
        ) {
            let these = Keys::new(keys.clone());
            for key in keys.iter().chain(&asked) {
                prop_assert_eq!(these.contains(*key), keys.contains(key));
            }
        }
    }
}
