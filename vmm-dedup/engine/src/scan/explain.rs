//! Answering while the service runs: what became of which pages, and changes of settings. Questions come from the
//! store, on behalf of an operator, and from the VMM's threads. They are answered between any two pieces of work.

use crate::error::Error;
use crate::lookup::find::twin;
use crate::memory::hint::Hint;
use crate::memory::layout::Page;
use crate::memory::page_map::VMAS_PER_RUN;
use crate::memory::page_state::{Backing, Known, PageState};
use crate::merge::admission::{Admission, Facts, Obstacle, Verdict};
use crate::scan::control::Command;
use crate::scan::pass::Pass;
use crate::store::connection::{Explained, Question, Store};
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use std::collections::HashSet;
use std::ops::Range;
use vmm_dedup_protocol::control::{Explanation, Set, Switch};
use vmm_dedup_protocol::key::Key;

impl Pass {
    /// Answers questions; a store that cannot be answered is lost.
    pub(crate) fn try_answer_questions(&mut self) {
        if let Err(error) = self.answer_questions() {
            self.lose_store(&error);
        }
    }

    /// Answers all questions there are.
    ///
    /// # Errors
    /// Those of the connection to the store.
    pub(crate) fn answer_questions(&mut self) -> Result<(), Error> {
        for (addresses, tell) in self.control.take_questions() {
            let _ = tell.send(self.explain(addresses.as_ref()));
        }
        self.session.take_pushes()?;
        while let Some(question) = self.session.store_mut().and_then(Store::next_question) {
            match question {
                Question::Set(set) => self.answer_set(&set)?,
                Question::Explain { serial, addresses } => {
                    let explained = self.explain(addresses.as_ref());
                    if let Some(store) = self.session.store_mut() {
                        store.explained(serial, explained)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether something waits that the store has passed on.
    pub(crate) fn has_questions(&self) -> bool {
        self.session.store().is_some_and(Store::has_questions)
    }

    fn answer_set(&mut self, set: &Set) -> Result<(), Error> {
        let done = self.control.apply(&set.settings, &self.space.breaker);
        let Some(store) = self.session.store_mut() else {
            return Ok(());
        };
        if done.is_ok() && set.settings.switch == Some(Switch::OffUnmerge) {
            // Answered when it is done.
            store.unmerging.push(set.serial);
            self.control.order(Command::Unmerge(None));
            return Ok(());
        }
        store.done(set.serial, &done)
    }

    /// Tells those who asked through the store that memory went back, or why not.
    pub(crate) fn answer_unmerged(&mut self, done: &Result<(), Error>) -> Result<(), Error> {
        let Some(store) = self.session.store_mut() else {
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
            None => {
                let chunks = self.map.memory().chunks().iter();
                chunks.map(|chunk| chunk.pages.clone()).collect()
            }
            Some(addresses) => {
                let pages = self.map.memory().pages_at_guest(addresses);
                pages.ok_or(Error::NoGuestAddresses)?
            }
        };
        if let (true, Some(asked)) = (ranges.is_empty(), addresses) {
            return Err(Error::NotGuestMemory {
                start: asked.start,
                end: asked.end,
            });
        }
        let heals = self.planner.healer.can_heal(&self.map, self.number);
        let mut explanation = Explanation {
            heals: heals.into(),
            ..Explanation::default()
        };
        let deferred = self.planner.deferred.pages();
        self.planner.swapped.look();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let chunk = self.map.chunk_of(at);
                let end = range.end.min(self.map.chunk_at(chunk).pages.end);
                self.explain_chunk(&deferred, chunk, at..end, &mut explanation)?;
                at = end;
            }
        }
        explanation.pages = explanation.classes().iter().map(|(_, n)| n).sum();
        explanation.state = self.state();
        Ok((explanation, self.hindrance()))
    }

    fn explain_chunk(
        &mut self,
        deferred: &HashSet<Page>,
        chunk: usize,
        pages: Range<Page>,
        to: &mut Explanation,
    ) -> Result<(), Error> {
        let populated = self.populated(&pages)?;
        let (memory, pagemap) = (self.map.memory(), &mut self.space.pagemap);
        let swapped = self.planner.swapped.out(pagemap, memory, &pages);
        for page in pages.clone() {
            let facts = Facts {
                deferred: deferred.contains(&page),
                swapped: swapped.contains((page - pages.start) as usize),
            };
            let PageState { backing, known } = self.map.state(page);
            let class = match (backing, known) {
                (Backing::Slot(_), _) => &mut to.shared,
                (Backing::Zero, _) => &mut to.zero,
                (Backing::CopiedOnWrite(_) | Backing::OrphanedCopy(_), known) => match known {
                    Known::Pinned(_) => &mut to.may_be_pinned,
                    Known::Keyed(key) | Known::Candidate(key) => {
                        self.explain_twin(page, key, facts, to, |to| &mut to.broken)
                    }
                    _ if to.heals == 1 => &mut to.broken,
                    _ => &mut to.may_be_pinned,
                },
                (Backing::OrphanedSlot(_), _) => &mut to.foreign,
                #[cfg(test)]
                (Backing::Dummy(_), _) => &mut to.waiting,
                (Backing::Private, Known::Pinned(_)) => &mut to.pinned,
                (Backing::Private, Known::Nothing) if !populated[(page - pages.start) as usize] => {
                    &mut to.unpopulated
                }
                (Backing::Private, _) if self.map.rests(page) => self.explain_rest(page, to),
                (Backing::Private, Known::Keyed(_)) => &mut to.huge,
                (Backing::Private, Known::Candidate(key)) => {
                    self.explain_twin(page, key, facts, to, |to| &mut to.unique)
                }
                (Backing::Private, known) => match known {
                    _ if self.map.chunk(chunk).huge => &mut to.huge,
                    _ if self.monitor.probes().include(&self.map, chunk, page) => &mut to.probe,
                    Known::Volatile => &mut to.volatile,
                    _ => &mut to.too_new,
                },
            };
            *class += 1;
        }
        Ok(())
    }

    /// The class of a private page that is left alone since the guest says so.
    fn explain_rest<'a>(&self, page: Page, to: &'a mut Explanation) -> &'a mut u64 {
        match self.map.hint(page).has(Hint::NEVER) {
            true => &mut to.withheld,
            false => &mut to.idle,
        }
    }

    /// The class of a page with a known key. If it has a twin, it is the verdict on merging them; else `alone`.
    fn explain_twin<'a>(
        &self,
        page: Page,
        key: Key,
        facts: Facts,
        to: &'a mut Explanation,
        alone: fn(&mut Explanation) -> &mut u64,
    ) -> &'a mut u64 {
        let Some(slot) = twin(&self.session, page, key) else {
            return alone(to);
        };
        let admission = Admission {
            monitor: &self.monitor,
            suspended: self.direct_io.refused().is_some(),
            managed: self.space.breaker.managed(),
            heals: to.heals == 1,
        };
        match admission.may_merge(&self.map, page, Some(slot), facts) {
            Verdict::Refuse(Obstacle::Guest) => self.explain_rest(page, to),
            verdict => class_of(verdict, to),
        }
    }

    /// Which of some pages of one chunk hold private memory; asked only where the map does not tell.
    fn populated(&mut self, pages: &Range<Page>) -> Result<[bool; CHUNK_PAGES], Error> {
        let unknown = |page: Page| self.map.state(page) == PageState::UNTRACKED;
        if !pages.clone().any(unknown) {
            return Ok([false; CHUNK_PAGES]);
        }
        let range = self.addresses(pages);
        let found = self
            .space
            .pagemap
            .populated(range.clone())
            .map_err(Error::Pagemap)?;
        Ok(marked(range.start, &found))
    }

    /// What keeps the service from merging, if something does, and what to do.
    fn hindrance(&mut self) -> String {
        if self.control.is_off() {
            return "merging is switched off: switch it on with `vmm-dedup set`".into();
        }
        if self.control.rests() {
            return "the VMM has paused merging, e.g. for a snapshot or migration, and will resume it".into();
        }
        if let Some(why) = self.direct_io.refused() {
            return format!("merging is suspended: {why}");
        }
        if !self.map.has_vmas_for(VMAS_PER_RUN) {
            return format!(
                "{} of {} mappings are in use: raise vm.max_map_count (or max_vmas) and restart the VM",
                self.map.vmas(),
                self.map.vmas_max()
            );
        }
        let copies = self.map.counts().copied;
        let healer = &mut self.planner.healer;
        if copies > 0
            && !healer.can_heal(&self.map, self.number)
            && let Some(why) = healer.refused()
        {
            return format!("{copies} pages that the kernel copied on write stay private: {why}");
        }
        // Not in the way of merging, but of knowing what to split.
        self.monitor.skipped_sources().to_owned()
    }
}

/// Marks the pages in some stretches, counted from the page at `start`.
fn marked(start: usize, found: &[Range<usize>]) -> [bool; CHUNK_PAGES] {
    let mut marks = [false; CHUNK_PAGES];
    for part in found {
        marks[(part.start - start) / PAGE_SIZE..(part.end - start) / PAGE_SIZE].fill(true);
    }
    marks
}

/// The class of a page that has a twin.
fn class_of(verdict: Verdict, to: &mut Explanation) -> &mut u64 {
    match verdict {
        Verdict::Merge => &mut to.waiting,
        Verdict::Refuse(Obstacle::Suspended) => &mut to.suspended,
        Verdict::Refuse(Obstacle::Changed) => &mut to.shared,
        Verdict::Refuse(Obstacle::MayBePinned) => &mut to.may_be_pinned,
        Verdict::Refuse(Obstacle::Probe) => &mut to.probe,
        Verdict::Refuse(Obstacle::Huge) => &mut to.huge,
        Verdict::Refuse(Obstacle::NoMappings) => &mut to.over_vmas,
        Verdict::Refuse(Obstacle::Deferred) => &mut to.deferred,
        Verdict::Refuse(Obstacle::SwappedOut) => &mut to.swapped,
        Verdict::Refuse(Obstacle::Guest) => &mut to.idle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_class_of_its_own() {
        let classes = [
            (Verdict::Merge, "waiting"),
            (Verdict::Refuse(Obstacle::Suspended), "suspended"),
            (Verdict::Refuse(Obstacle::Changed), "shared"),
            (Verdict::Refuse(Obstacle::MayBePinned), "may_be_pinned"),
            (Verdict::Refuse(Obstacle::Probe), "probe"),
            (Verdict::Refuse(Obstacle::Huge), "huge"),
            (Verdict::Refuse(Obstacle::NoMappings), "over_vmas"),
            (Verdict::Refuse(Obstacle::Deferred), "deferred"),
            (Verdict::Refuse(Obstacle::SwappedOut), "swapped"),
            (Verdict::Refuse(Obstacle::Guest), "idle"),
        ];
        for (verdict, class) in classes {
            let mut explanation = Explanation::default();
            *class_of(verdict, &mut explanation) += 1;
            let counted = explanation.classes().into_iter().filter(|(_, pages)| *pages > 0);
            assert_eq!(Vec::from_iter(counted), [(class, 1)]);
        }
    }
}
