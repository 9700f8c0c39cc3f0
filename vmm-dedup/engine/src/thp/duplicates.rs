//! Looking at huge pages: what of them repeats, and what of that to ask the store about.
//!
//! Huge pages are not protected (a write would split them), so their keys are read again and again, with a growing
//! pause. SmartMD's repetition monitor (slide 12) tells a subpage that is likely to have a twin: its key occurs twice in
//! this VM (the counting filter), or names several pages of the trust domain (the index). That costs the store nothing,
//! so it is known of hot pages too: it is the memory given up for their speed.
//!
//! What the filter cannot know is a twin in another VM that nobody has asked about either. So of a huge page which the
//! policy would split, a quarter of the subpages is reported to the store, and those that look repeated; if twins turn
//! up, the rest follows. A huge page of unique content costs a quarter of the sightings. The quarter is chosen by content,
//! not by place: two VMs that hold the same pages at different places report the same ones.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::memory::thp_state::{Asked, Folds, SAMPLING, fold, quarter_of};
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::guest;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::track::dirty::PREFETCH;
use vmm_dedup_protocol::key::Key;

/// A subpage that was read.
struct Subpage {
    page: Page,
    quarter: usize,
    key: Key,
    zero: bool,
}

/// Whether pages with this key are of the quarter that is reported.
pub(crate) fn is_sampled(key: Key) -> bool {
    key.raw().is_multiple_of(SAMPLING as u64)
}

impl Scanner {
    /// Looks at the huge pages that are due.
    pub(crate) fn look_at_huge(&mut self) -> Result<(), Error> {
        if self.store.is_none() {
            return Ok(());
        }
        for at in 0..self.chunks.len() {
            if self.chunks[at].huge && self.chunks[at].look_due() {
                if self.mixed.policy().counts_repetition() {
                    self.table.count_repetition();
                }
                self.look_at(at)?;
                self.lap(|cpu| &mut cpu.key);
                self.breathe()?;
            }
        }
        Ok(())
    }

    fn look_at(&mut self, at: usize) -> Result<(), Error> {
        let whole = self.chunks[at].mixed.looks_at_all();
        let read = self.read_subpages(at);
        let mut folds: Folds = [None; SAMPLING];
        for subpage in &read {
            let folded = &mut folds[subpage.quarter];
            *folded = Some(fold(folded.unwrap_or(0), subpage.key));
        }
        let unchanged = self.chunks[at].looked(&folds);
        read.iter().for_each(|subpage| self.note_subpage(subpage));
        let policy = self.mixed.policy();
        let counted = |quarter: &usize| folds[*quarter].is_some() && policy.counts_repetition();
        for quarter in (0..SAMPLING).filter(counted) {
            let repeated = read
                .iter()
                .filter(|s| s.quarter == quarter && self.looks_repeated(s))
                .count();
            self.chunks[at].mixed.note_repeated(quarter, repeated);
        }
        self.chunks[at].twins = 0;
        let state = &self.chunks[at].mixed;
        let known = state.samples > 0 || !policy.watches_access();
        let wanted = self.mixed.thresholds.twins_wanted(policy, state);
        let Some(wanted) = wanted.filter(|_| unchanged && known) else {
            return Ok(());
        };
        if whole && read.len() == CHUNK_PAGES && read.iter().all(|s| s.zero) && self.give_up_zeros(at) {
            return Ok(());
        }
        if wanted == 0 {
            self.split_if_huge(self.memory.chunks()[at].pages.start); // from the next pass on it is tracked like other small pages
            return Ok(());
        }
        let repetitive = self.chunks[at].mixed.repetition() >= wanted.max(1);
        let asked = self.chunks[at].mixed.asked;
        let all = self.chunks[at].split || repetitive || !policy.counts_repetition() || asked == Asked::Whole;
        if (all || asked == Asked::Nothing) && !whole {
            // Only what was read just now may be asked about.
            self.chunks[at].look_again();
            return Ok(());
        }
        self.chunks[at].mixed.asked = if all { Asked::Whole } else { Asked::Sample };
        let mut asked = Vec::with_capacity(read.len());
        // What repeats in all of its pages may share a huge page of the store, probes and all.
        let probes = all && !self.breaker.managed();
        for subpage in read.iter().filter(|s| probes || !self.is_probe(at, s.page)) {
            if (all || is_sampled(subpage.key) || self.looks_repeated(subpage)) && self.may_ask(subpage) {
                asked.push(subpage);
            }
        }
        let (zeros, others): (Vec<&Subpage>, Vec<&Subpage>) = asked.into_iter().partition(|s| s.zero);
        self.merges.extend(zeros.iter().map(|s| Item::zero(s.page)));
        let keyed: Vec<(Page, Key)> = others.iter().map(|s| (s.page, s.key)).collect();
        self.look_up_all(&keyed)
    }

    fn read_subpages(&mut self, at: usize) -> Vec<Subpage> {
        let quarters = self.chunks[at].mixed.quarters();
        let pages = self.memory.chunks()[at].pages.clone();
        let mut read = Vec::with_capacity(pages.len());
        for (page, subpage) in pages.zip(0..) {
            let quarter = quarter_of(subpage);
            if quarters[quarter] {
                guest::prefetch_key_lines(self.memory.address(page) + PREFETCH * PAGE_SIZE);
                let (key, zero) = self.read_key(page);
                read.push(Subpage {
                    page,
                    quarter,
                    key,
                    zero,
                });
            }
        }
        read
    }

    /// Takes over a key. What the store was told of the old one is taken back.
    fn note_subpage(&mut self, subpage: &Subpage) {
        let (page, key) = (subpage.page, subpage.key);
        match self.table.get(page) {
            State::Candidate {
                key: old,
                foreign: false,
            } if !old.is_full() && old != key => {
                self.outbox.withdrawals.push(old.raw());
                self.table.set(page, State::Untracked);
                self.table.set(page, State::Seen { key });
            }
            State::Untracked | State::Zero | State::Armed | State::Volatile | State::Seen { .. } => {
                self.table.set(page, State::Seen { key });
            }
            _ => {}
        }
    }

    fn looks_repeated(&self, subpage: &Subpage) -> bool {
        let marked = || {
            self.index()
                .is_some_and(|index| index.line(subpage.key).is_some())
        };
        subpage.zero || self.table.repetition(subpage.key) > 1 || marked()
    }

    /// Whether a subpage's twin is to be looked for.
    fn may_ask(&self, subpage: &Subpage) -> bool {
        match self.table.get(subpage.page) {
            State::Seen { .. } => true,
            State::Pinned(retry) => retry.is_due(self.passes),
            _ => false,
        }
    }
}
