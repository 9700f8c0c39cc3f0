//! Finding the pages of a kind among all.

use super::PageMap;
use crate::memory::layout::Page;
use crate::memory::page_state::{Backing, PageState};
use crate::sys::page_size::PAGE_SIZE;
use std::collections::BTreeSet;
use std::ops::Range;
use vmm_dedup_protocol::key::Key;

impl PageMap {
    /// Pages in mappings of stores that are gone, in order: those that map slots and were reported to the store, which knows no
    /// twin of theirs; and copies.
    pub(crate) fn orphans_without_twins(&self) -> (Vec<Page>, Vec<Page>) {
        let (mut slots, mut copies) = (Vec::new(), Vec::new());
        let pages = (0..).take(self.memory().end());
        for page in pages.filter(|page| !self.is_lent(*page)) {
            let PageState { backing, known } = self.state(page);
            match backing {
                Backing::OrphanedSlot(_) if known.candidate().is_some() => slots.push(page),
                Backing::OrphanedCopy(_) => copies.push(page),
                _ => {}
            }
        }
        (slots, copies)
    }

    /// Copies whose addresses lie in these ranges, in order; but for those in memory that is lent.
    pub(crate) fn copies_within(&self, ranges: &[Range<usize>]) -> Vec<Page> {
        let addresses = ranges.iter().flat_map(|range| range.clone().step_by(PAGE_SIZE));
        let pages = addresses.filter_map(|address| self.memory().page_at(address));
        let ours = |page: &Page| self.backing(*page).is_copied() && !self.is_lent(*page);
        pages.filter(ours).collect()
    }

    /// Pages that map slots of some segments, in order.
    pub(crate) fn pages_of_segments(&self, segments: &BTreeSet<u32>) -> Vec<Page> {
        self.pages.table().pages_of_segments(segments)
    }

    /// Candidates whose key satisfies `pick`, with their keys, in order.
    pub(crate) fn candidates_with(&self, pick: impl FnMut(u64) -> bool) -> Vec<(Page, Key)> {
        let pages = self.pages.table().candidates_with(pick).into_iter();
        pages
            .filter_map(|page| Some((page, self.known(page).candidate()?)))
            .collect()
    }
}
