//! The states of all pages of a service, packed, and what is counted of them.

use crate::memory::bitmap::Bits;
use crate::memory::key_filter::Filter;
use crate::memory::layout::Page;
use crate::memory::page_state::{Counts, KINDS, PageState, WORTH, WORTH_SHIFT};
use crate::memory::worth::Worth;
use std::collections::BTreeSet;
use std::sync::Arc;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// States of pages by number: 8 bytes a page, in one allocation.
#[derive(Debug)]
pub(crate) struct PageTable {
    words: Vec<u64>,
    /// Pages by the kinds of their words ([`PageState::kind`]), so that a transition is counted without asking which it is. New
    /// pages are not counted: what stands here for their kind means nothing, and nobody asks for it.
    kinds: [u64; KINDS],
    /// Pages that are left alone, see [`Worth`].
    paused: u64,
    /// Pages whose addresses lie in mappings of store files, for [`discard`](mod@crate::unmerge::discard).
    in_file: Arc<Bits>,
    /// Pages that map slots of each segment.
    of_segments: Vec<u32>,
    /// How often the keys of private pages occur, once there are huge pages.
    repetition: Option<Filter>,
}

impl PageTable {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            words: vec![0; pages],
            kinds: [0; KINDS],
            paused: 0,
            in_file: Arc::new(Bits::new(pages)),
            of_segments: Vec::new(),
            repetition: None,
        }
    }

    /// Makes room for pages numbered up to `end`.
    pub(super) fn grow(&mut self, end: usize) {
        if end > self.words.len() {
            self.words.resize(end, 0);
            self.in_file = Arc::new(self.in_file.resized(end));
            self.repetition = None; // counted anew, for the new size, when the next huge page is looked at
        }
    }

    pub(super) fn in_file(&self) -> Arc<Bits> {
        self.in_file.clone()
    }

    pub(super) fn in_file_bits(&self) -> &Bits {
        &self.in_file
    }

    /// From now on counts how often keys occur. Guests without huge pages do not pay for it.
    pub(super) fn count_repetition(&mut self) {
        if self.repetition.is_none() {
            let mut filter = Filter::new(self.words.len());
            let keys = self
                .words
                .iter()
                .filter_map(|w| PageState::decode(*w).counted_key());
            keys.for_each(|key| filter.insert(key));
            self.repetition = Some(filter);
        }
    }

    /// How many pages have this key, at most; 0 if that is not counted.
    pub(super) fn repetition(&self, key: Key) -> u64 {
        self.repetition.as_ref().map_or(0, |filter| filter.count(key))
    }

    #[inline]
    pub(super) fn get(&self, page: Page) -> PageState {
        PageState::decode(self.words[page as usize])
    }

    /// See [`PageState::is_settled`].
    #[inline]
    pub(super) fn is_settled(&self, page: Page) -> bool {
        PageState::is_settled(self.words[page as usize])
    }

    /// A page's state becomes `next`. This is done for each page again and again, so it works on words.
    pub(super) fn replace(&mut self, page: Page, next: PageState) {
        let word = &mut self.words[page as usize];
        let (old, new) = (*word & !WORTH, next.encode());
        *word = new | (*word & WORTH);
        self.kinds[PageState::kind(old)] = self.kinds[PageState::kind(old)].wrapping_sub(1);
        self.kinds[PageState::kind(new)] = self.kinds[PageState::kind(new)].wrapping_add(1);
        if let Some(slot) = PageState::slot(old) {
            self.of_segments[slot.segment() as usize] -= 1;
        }
        if let Some(slot) = PageState::slot(new) {
            let at = slot.segment() as usize;
            if at >= self.of_segments.len() {
                self.of_segments.resize(at + 1, 0);
            }
            self.of_segments[at] += 1;
        }
        if let Some(filter) = &mut self.repetition {
            let old = PageState::decode(old);
            old.counted_key().into_iter().for_each(|key| filter.remove(key));
            next.counted_key().into_iter().for_each(|key| filter.insert(key));
        }
        let in_file = PageState::in_file_mapping(new);
        // Where a slot was expected it is said already.
        if PageState::in_file_mapping(old) != in_file && self.in_file.get(page) != in_file {
            self.in_file.set(page, in_file);
        }
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for (state, n) in PageState::of_each_kind().zip(self.kinds) {
            if let Some(count) = counts.of(state) {
                *count += n;
            }
        }
        counts
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // a byte of the word
    pub(super) fn worth(&self, page: Page) -> Worth {
        Worth::decode((self.words[page as usize] >> WORTH_SHIFT) as u8)
    }

    pub(super) fn set_worth(&mut self, page: Page, worth: Worth) {
        self.paused -= u64::from(self.worth(page).is_paused());
        self.paused += u64::from(worth.is_paused());
        let word = &mut self.words[page as usize];
        *word = *word & !WORTH | u64::from(worth.encode()) << WORTH_SHIFT;
    }

    /// Pages that are left alone, see [`Worth`].
    pub(super) fn paused(&self) -> u64 {
        self.paused
    }

    pub(super) fn bytes(&self) -> usize {
        let filter = self.repetition.as_ref().map_or(0, Filter::bytes);
        self.words.len() * 8 + self.of_segments.capacity() * 4 + filter
    }

    /// Pages that map slots of some segments, in order.
    pub(super) fn pages_of_segments(&self, segments: &BTreeSet<u32>) -> Vec<Page> {
        let count = |number: &u32| self.of_segments.get(*number as usize).copied().unwrap_or(0);
        if segments.iter().all(|number| count(number) == 0) {
            return Vec::new();
        }
        let is_of_them = |slot: Slot| segments.contains(&slot.segment());
        let slots = (0u32..).zip(&self.words);
        let found = slots.filter(|(_, word)| PageState::slot(**word).is_some_and(is_of_them));
        found.map(|(page, _)| page).collect()
    }

    /// Candidates whose key satisfies `pick`, in order. The hot loop over the whole table.
    pub(super) fn candidates_with(&self, mut pick: impl FnMut(u64) -> bool) -> Vec<Page> {
        let pages = (0u32..).zip(&self.words);
        let found = pages.filter(|(_, word)| PageState::candidate_key(**word).is_some_and(&mut pick));
        found.map(|(page, _)| page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::page_state::Backing;
    use crate::memory::page_state::tests::states;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_agree_with_the_table(steps in proptest::collection::vec((0u32..20, states()), 0..200)) {
            let mut table = PageTable::new(20);
            for (page, next) in steps {
                table.set_worth(page, Worth::default().shared().broken());
                table.replace(page, next);
                prop_assert!(table.worth(page).is_paused() && table.get(page) == next);
            }
            let mut counts = Counts::default();
            (0..20).for_each(|page| if let Some(n) = counts.of(table.get(page)) { *n += 1 });
            prop_assert_eq!(table.counts(), counts);
            let slot = |page: &u32| match table.get(*page).backing {
                Backing::Slot(slot) => Some(slot),
                _ => None,
            };
            for number in (0..20).filter_map(|page| slot(&page)).map(Slot::segment) {
                let pages: Vec<u32> = (0..20)
                    .filter(|page| slot(page).is_some_and(|slot| slot.segment() == number))
                    .collect();
                prop_assert_eq!(table.pages_of_segments(&BTreeSet::from([number])), pages);
            }
        }

        /// The filter counts what the table holds, whenever counting began.
        #[test]
        fn repetition_is_never_underrated(
            steps in proptest::collection::vec((0u32..20, states()), 0..100),
            begin in 0usize..100,
        ) {
            let mut table = PageTable::new(20);
            for (n, (page, next)) in steps.into_iter().enumerate() {
                if n == begin {
                    table.count_repetition();
                }
                table.replace(page, next);
            }
            table.count_repetition();
            let keys: Vec<Key> = (0..20).filter_map(|page| table.get(page).counted_key()).collect();
            for key in &keys {
                let same = keys.iter().filter(|k| *k == key).fold(0, |n, _| n + 1);
                prop_assert!(table.repetition(*key) >= same);
            }
        }
    }

    #[test]
    fn a_state_takes_eight_bytes() {
        assert_eq!(PageTable::new(1000).bytes(), 8000);
    }
}
