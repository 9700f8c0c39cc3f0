//! Who proposes the slot of a page: the engine, if there is one ([`crate::lookup::tree_search`]), else the index
//! ([`crate::lookup::candidates`]).

use crate::error::Error;
use crate::lookup::tree_search::{BATCH, FEW, Found, Place, Searcher};
use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::proc;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

impl Scanner {
    /// Before a pass: sees to it that there is an engine, if there can be one.
    pub(crate) fn prepare_search(&mut self) {
        if let Some(store) = &self.store {
            self.searcher.prepare(store, self.passes);
        }
    }

    /// Looks for twins of pages that stood still and have these line keys.
    pub(crate) fn look_up_all(&mut self, keyed: &[(Page, Key)]) -> Result<(), Error> {
        let found = self.ask_engine(keyed, Searcher::first);
        // All proposals come before the first word to the store, which may let it reuse slots that nobody waits for.
        self.take_proposals(keyed, &found);
        for (at, (page, key)) in keyed.iter().enumerate() {
            if !matches!(found.get(at), Some(Found::Twin(_))) {
                self.look_up(*page, *key)?;
            }
        }
        Ok(())
    }

    /// Looks for twins of candidates that had none when they were sighted. Returns those whose keys are in no index.
    pub(crate) fn look_up_again(&mut self, candidates: &[(Page, Key)]) -> Vec<(Page, Key)> {
        let mut missing = Vec::new();
        let set = if candidates.len() <= FEW {
            self.slots_of(candidates)
        } else {
            Vec::new()
        };
        let found = self.ask_engine(candidates, |engine, with, pages| engine.again(with, pages, &set));
        self.take_proposals(candidates, &found);
        for (at, (page, key)) in candidates.iter().enumerate() {
            match found.get(at) {
                Some(Found::Twin(_)) => {}
                Some(Found::Changed) if !self.table.get(*page).in_file_mapping() => {
                    // To be keyed anew, once it stands still.
                    self.outbox.withdrawals.push(key.raw());
                    self.table.set(*page, State::Armed);
                    let chunk = self.memory.chunk_of(*page);
                    self.chunks[chunk].pending = true;
                }
                _ if self.find_again(*page, *key) => {}
                _ => missing.push((*page, *key)),
            }
        }
        missing
    }

    fn take_proposals(&mut self, keyed: &[(Page, Key)], found: &[Found]) {
        for ((page, _), found) in keyed.iter().zip(found) {
            if let Found::Twin(slot) = found {
                self.merges.push(Item::proposed(*page, *slot));
                self.stats.search_twins_total += 1;
            }
        }
    }

    /// Asks the engine about pages, a batch at a time; no answers without one.
    fn ask_engine(
        &mut self,
        keyed: &[(Page, Key)],
        mut ask: impl FnMut(&mut Searcher, &Place<'_>, &[Page]) -> Vec<Found>,
    ) -> Vec<Found> {
        let (Some(store), true) = (&self.store, self.searcher.is_on()) else {
            return Vec::new();
        };
        let (cpu, helpers) = (proc::thread_cpu_ns(), self.searcher.helper_cpu_ns());
        let with = Place {
            store,
            memory: &self.memory,
            pass: self.passes,
        };
        let pages: Vec<Page> = keyed.iter().map(|(page, _)| *page).collect();
        let batches = pages.chunks(BATCH);
        let found = batches
            .flat_map(|batch| ask(&mut self.searcher, &with, batch))
            .collect();
        self.stats.searches_total += pages.len() as u64;
        self.stats.cpu_ns.search += self.searcher.helper_cpu_ns() - helpers;
        self.lap_within(cpu, |cpu| &mut cpu.search);
        found
    }

    /// The slots that the index names for some keys.
    fn slots_of(&self, candidates: &[(Page, Key)]) -> Vec<Slot> {
        let slot = |(page, key): &(Page, Key)| match key.is_full() {
            true => self.index()?.slot_of_key(*key),
            false => self.index()?.line(*key)?.slot_for(*page),
        };
        let mut slots: Vec<Slot> = candidates.iter().filter_map(slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }
}
