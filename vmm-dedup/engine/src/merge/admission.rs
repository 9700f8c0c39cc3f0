//! What of the pages with twins may be merged: each page once, unchanged as far as we know, and of huge pages those that are
//! worth splitting.

use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::memory::thp_state::{Asked, SAMPLING};
use crate::merge::planner::runs_of;
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::guest;
use crate::sys::page_size::CHUNK_PAGES;
use crate::thp::duplicates::is_sampled;
use vmm_dedup_protocol::Slot;

/// Fewest pages of a sample, chosen by key, that tell something of a whole huge page.
const LEAST_SAMPLE: usize = CHUNK_PAGES / SAMPLING / 2;

impl Scanner {
    /// Keeps one item a page. A page may have been published twice, with two contents.
    pub(crate) fn without_doubles(&mut self, items: Vec<Item>) -> Vec<Item> {
        let mut kept: Vec<Item> = Vec::with_capacity(items.len());
        for item in items {
            if kept.last().is_some_and(|k| k.page == item.page) {
                self.disown(&item);
            } else {
                kept.push(item);
            }
        }
        kept
    }

    /// Leaves out what changed meanwhile, and huge pages with too few twins to be split.
    pub(crate) fn admit(&mut self, items: Vec<Item>) -> Vec<Item> {
        let mut admitted = Vec::with_capacity(items.len());
        let mut at = 0;
        while at < items.len() {
            let chunk = self.memory.chunk_of(items[at].page);
            let last = self.memory.chunks()[chunk].pages.end;
            let end = at + items[at..].iter().take_while(|i| i.page < last).count();
            if self.chunks[chunk].huge && !self.chunks[chunk].split {
                self.count_twins(chunk, &items[at..end]);
            }
            let admit = !self.chunks[chunk].huge || self.chunks[chunk].split;
            let as_one = !self.breaker.managed() && is_huge_page_of_store(&items[at..end]);
            for item in &items[at..end] {
                let state = self.table.get(item.page);
                let private = match state {
                    State::Untracked
                    | State::Armed
                    | State::Seen { .. }
                    | State::Volatile
                    | State::Pinned(_)
                    | State::Candidate { .. }
                    | State::Foreign => as_one || !self.is_probe(chunk, item.page),
                    State::Zero => item.slot.is_none(),
                    State::Shared(_) | State::Private(_) => false,
                };
                if admit && private {
                    admitted.push(*item);
                } else {
                    self.pass_over(item);
                }
            }
            at = end;
        }
        admitted
    }

    /// Adds to the twins that a huge page is known to have, and decides on splitting it. A line key is not enough for
    /// that: a huge page may be busy outside its key lines.
    fn count_twins(&mut self, chunk: usize, items: &[Item]) {
        let (policy, mixed) = (self.mixed.policy(), self.chunks[chunk].mixed);
        let Some(wanted) = self.mixed.thresholds.twins_wanted(policy, &mixed) else {
            return;
        };
        let sampled = mixed.asked == Asked::Sample;
        let enough = if sampled {
            wanted as usize / SAMPLING
        } else {
            wanted as usize
        }
        .max(1);
        let known = usize::from(self.chunks[chunk].twins);
        let missing = enough.saturating_sub(known);
        let found = items
            .iter()
            .filter(|item| self.looks_equal(item))
            .take(missing)
            .count();
        let likely_whole = sampled && self.is_sample_repeated(chunk, items);
        let state = &mut self.chunks[chunk];
        state.twins = u16::try_from(known + found).unwrap_or(u16::MAX);
        if known + found >= enough || likely_whole {
            // Those that were passed over before are found again at the next look.
            state.look_again();
            state.mixed.asked = Asked::Whole;
            state.mixed.likely_whole = likely_whole;
            state.split = !sampled;
        }
    }

    /// Whether all pages of a huge page that were asked about as a sample have twins.
    fn is_sample_repeated(&self, chunk: usize, items: &[Item]) -> bool {
        let in_sample = |page: Page| match self.table.get(page) {
            State::Candidate { key, foreign: false } => is_sampled(key),
            _ => false,
        };
        let asked = self.memory.chunks()[chunk]
            .pages
            .clone()
            .filter(|page| in_sample(*page));
        let twins = items.iter().filter(|item| in_sample(item.page)).count();
        twins >= LEAST_SAMPLE && asked.count() == twins
    }

    /// Whether a page that the guest may be writing seems to hold what its slot holds.
    #[allow(unsafe_code)] // reads guest memory
    fn looks_equal(&self, item: &Item) -> bool {
        let page = self.memory.address(item.page);
        match (item.slot, &self.store) {
            (None, _) => true, // it was read whole when it was keyed
            (Some(slot), Some(store)) => store
                .slot(slot)
                // SAFETY: guest memory stays mapped while the service runs, and slots are mapped.
                .is_some_and(|(_, slot)| unsafe { guest::seems_same_page(page, slot) }),
            _ => false,
        }
    }

    /// Does not merge an item for now. If it was just published its slot goes again, and with it all knowledge of the
    /// key: the page must be keyed anew to be found another time.
    pub(crate) fn pass_over(&mut self, item: &Item) {
        self.disown(item);
        if let State::Candidate { key, foreign: false } = self.table.get(item.page)
            && !item.owned()
            && self.chunks[self.memory.chunk_of(item.page)].huge
        {
            // To be found again at the next look.
            self.outbox.withdrawals.push(key.raw());
            self.table.set(item.page, State::Untracked);
        }
        if item.owned() && matches!(self.table.get(item.page), State::Candidate { foreign: false, .. }) {
            self.table.set(item.page, State::Armed);
            let chunk = self.memory.chunk_of(item.page);
            self.chunks[chunk].pending = true;
        }
    }

    /// Gives back the reference of a page that was published and is not merged.
    pub(crate) fn disown(&mut self, item: &Item) {
        if let (Some(slot), true) = (item.slot, item.owned()) {
            self.release(slot);
        }
    }
}

/// Whether items show all of what is or becomes a huge page of the store.
fn is_huge_page_of_store(items: &[Item]) -> bool {
    items.len() == CHUNK_PAGES && items[0].slot.is_some_and(Slot::begins_huge_page) && runs_of(items) == 1
}
