//! Undoing merges: bringing pages back to anonymous memory, for good or before they are merged anew.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::page_size::{CHUNK_PAGES, bytes};
use std::ops::Range;

impl Scanner {
    /// Pages that still map a lost store's file go back to anonymous memory just before they are merged anew.
    pub(crate) fn bring_home(&mut self, items: &[Item]) {
        let foreign: Vec<Page> = items
            .iter()
            .map(|i| i.page)
            .filter(|p| self.table.get(*p).in_file_mapping())
            .collect();
        let mut at = 0;
        while at < foreign.len() {
            let mut end = at + 1;
            while end < foreign.len()
                && foreign[end] == foreign[end - 1] + 1
                && self.memory.adjacent(foreign[end - 1])
                && end - at < CHUNK_PAGES
            {
                end += 1;
            }
            self.restore(foreign[at]..foreign[end - 1] + 1);
            at = end;
        }
    }

    /// Makes consecutive pages of store mappings anonymous.
    pub(crate) fn restore(&mut self, pages: Range<Page>) {
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards);
        if !pages.clone().all(|p| self.table.get(p).in_file_mapping()) {
            return; // some were discarded just now; whoever wants the others back asks again
        }
        let start = self.memory.address(pages.start);
        let run = start..start + bytes(pages.len());
        let outcome = self.breaker.restore(&mut self.pagemap, &run);
        let before = self.boundaries(&pages);
        let within = |ranges: &[Range<usize>], at: usize| ranges.iter().any(|r| r.contains(&at));
        for page in pages.clone() {
            let (state, at) = (self.table.get(page), self.memory.address(page));
            let next = match (within(&outcome.anonymous, at), within(&outcome.examined, at)) {
                (true, _) => State::Untracked,
                // Examined to the end and not brought back: the kernel had copied it.
                (false, true) if outcome.error.is_none() => State::Private(state.place()),
                // Replaced by the fault thread, which will tell; or still shared.
                _ => continue,
            };
            match state {
                State::Shared(slot) => self.release(slot),
                State::Candidate { key, foreign: true } => self.outbox.withdrawals.push(key.raw()),
                _ => {}
            }
            if next != State::Untracked {
                self.stats.breaks_kernel_total += u64::from(state.maps_a_slot());
            } else {
                self.stats.breaks_managed_total += 1;
            }
            if state.may_become(next) {
                self.table.set(page, next);
            }
        }
        if let Some(error) = outcome.error {
            log::warn!(
                "cannot bring all of {} pages back to anonymous memory: {error}",
                pages.len()
            );
        }
        self.vmas += self.boundaries(&pages) - before;
    }

    /// Gives everything back: afterwards no page depends on the store. Pages that the kernel copied earlier are
    /// private already and stay in place.
    pub(crate) fn unmerge(&mut self) -> Result<(), Error> {
        let end = Page::try_from(self.memory.end()).unwrap_or(Page::MAX);
        let given_back = self.give_back(0..end);
        let told = self.flush();
        given_back.and(told)
    }

    /// Brings pages back to anonymous memory.
    pub(crate) fn give_back(&mut self, pages: Range<Page>) -> Result<(), Error> {
        let mut left = 0;
        for _attempt in 0..3 {
            self.give_back_once(&pages);
            self.note_breaks();
            let shared = |p: &Page| self.table.get(*p).maps_a_slot();
            left = pages.clone().filter(shared).fold(0, |n, _| n + 1);
            if left == 0 {
                break;
            }
        }
        self.lap(|cpu| &mut cpu.merge);
        if left > 0 {
            Err(Error::NotUnmerged(left))
        } else {
            Ok(())
        }
    }

    fn give_back_once(&mut self, pages: &Range<Page>) {
        let mut page = pages.start;
        while page < pages.end {
            if !self.table.get(page).maps_a_slot() {
                page += 1;
                continue;
            }
            let mut end = page + 1;
            while end < pages.end
                && ((end - page) as usize) < CHUNK_PAGES
                && self.memory.adjacent(end - 1)
                && self.table.get(end).maps_a_slot()
            {
                end += 1;
            }
            self.restore(page..end);
            self.show_progress();
            page = end;
        }
    }
}
