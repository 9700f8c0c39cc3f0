//! Pages that have moved in the store: this guest's mappings follow, so that what is left of their old segments can go.

use crate::error::Error;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Page;
use crate::memory::page_state::Backing;
use crate::merge::follower::{self, Followed};
use crate::merge::run::Outcome;
use crate::scan::pass::Pass;
use crate::store::connection::Store;
use crate::sys::page_size::PAGE_SIZE;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time for following in each period of rest.
const RESTING: Duration = Duration::from_millis(20);

impl Pass {
    /// Lets pages map the slots that theirs have moved to, within the CPU budget.
    pub(super) fn follow_moves(&mut self) -> Result<(), Error> {
        let pages = self.pages_to_follow();
        let mut at = 0;
        while let Some(len) = self.follow_some(&pages[at..]) {
            at += len;
            self.account.lap(|cpu| &mut cpu.merge);
            self.tell_store_of_many()?;
            self.yield_and_poll()?;
        }
        Ok(())
    }

    /// The same while nothing is merged: what takes longer than [`RESTING`] waits for the next time.
    pub(super) fn follow_while_resting(&mut self) {
        let (pages, start) = (self.pages_to_follow(), Instant::now());
        let mut at = 0;
        while start.elapsed() < RESTING
            && let Some(len) = self.follow_some(&pages[at..])
        {
            at += len;
        }
        self.account.lap(|cpu| &mut cpu.merge);
    }

    /// Pages that map slots of segments whose pages have moved.
    fn pages_to_follow(&self) -> Vec<Page> {
        let store = self.session.store();
        store.map_or_else(Vec::new, |store| self.map.pages_of_segments(store.evacuated()))
    }

    /// Lets some of the pages follow, from the first on: how many were looked at; `None` if there are none.
    fn follow_some(&mut self, pages: &[Page]) -> Option<usize> {
        let store = self.session.store().filter(|_| !pages.is_empty())?;
        // No discard meets frozen pages, until the states say what became of them.
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        self.space.take_broken(&mut self.map, &mut self.account);
        // Forwards are read only now: what they name is mapped before the store is told anything.
        let request = |page: &Page| match self.map.backing(*page) {
            Backing::Slot(slot) => Some(MergeRequest::twin_of(*page, store.forward(slot)?)),
            _ => None,
        };
        let looked_at = pages.len().min(follower::MOST_PAGES);
        let requests: Vec<MergeRequest> = pages[..looked_at].iter().filter_map(request).collect();
        if requests.is_empty() {
            return Some(looked_at);
        }
        let memory = self.map.memory().clone();
        let batch = &requests[..follower::batch_len(&memory, &requests)];
        let Followed { outcomes, stall_ns } = follower::follow(&memory, store, &mut self.space, batch);
        self.account.stats.stop.observe(stall_ns);
        self.account.stats.bytes_read.verify += (batch.len() * 2 * PAGE_SIZE) as u64;
        for (request, outcome) in batch.iter().zip(outcomes) {
            self.note_followed(request, outcome);
        }
        let done = batch.len() < requests.len();
        let last = batch[batch.len() - 1].page;
        Some(if done {
            pages.partition_point(|page| *page <= last)
        } else {
            looked_at
        })
    }

    fn note_followed(&mut self, request: &MergeRequest, outcome: Outcome) {
        match (outcome, request.slot) {
            (Outcome::Merged, Some(slot)) => self.map.follow(request.page, slot),
            (Outcome::Absent, _) => {
                self.space
                    .note_copied(&mut self.map, &mut self.account, request.page);
            }
            (Outcome::Different, _) => self.account.stats.mismatches_total += 1,
            (Outcome::NoVma, _) => {
                self.account.stats.refused_vmas_total += 1;
                self.map.no_vma_is_left(self.number);
            }
            _ => {}
        }
    }

    /// Gives up segments that went. Nothing that was looked up is pending, and all was told.
    pub(super) fn release_retired(&mut self) -> Result<(), Error> {
        let retired = |store: &Store| store.retired().iter().map(|segment| segment.number).collect();
        let numbers: BTreeSet<u32> = self.session.store().map(retired).unwrap_or_default();
        if numbers.is_empty() {
            return Ok(());
        }
        // Found while the index had them, and mapped after their segments had gone.
        let late = self.map.pages_of_segments(&numbers);
        if !late.is_empty() {
            self.space
                .make_all_private(&mut self.map, &mut self.account, &late);
            self.tell_store()?;
        }
        if self.map.pages_of_segments(&numbers).is_empty() {
            self.session.release_unmapped()?;
        }
        Ok(())
    }
}
