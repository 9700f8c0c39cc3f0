//! Answering while the service runs: what became of which pages, and changes of settings. Questions come from the
//! store, on behalf of an operator, and from the VMM's threads. They are answered between any two pieces of work.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::scan::control::{Explained, Request};
use crate::scan::pass::Scanner;
use crate::store::connection::{Question, Store};
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use std::ops::Range;
use vmm_dedup_protocol::control::{Explanation, Set, Switch};
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::key::Key;

/// Mappings that one more merged page may add.
const VMAS_PER_RUN: i64 = 2;

impl Scanner {
    /// Answers all questions there are.
    ///
    /// # Errors
    /// Those of the connection to the store.
    pub(crate) fn answer(&mut self) -> Result<(), Error> {
        for (addresses, tell) in self.control.take_questions() {
            let _ = tell.send(self.explain(addresses.as_ref()));
        }
        if let Some(store) = &mut self.store {
            store.take_pushes()?;
        }
        while let Some(question) = self.store.as_mut().and_then(|s| s.next_question()) {
            match question {
                Question::Set(set) => self.answer_set(&set)?,
                Question::Explain { serial, addresses } => {
                    let explained = self.explain(addresses.as_ref());
                    if let Some(store) = &mut self.store {
                        store.explained(serial, explained)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether something waits that the store has passed on.
    pub(crate) fn has_questions(&self) -> bool {
        self.store.as_ref().is_some_and(Store::has_questions)
    }

    fn answer_set(&mut self, set: &Set) -> Result<(), Error> {
        let done = self.control.apply(&set.settings, &self.breaker);
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        if done.is_ok() && set.settings.switch == Some(Switch::OffUnmerge) {
            // Answered when it is done.
            store.unmerging.push(set.serial);
            self.control.request(Request::Unmerge(None));
            return Ok(());
        }
        store.done(set.serial, &done)
    }

    /// Tells those who asked through the store that memory went back, or why not.
    pub(crate) fn answer_unmerged(&mut self, done: &Result<(), Error>) -> Result<(), Error> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        for serial in std::mem::take(&mut store.unmerging) {
            store.done(serial, done)?;
        }
        Ok(())
    }

    /// What became of the pages at some guest physical addresses, or of all.
    fn explain(&mut self, addresses: Option<&Range<u64>>) -> Explained {
        let ranges = match addresses {
            None => self.memory.chunks().iter().map(|c| c.pages.clone()).collect(),
            Some(addresses) => self
                .memory
                .pages_at_guest(addresses)
                .ok_or(Error::NoGuestAddresses)?,
        };
        if let (true, Some(asked)) = (ranges.is_empty(), addresses) {
            return Err(Error::NotGuestMemory {
                start: asked.start,
                end: asked.end,
            });
        }
        let mut explanation = Explanation::default();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let chunk = self.memory.chunk_of(at);
                let end = range.end.min(self.memory.chunks()[chunk].pages.end);
                self.explain_chunk(chunk, at..end, &mut explanation)?;
                at = end;
            }
        }
        explanation.pages = explanation.classes().iter().map(|(_, n)| n).sum();
        explanation.state = self.state();
        Ok((explanation, self.hindrance()))
    }

    fn explain_chunk(&mut self, chunk: usize, pages: Range<Page>, to: &mut Explanation) -> Result<(), Error> {
        let huge = self.chunks[chunk].huge;
        let populated = self.populated(&pages)?;
        for page in pages.clone() {
            let class = match self.table.get(page) {
                State::Shared(_) => &mut to.shared,
                State::Zero => &mut to.zero,
                State::Private(_) => &mut to.broken,
                State::Foreign | State::Candidate { foreign: true, .. } => &mut to.foreign,
                State::Pinned(_) => &mut to.pinned,
                State::Untracked if !populated[(page - pages.start) as usize] => &mut to.unpopulated,
                State::Seen { .. } => &mut to.huge,
                State::Untracked | State::Armed | State::Volatile if huge || self.is_probe(chunk, page) => {
                    &mut to.huge
                }
                State::Volatile => &mut to.volatile,
                State::Untracked | State::Armed => &mut to.too_new,
                State::Candidate { key, .. } => match self.has_twin(key) {
                    false => &mut to.unique,
                    true if huge => &mut to.huge,
                    true if self.vmas + VMAS_PER_RUN > self.vmas_max => &mut to.over_vmas,
                    true => &mut to.waiting,
                },
            };
            *class += 1;
        }
        Ok(())
    }

    /// Whether the index has a slot that a page with this key could map.
    fn has_twin(&self, key: Key) -> bool {
        self.index().is_some_and(|index| match key.is_full() {
            true => index.slot_of_key(key).is_some(),
            false => matches!(index.line(key), Some(Line::Sole(_) | Line::Series(_))),
        })
    }

    /// Which of some pages of one chunk hold private memory; asked only where the table does not tell.
    fn populated(&mut self, pages: &Range<Page>) -> Result<[bool; CHUNK_PAGES], Error> {
        let mut populated = [false; CHUNK_PAGES];
        if pages.clone().all(|p| self.table.get(p) != State::Untracked) {
            return Ok(populated);
        }
        let start = self.memory.address(pages.start);
        let range = start..start + pages.len() * PAGE_SIZE;
        for found in self.pagemap.populated(range).map_err(Error::Pagemap)? {
            populated[(found.start - start) / PAGE_SIZE..(found.end - start) / PAGE_SIZE].fill(true);
        }
        Ok(populated)
    }

    /// What keeps the service from merging, if something does, and what to do.
    fn hindrance(&self) -> String {
        if self.control.is_off() {
            return "merging is switched off: switch it on with `vmm-dedup set`".into();
        }
        if self.control.rests() {
            return "the VMM has paused merging, e.g. for a snapshot or migration, and will resume it".into();
        }
        if let (true, Err(error)) = (self.suspended, crate::sys::proc::check_direct_io()) {
            return format!("merging is suspended: {error}");
        }
        if self.vmas + VMAS_PER_RUN > self.vmas_max {
            return format!(
                "{} of {} mappings are in use: raise vm.max_map_count (or max_vmas) and restart the VM",
                self.vmas, self.vmas_max
            );
        }
        // Not in the way of merging, but of knowing what to split.
        self.mixed.skipped_sources().to_owned()
    }
}
