//! Merging what has twins, window by window, within the budgets.

use crate::error::Error;
use crate::lookup::candidates::{SIGHT_ANEW_PERIOD, SIGHT_ANEW_PERIOD_FULL};
use crate::memory::layout::Page;
use crate::memory::page_state::{Retry, State};
use crate::merge::merger::{MAX_WINDOW, Request, Take, Window};
use crate::merge::request::{Item, Open, Outcome, Role, continues};
use crate::scan::pass::Scanner;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::vma;
use crate::track::access::Use;
use std::ops::Range;
use std::time::Instant;

/// Mappings that one more merged page may add: its own, and the rest behind it.
const VMAS_PER_RUN: i64 = 2;
/// Most runs of a huge page that is taken as one.
const MOST_RUNS_AT_ONCE: usize = 8;
/// A huge page that was given back so often since somebody waited for it is merged while he waits.
const WANTED_TOO_OFTEN: u8 = 3;
/// Smallest merge window.
const MIN_WINDOW: usize = 4;
/// Pages from the first to the last of a window.
#[allow(clippy::cast_possible_truncation)] // 512
const WINDOW_SPAN: Page = MAX_WINDOW as Page;

impl Scanner {
    /// Merges everything that was collected.
    pub(crate) fn apply_merges(&mut self) -> Result<(), Error> {
        let mut items = std::mem::take(&mut self.merges);
        if self.suspended {
            self.doubt(SIGHT_ANEW_PERIOD);
            items.iter().for_each(|item| self.disown(item));
            return Ok(());
        }
        items.sort_by_key(|i| (i.page, !i.owned()));
        let items = self.without_doubles(items);
        let mut items = self.admit(items);
        self.use_series(&mut items)?;
        let mut items = self.hold_back(items);
        self.bring_home(&items);
        items.retain(|item| {
            // What could not be brought home must not be taken: it lies in a mapping of a file.
            let home = !self.table.get(item.page).in_file_mapping();
            if !home {
                self.disown(item);
            }
            home
        });
        let items = self.with_exceptions(items);
        let mut at = 0;
        let mut result = Ok(());
        while at < items.len() && result.is_ok() {
            let (end, take) = if self.is_whole_huge_page(&items[at..]) {
                let chunk = self.memory.chunk_of(items[at].page);
                let give_back = self.chunks[chunk].wanted < WANTED_TOO_OFTEN;
                (at + CHUNK_PAGES, Take::HugePage { give_back })
            } else {
                self.split_if_huge(items[at].page);
                (self.window_end(&items, at), Take::Pages)
            };
            self.merge_window(&items, at..end, take);
            at = end;
            result = self.breathe();
        }
        self.merger.clean_up();
        // An interrupted pass leaves the rest to the next one.
        let rest = items[at..].iter().filter(|item| item.role != Role::Exception);
        self.merges.extend(rest);
        self.lap(|cpu| &mut cpu.merge);
        result?;
        self.flush()
    }

    /// Splits the huge page that a page is part of. Taking the page would do that as well, and keep it away meanwhile.
    pub(crate) fn split_if_huge(&mut self, page: Page) {
        let chunk = self.memory.chunk_of(page);
        if !self.chunks[chunk].huge {
            return;
        }
        let clock = Instant::now();
        if let Err(error) = vma::split_huge_page(self.memory.address(page)) {
            log::debug!("the huge page of page {page} is split by merging: {error}");
        }
        // Whoever touches the huge page may wait for a part of that time.
        let ns = u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.stop.observe(ns);
        self.note_split(chunk);
    }

    /// A huge page becomes small ones.
    fn note_split(&mut self, chunk: usize) {
        let (policy, state) = (self.mixed.policy(), &self.chunks[chunk].mixed);
        self.stats.huge_splits_rare_total += u64::from(self.mixed.thresholds.is_used(policy, state));
        self.chunks[chunk].note_split();
        self.stats.huge_splits_total += 1;
    }

    /// Whether the first items are all pages of a huge page, and few runs: then it is taken as one. Mapping many runs would
    /// keep all of it away for too long.
    fn is_whole_huge_page(&self, items: &[Item]) -> bool {
        let chunk = self.memory.chunk_of(items[0].page);
        let pages = &self.memory.chunks()[chunk].pages;
        self.chunks[chunk].huge
            && items[0].page == pages.start
            && pages.len() == CHUNK_PAGES
            && items
                .get(CHUNK_PAGES - 1)
                .is_some_and(|last| last.page + 1 == pages.end)
            && runs_of(&items[..CHUNK_PAGES]) <= MOST_RUNS_AT_ONCE
    }

    /// How many of the items from `at` on make one window.
    fn window_end(&self, items: &[Item], at: usize) -> usize {
        let mut end = at + 1;
        while end < items.len()
            && end - at < self.window
            && (items[end].page - items[at].page) < WINDOW_SPAN
            && !self.chunks[self.memory.chunk_of(items[end].page)].huge
            && (items[end - 1].page..items[end].page).all(|p| self.memory.adjacent(p))
        {
            end += 1;
        }
        end
    }

    fn merge_window(&mut self, all: &[Item], window: Range<usize>, take: Take) {
        // No discard meets pages that are away, until the states say what became of them.
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards);
        let goes_on = |at: usize| at > 0 && at < all.len() && continues(&all[at - 1], &all[at]);
        let begun = goes_on(window.start)
            && all[window.start - 1].slot == self.table.get(all[window.start - 1].page).place();
        let open = Open {
            start: begun,
            end: goes_on(window.end),
        };
        let items = &all[window];
        let gone = |item: &Item| matches!(self.table.get(item.page), State::Untracked | State::Zero);
        if take != Take::Pages && items.iter().any(gone) {
            // Just discarded, so it is not that huge page any more.
            items.iter().for_each(|item| self.pass_over(item));
            return;
        }
        let runs = runs_of(items);
        let zero_only = items.iter().all(|i| i.slot.is_none());
        #[allow(clippy::cast_possible_wrap)] // <= MAX_WINDOW
        if !zero_only && self.vmas + runs as i64 * VMAS_PER_RUN > self.vmas_max {
            self.stats.refused_vmas_total += items.len() as u64;
            self.doubt(SIGHT_ANEW_PERIOD_FULL);
            items.iter().for_each(|item| self.pass_over(item));
            return;
        }
        let Some(store) = &self.store else { return };
        let request = Request { items, open, take };
        let merged = self
            .merger
            .merge(&self.memory, store, &self.breaker, &mut self.pagemap, &request);
        let window = match merged {
            Ok(window) => window,
            Err(error) => {
                log::warn!("{error}");
                self.stats.refused_other_total += items.len() as u64;
                self.doubt(SIGHT_ANEW_PERIOD);
                items.iter().for_each(|item| self.disown(item));
                return;
            }
        };
        self.stats.stop.observe(window.stop_ns);
        match take {
            Take::Pages => self.adapt(items.len(), window.stop_ns),
            Take::HugePage { .. } => self.note_huge(items[0].page, &window.outcomes),
        }
        let pages = items[0].page..items[items.len() - 1].page + 1;
        let before = self.boundaries(&pages);
        self.note_outcomes(items, &window);
        self.vmas += self.boundaries(&pages) - before;
        self.update_fragments(&pages);
    }

    /// What became of a huge page that was to be merged as one.
    fn note_huge(&mut self, first: Page, outcomes: &[Outcome]) {
        let (chunk, start) = (self.memory.chunk_of(first), self.memory.address(first));
        let wanted = outcomes.contains(&Outcome::Wanted);
        if outcomes.iter().any(|o| o.was_taken()) {
            self.note_split(chunk);
            let whole = outcomes.iter().all(|o| *o == Outcome::Merged);
            self.stats.huge_whole_total += u64::from(whole);
        } else if wanted && !self.pagemap.is_huge(start) {
            self.note_split(chunk); // on its way back, or it was none any more
        } else {
            self.chunks[chunk].stayed_huge();
        }
        if wanted {
            self.stats.huge_wanted_total += 1;
            let state = &mut self.chunks[chunk];
            state.wanted = state.wanted.saturating_add(1);
            state.mixed.note_use(Use::AT_ONCE);
        }
    }

    fn note_outcomes(&mut self, items: &[Item], window: &Window) {
        self.stats.bytes_read.verify += (items.len() * 2 * PAGE_SIZE) as u64;
        for (item, outcome) in items.iter().zip(&window.outcomes) {
            match (outcome, item.slot) {
                (Outcome::Merged, Some(place)) if item.role == Role::Exception => {
                    if let State::Candidate { key, .. } = self.table.get(item.page) {
                        self.outbox.withdrawals.push(key.raw());
                    }
                    self.table.set(item.page, State::Private(Some(place)));
                }
                (Outcome::Merged, Some(slot)) => {
                    self.table.set(item.page, State::Shared(slot));
                    self.stats.merges_total += 1;
                    if !item.owned() {
                        let delta = vmm_dedup_protocol::message::RefDelta {
                            slot: slot.number(),
                            delta: 1,
                        };
                        self.outbox.refs.push(delta);
                    }
                }
                (Outcome::Merged, None) => {
                    self.table.set(item.page, State::Zero);
                    self.stats.zero_merges_total += 1;
                }
                (outcome, _) => self.note_failure(item, *outcome),
            }
        }
    }

    fn note_failure(&mut self, item: &Item, outcome: Outcome) {
        self.disown(item);
        if let State::Candidate { key, .. } = self.table.get(item.page) {
            self.outbox.withdrawals.push(key.raw());
        }
        if outcome == Outcome::Different {
            self.note_collision(item);
            if item.role == Role::Proposed {
                self.searcher.note_wrong();
            }
        }
        let mut uncounted = 0;
        let counter = match outcome {
            _ if item.role == Role::Exception => &mut uncounted,
            Outcome::Wanted => &mut uncounted, // once for all of the huge page
            Outcome::Different => &mut self.stats.mismatches_total,
            Outcome::Pinned => &mut self.stats.refused_pinned_total,
            Outcome::NoVma => &mut self.stats.refused_vmas_total,
            Outcome::Absent | Outcome::NotTaken | Outcome::Refused | Outcome::Returned | Outcome::Merged => {
                &mut self.stats.refused_other_total
            }
        };
        *counter += 1;
        if outcome == Outcome::NoVma {
            // The process has fewer mappings left than we thought: not one more than we have.
            self.vmas_max = self.vmas_max.min(self.vmas);
        }
        // A page that was not moved is protected: a pinned one is tried again later, others are keyed anew. What was moved
        // came back unprotected.
        let next = match outcome {
            Outcome::Pinned => State::Pinned(Retry::after(self.table.get(item.page), self.passes)),
            Outcome::NotTaken => State::Armed,
            _ => State::Untracked,
        };
        if self.table.get(item.page).may_become(next) {
            self.table.set(item.page, next);
        }
        let chunk = self.memory.chunk_of(item.page);
        self.chunks[chunk].pending = true;
    }

    /// A page was not what its slot holds. If it has the slot's line key all the same, the key must not lead anybody to
    /// that slot again: the store marks it, and this page will be hashed. (Else it was written after it was looked up.)
    fn note_collision(&mut self, item: &Item) {
        let (key, _) = self.read_key(item.page);
        let line = self.index().and_then(|index| index.line(key));
        if item.slot.is_some() && line.and_then(|line| line.slot_for(item.page)) == item.slot {
            self.outbox.ambiguous.push(key.raw());
        }
    }

    /// Grows the window while it stays below the stop target, shrinks it when it does not.
    fn adapt(&mut self, items: usize, stop_ns: u64) {
        let target = self.config.stop_target_us * 1000;
        if stop_ns > target {
            self.window = (self.window * 3 / 4).max(MIN_WINDOW);
        } else if items == self.window && stop_ns < target * 3 / 4 {
            self.window = (self.window + self.window / 4 + 1).min(MAX_WINDOW);
        }
    }

    /// Mappings that begin between the pages of a range, and at its ends.
    pub(crate) fn boundaries(&self, pages: &Range<Page>) -> i64 {
        let pairs = pages.start.saturating_sub(1)..pages.end;
        let between = pairs.filter(|p| self.memory.adjacent(*p));
        between
            .filter(|p| !joined(self.table.get(*p), self.table.get(p + 1)))
            .fold(0, |n, _| n + 1)
    }

    /// Counts the mappings of the chunks that a range touches.
    pub(crate) fn update_fragments(&mut self, pages: &Range<Page>) {
        for at in self.memory.chunk_of(pages.start)..=self.memory.chunk_of(pages.end - 1) {
            let chunk = self.memory.chunks()[at].pages.clone();
            let fragments = self.boundaries(&chunk);
            self.chunks[at].fragments = u16::try_from(fragments).unwrap_or(u16::MAX);
        }
    }
}

/// How many runs items make.
pub(crate) fn runs_of(items: &[Item]) -> usize {
    let ends = items.windows(2).filter(|pair| !continues(&pair[0], &pair[1]));
    1 + ends.count()
}

/// Whether two neighbouring pages lie in one mapping, as far as their states tell.
fn joined(a: State, b: State) -> bool {
    match (a.place(), b.place()) {
        (Some(a), Some(b)) => a.checked_add_in_segment(1) == Some(b),
        _ => a.in_file_mapping() == b.in_file_mapping(),
    }
}
