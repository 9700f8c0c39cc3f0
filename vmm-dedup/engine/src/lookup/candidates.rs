//! Which candidates what entered the index lately may concern.

use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use std::collections::HashSet;
use vmm_dedup_protocol::index::News;
use vmm_dedup_protocol::key::Key;

/// Bits of a filter that most keys do not pass: the hot loop over all pages asks it first.
const FILTER_BITS: u64 = 65_536;

/// The candidates that some news may concern.
pub(crate) fn in_news(map: &PageMap, news: &News) -> Vec<(Page, Key)> {
    let News::Keys(keys) = news else {
        return map.candidates_with(|_| true);
    };
    let mut filter = vec![0u64; (FILTER_BITS / 64) as usize];
    let bit = |raw: u64| ((raw % FILTER_BITS / 64) as usize, 1u64 << (raw % 64));
    for key in keys {
        let (word, mask) = bit(key.raw());
        filter[word] |= mask;
    }
    let keys: HashSet<u64> = keys.iter().map(|key| key.raw()).collect();
    map.candidates_with(|raw| {
        let (word, mask) = bit(raw);
        filter[word] & mask != 0 && keys.contains(&raw)
    })
}
