//! Runs with private exceptions: one mapping over a stretch of guest pages in which a few are not shared.
//!
//! Real duplicates are scattered: a mapping for each little run would cost more kernel memory and more time than it
//! is worth. The store lays slots out as the pages of their publisher lie, short gaps included ([`Gaps`]), so a guest
//! of the same layout can map the whole stretch, with its own pages in the gaps. Such an *exception* is anonymous memory
//! inside a mapping of the store: UFFDIO_MOVE refuses it later, and nothing tells whether it is pinned, so like a page
//! that the kernel copied it is never merged again ([`State::Private`]). Therefore:
//!
//! - only pages that were keyed, have no twin and were not written become exceptions, and only after nothing new came to
//!   their chunk for some passes: the twins around them are held back so long;
//! - at most [`MOST_IN_A_ROW`] in a row, and never more exceptions than shared pages;
//! - none with managed breaks, whose promise is that every page can be merged again.

use crate::error::Error;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_state::State;
use crate::merge::request::{Item, continues};
use crate::scan::pass::Scanner;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::MAX_GAP;

/// Most exceptions in a row: copying more costs more than the mappings that they save.
const MOST_IN_A_ROW: u16 = 3;
const _: () = assert!(MOST_IN_A_ROW <= MAX_GAP);

/// Exceptions that a run of so many shared pages may have.
pub(crate) fn is_worth_it(shared: usize, exceptions: usize) -> bool {
    exceptions <= shared
}

/// The gaps between pages that are published together, as far as a run may bridge them.
#[derive(Debug, Default)]
pub(crate) struct Gaps {
    last: Option<Page>,
    pages: usize,
    skipped: usize,
}

impl Gaps {
    /// Pages to be left out before this one. Pages come in any order; those that follow each other count.
    pub(crate) fn before(&mut self, memory: &Memory, page: Page) -> u16 {
        let gap = self.last.and_then(|last| gap(memory, last, page));
        self.last = Some(page);
        match gap {
            Some(gap) if is_worth_it(self.pages, self.skipped + usize::from(gap)) => {
                self.pages += 1;
                self.skipped += usize::from(gap);
                gap
            }
            _ => {
                (self.pages, self.skipped) = (1, 0);
                0
            }
        }
    }
}

/// Pages between two, if they are few and all of one region.
fn gap(memory: &Memory, a: Page, b: Page) -> Option<u16> {
    let gap = u16::try_from(b.checked_sub(a)?.checked_sub(1)?).ok()?;
    (gap <= MOST_IN_A_ROW && (a..b).all(|page| memory.adjacent(page))).then_some(gap)
}

impl Scanner {
    /// Holds back the twins of chunks in which exceptions could make longer runs, until the chunks are ripe. They are
    /// looked up again then; what the store counts a reference for is kept.
    pub(crate) fn hold_back(&mut self, items: Vec<Item>) -> Vec<Item> {
        if self.breaker.managed() {
            return items;
        }
        let mut kept = Vec::with_capacity(items.len());
        let memory = self.memory.clone();
        for group in items.chunk_by(|a, b| memory.chunk_of(a.page) == memory.chunk_of(b.page)) {
            let at = self.memory.chunk_of(group[0].page);
            let bridges = group
                .windows(2)
                .any(|pair| self.bridge(&pair[0], &pair[1]).is_some());
            // Pages of a lost store are found by its keys only once.
            let foreign = group
                .iter()
                .any(|item| self.table.get(item.page).in_file_mapping());
            if self.chunks[at].is_ripe(self.passes) || !bridges || foreign {
                kept.extend_from_slice(group);
                continue;
            }
            self.split_if_huge(group[0].page);
            self.chunks[at].hold(self.passes);
            for item in group {
                match self.table.get(item.page) {
                    _ if item.owned() => self.held.push(*item),
                    State::Candidate { key, .. } => self.held_twins.push((item.page, key)),
                    _ => {} // keyed anew by the next pass
                }
            }
        }
        kept
    }

    /// Pages held back whose chunks are ripe are to be merged now. Twins are looked up again: nothing found in the index
    /// outlives an epoch. A key that was there was no sighting for the store any more; if it has left meanwhile (who
    /// published it gave it up as well), it must become one again, or nobody would ever be asked for the page.
    pub(crate) fn release_held(&mut self) -> Result<(), Error> {
        let is_ripe = |page: Page| self.chunks[self.memory.chunk_of(page)].is_ripe(self.passes);
        let held = std::mem::take(&mut self.held);
        let (ripe, waiting): (Vec<Item>, Vec<Item>) = held.into_iter().partition(|item| is_ripe(item.page));
        let held = std::mem::take(&mut self.held_twins);
        let (twins, waiting_twins): (Vec<_>, Vec<_>) = held.into_iter().partition(|(page, _)| is_ripe(*page));
        (self.held, self.held_twins) = (waiting, waiting_twins);
        self.merges.extend(ripe);
        let is_same = |(page, key): &(Page, Key)| {
            let now = self.table.get(*page);
            now == State::Candidate {
                key: *key,
                foreign: false,
            }
        };
        let twins: Vec<(Page, Key)> = twins.into_iter().filter(is_same).collect();
        for (page, key) in self.look_up_again(&twins) {
            self.sight(page, key)?;
        }
        Ok(())
    }

    /// Adds the exceptions that join neighbouring items to runs.
    pub(crate) fn with_exceptions(&self, items: Vec<Item>) -> Vec<Item> {
        if self.breaker.managed() {
            return items;
        }
        let mut all: Vec<Item> = Vec::with_capacity(items.len());
        let (mut shared, mut exceptions) = (0, 0);
        for item in items {
            match all.last().copied() {
                Some(last) if continues(&last, &item) => shared += 1,
                Some(last) => match self.exceptions(&last, &item) {
                    Some(between) if is_worth_it(shared, exceptions + between.len()) => {
                        shared += 1;
                        exceptions += between.len();
                        all.extend(between);
                    }
                    _ => (shared, exceptions) = (1, 0),
                },
                None => shared = 1,
            }
            all.push(item);
        }
        all
    }

    /// The pages between two items, if all of them may become exceptions now.
    fn exceptions(&self, a: &Item, b: &Item) -> Option<Vec<Item>> {
        let place = self.bridge(a, b)?;
        if !self.chunks[self.memory.chunk_of(b.page)].is_ripe(self.passes) {
            return None;
        }
        let between = a.page + 1..b.page;
        let settled = |page: Page| matches!(self.table.get(page), State::Candidate { foreign: false, .. });
        if !between.clone().all(settled) {
            return None;
        }
        let places = (1..).map_while(|n| place.checked_add_in_segment(n));
        Some(
            between
                .zip(places)
                .map(|(page, place)| Item::exception(page, place))
                .collect(),
        )
    }

    /// Whether one mapping could show both items' slots in their places, with pages between: the first one's slot.
    fn bridge(&self, a: &Item, b: &Item) -> Option<vmm_dedup_protocol::Slot> {
        let (first, last) = (a.slot?, b.slot?);
        let gap = gap(&self.memory, a.page, b.page).filter(|gap| *gap > 0)?;
        let private = (a.page + 1..b.page).all(|page| !self.table.get(page).in_file_mapping());
        (private && first.checked_add_in_segment(u32::from(gap) + 1) == Some(last)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::HostRange;
    use crate::sys::vma::Anonymous;

    #[test]
    fn gaps_are_short_and_no_more_than_the_pages() {
        let area = Anonymous::new(100).unwrap();
        let range = HostRange::try_new(area.base(), 100 * crate::sys::page_size::PAGE_SIZE).unwrap();
        let memory = Memory::new(&[range]).unwrap();
        let mut gaps = Gaps::default();
        let pages = [3, 4, 6, 7, 8, 12, 14, 15, 30, 31, 29, 31, 34];
        let found = pages.map(|page| gaps.before(&memory, page));
        //                  3  4  6  7  8  12 14 15 30 31 29 31 34
        assert_eq!(found, [0, 0, 1, 0, 0, 3, 1, 0, 0, 0, 0, 1, 0]);
    }
}
