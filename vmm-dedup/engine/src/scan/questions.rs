//! Answering while the service runs: what became of which pages, and changes of settings. Questions come from the
//! store, on behalf of an operator, and from the VMM's threads. They are answered between any two pieces of work.

use crate::error::Error;
use crate::memory::hint::SaidOf;
use crate::memory::page_map::VMAS_PER_RUN;
use crate::merge::admission::{Admission, Terms};
use crate::scan::control::Command;
use crate::scan::explain::Explainer;
use crate::scan::pass::Pass;
use crate::store::connection::{Explained, Question, Store};
use std::ops::Range;
use vmm_dedup_protocol::control::{Explanation, Set, Switch};

impl Pass {
    /// Answers questions; a store that cannot be answered is lost.
    pub(crate) fn try_answer_questions(&mut self) {
        if let Err(error) = self.answer_questions() {
            self.lose_store(&error);
        }
    }

    /// Answers all questions there are, and shows settings that have been changed.
    ///
    /// # Errors
    /// Those of the connection to the store.
    pub(crate) fn answer_questions(&mut self) -> Result<(), Error> {
        for (addresses, tell) in self.control.take_questions() {
            let _ = tell.send(self.explain(addresses.as_ref()));
        }
        self.show_changes()?;
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

    /// Whoever looks next sees what was changed, however rare passes are.
    fn show_changes(&mut self) -> Result<(), Error> {
        if self.control.take_changed() {
            self.fill_stats();
            self.control.publish(&self.account.stats);
            self.session.report(&self.account.stats)?;
        }
        Ok(())
    }

    fn answer_set(&mut self, set: &Set) -> Result<(), Error> {
        let done = self.control.apply(&set.settings, &self.space.breaker);
        self.show_changes()?;
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
        let heals = self.merging.healer.can_heal(&self.map, self.number);
        let mut explanation = Explanation {
            heals: heals.into(),
            ..Explanation::default()
        };
        self.merging.swapped.look();
        let memory = self.map.memory();
        let mut explainer = Explainer {
            session: &self.session,
            pagemap: &mut self.space.pagemap,
            swapped: &self.merging.swapped,
            admission: Admission {
                map: &self.map,
                terms: Terms {
                    probes: self.monitor.probes(),
                    suspended: self.direct_io.refused().is_some(),
                    managed: self.space.breaker.managed(),
                    heals,
                },
            },
            deferred: self.merging.deferred.pages(),
        };
        let mut said = SaidOf::default();
        for range in ranges {
            self.map.count_said(range.clone(), &mut said);
            let mut at = range.start;
            while at < range.end {
                let chunk = memory.chunk_of(at);
                let end = range.end.min(memory.chunks()[chunk].pages.end);
                explainer.add(at..end, &mut explanation)?;
                at = end;
            }
        }
        explanation.pages = explanation.classes().iter().map(|(_, n)| n).sum();
        explanation.state = self.state();
        let way = match self.session.is_secure() {
            true => {
                "the store shares securely: idle pages count as packed, whether another VM has them or not"
            }
            false => "",
        };
        let note = [self.hindrance(), way.to_owned(), said.to_string()];
        let note: Vec<String> = note.into_iter().filter(|text| !text.is_empty()).collect();
        Ok((explanation, note.join("; ")))
    }

    /// What keeps the service from merging, if something does, and what to do.
    fn hindrance(&mut self) -> String {
        if self.control.is_off() {
            return "merging is switched off, by an operator or the VMM".into();
        }
        if self.control.stands_by() {
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
        let healer = &mut self.merging.healer;
        if copies > 0
            && !healer.can_heal(&self.map, self.number)
            && let Some(why) = healer.refused()
        {
            return format!("{copies} pages that the kernel copied on write stay private: {why}");
        }
        // Not in the way of merging, but of knowing what to split.
        self.monitor.skipped_sources()
    }
}
