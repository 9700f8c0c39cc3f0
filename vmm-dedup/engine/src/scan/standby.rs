//! Not merging: standing by, bringing everything back to private memory, and the end.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::Backing;
use crate::merge::following::Copies;
use crate::scan::control::Ending;
use crate::scan::pass::Pass;
use crate::unmerge::address_space::AddressSpace;
use std::ops::Range;

/// Tries to make pages private that writers break at the same time.
const TRIES: usize = 3;

/// Who comes first between two steps of making memory private.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// Whoever asked for it: a device, the end.
    Asker,
    /// Every call that waits; and the CPU budget is kept.
    Others,
}

impl Pass {
    /// Instead of a pass while nothing is to be merged: holds back nobody, and says that it is alive.
    pub(crate) fn standby_pass(&mut self) {
        self.note_breaks();
        self.note_unpacked();
        self.hear_hints();
        self.heed_hints_in_standby();
        self.find_store();
        if let Err(error) = self.stand_by() {
            self.lose_store(&error);
        }
        self.heard.done();
        self.report();
    }

    /// Lets go of everything that was found, and tells the store so. Pages that map slots still follow, and leave stores that are
    /// gone: they cannot be pinned for writing. So do pages whose places are empty. Copies may be pinned, and stay, since nobody has
    /// looked at direct I/O.
    pub(super) fn stand_by(&mut self) -> Result<(), Error> {
        self.drop_found();
        self.follow_in_standby();
        let vacated = match self.session.is_secure() {
            true => {
                self.follow_slots();
                self.leave_earlier_stores()
            }
            false => self.vacate_old_stores(Copies::Stay),
        };
        match vacated {
            // Whoever interrupts it is heard soon.
            Ok(()) | Err(Error::Stopped) => {}
            Err(error) => return Err(error),
        }
        // What the store had to say meanwhile.
        self.drop_found();
        while self.session.is_connected() && !self.map.outbox().is_empty() {
            self.tell_store()?;
            // What was just asked to be published.
            self.drop_found();
        }
        self.acknowledge()
    }

    /// At the end of a pass nothing is pending: lets the store free what has left the index.
    pub(super) fn acknowledge(&mut self) -> Result<(), Error> {
        debug_assert!(self.twins.is_empty());
        debug_assert!(self.map.outbox().is_empty() || !self.session.is_connected());
        self.release_retired()?;
        self.map.end_pass(self.number);
        self.session.acknowledge()?;
        // What the kernel copied out of slots that are gone are no slots.
        match self.map.counts().orphaned {
            0 if !self.keeps_earlier_slots() => self.session.take_over(),
            _ => Ok(()),
        }
    }

    /// Lets go of what was found and not merged yet. Once there are passes again it is found anew.
    pub(super) fn drop_found(&mut self) {
        let deferred = std::mem::take(&mut self.merging.deferred);
        if !deferred.twins.is_empty() {
            self.session.overrun_news();
        }
        let mut requests = self.twins.take();
        requests.extend(deferred.published);
        for request in requests {
            self.map.defer(request.page, request.publisher_ref());
            self.map.requeue(request.page);
            self.session.overrun_news();
        }
    }

    /// Brings everything back to private memory, step by step, and says so to whoever asked. `None`: a call waits that comes first, and
    /// what is not back yet has to be asked for again.
    pub(crate) fn unmerge_on_request(&mut self) -> Option<Result<(), Error>> {
        self.note_breaks();
        self.drop_found();
        let given_back = self.make_private_in_turns();
        if is_interrupted(&given_back) {
            return None;
        }
        let given_back = given_back.and(self.tell_store());
        // Zero pages depend on nobody: where memory is too short for the others they are the last to get some.
        let filled = match given_back {
            Err(Error::NotUnmerged(_)) => Ok(()),
            _ => self.fill_zeros(),
        };
        if is_interrupted(&filled) {
            return None;
        }
        let done = given_back.and(filled);
        // All of it may be merged again, once that is wanted.
        self.map.requeue_all();
        self.report();
        let told = self.answer_unmerged(&done);
        if let Err(error) = told {
            self.lose_store(&error);
        }
        Some(done)
    }

    fn all(&self) -> Range<Page> {
        0..Page::try_from(self.map.memory().end()).unwrap_or(Page::MAX)
    }

    /// Makes everything private: afterwards no page depends on the store. Pages that the kernel copied earlier are private already
    /// and stay in place.
    fn unmerge(&mut self) -> Result<(), Error> {
        let given_back = self.make_private(self.all());
        let told = self.tell_store();
        given_back.and(told)
    }

    /// Makes everything private where others come first.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`]; [`Error::Stopped`] if it was interrupted.
    fn make_private_in_turns(&mut self) -> Result<(), Error> {
        let mut waits_for_memory = true;
        for at in 0..self.map.chunks().len() {
            let pages = self.map.chunk_at(at).pages.clone();
            if !pages.clone().any(|page| self.map.backing(page).is_with_packer()) {
                continue;
            }
            waits_for_memory &= self
                .space
                .bring_chunk_back(&mut self.map, &pages, waits_for_memory);
            self.give_way(First::Others)?;
        }
        self.make_shared_private(self.all(), First::Others)
    }

    /// Gives all pages that the service made the zero page memory of their own, where others come first.
    fn fill_zeros(&mut self) -> Result<(), Error> {
        let pages = self.all();
        // Lent memory is left alone.
        let is_zero = |map: &PageMap, page| map.backing(page) == Backing::Zero && !map.is_lent(page);
        for _attempt in 0..TRIES {
            if self.map.counts().zero == 0 {
                break;
            }
            let mut rest = pages.clone();
            while let Some(run) = AddressSpace::next_run(&self.map, &rest, |page| is_zero(&self.map, page)) {
                rest.start = run.end;
                self.space.fill_zeros(&mut self.map, &mut self.account, run);
                self.give_way(First::Others)?;
            }
        }
        self.account.lap(|cpu| &mut cpu.merge);
        match pages
            .filter(|page| is_zero(&self.map, *page))
            .fold(0, |n, _| n + 1)
        {
            0 => Ok(()),
            left => Err(Error::NotUnmerged(left)),
        }
    }

    /// Makes all pages of a range private that map slots or are packed.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`].
    pub(super) fn make_private(&mut self, pages: Range<Page>) -> Result<(), Error> {
        self.space.bring_back(&mut self.map, &pages);
        self.make_shared_private(pages, First::Asker)
    }

    /// The same where what was packed is back, as far as there was memory for it.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`]; [`Error::Stopped`] if others come first and wait.
    pub(super) fn make_shared_private(&mut self, pages: Range<Page>, first: First) -> Result<(), Error> {
        let is_shared = |map: &PageMap, page| map.backing(page).maps_a_slot();
        for _attempt in 0..TRIES {
            let mut rest = pages.clone();
            while let Some(run) = AddressSpace::next_run(&self.map, &rest, |page| is_shared(&self.map, page))
            {
                rest.start = run.end;
                self.space.make_private(&mut self.map, &mut self.account, run);
                self.give_way(first)?;
            }
            self.note_breaks();
            if !pages.clone().any(|page| is_shared(&self.map, page)) {
                break;
            }
        }
        self.account.lap(|cpu| &mut cpu.merge);
        // The places of packed pages are the packer's until the kernel lets them go; the pages are there.
        let left = |page: &Page| self.map.backing(*page).is_kept_elsewhere();
        match pages.filter(left).fold(0, |n, _| n + 1) {
            0 => Ok(()),
            left => Err(Error::NotUnmerged(left)),
        }
    }

    /// Between two steps of making memory private.
    ///
    /// # Errors
    /// [`Error::Stopped`]: a call waits that comes first.
    fn give_way(&mut self, first: First) -> Result<(), Error> {
        self.show_progress();
        match first {
            First::Asker => Ok(()),
            First::Others => self.keep_budget_in_standby(),
        }
    }

    /// The end.
    pub(crate) fn finish(&mut self, ending: Ending) -> Result<(), Error> {
        self.note_breaks();
        // The rebuilding thread outlives this one for as long as there is no memory for what is packed.
        let all = self.all();
        let unmerged = match ending {
            Ending::Unmerge => self.unmerge(),
            Ending::StayShared => {
                self.space.bring_back(&mut self.map, &all);
                Ok(())
            }
            Ending::MemoryGoes => {
                self.space.bring_back(&mut self.map, &all);
                self.space.give_up_packed(&(0..usize::MAX));
                Ok(())
            }
        };
        let result = match unmerged {
            Err(error @ Error::NotUnmerged(_)) => Err(error),
            _ => Ok(()),
        };
        self.note_unpacked();
        // References of pages that were published and will not be merged any more.
        if let Err(error) = self.stand_by()
            && self.session.is_connected()
        {
            self.lose_store(&error);
        }
        self.end_registrations();
        self.ended = true;
        self.fill_stats();
        if ending == Ending::MemoryGoes {
            // Of what maps slots nothing stays, whatever it was found by.
            let _ = self.session.take_over();
        }
        // Pages that the kernel copied lie in mappings of slots which they do not show: the slots may be freed, as those
        // under a run's exceptions.
        let maps_slots =
            (self.account.stats.pages_mapped > 0 || self.keeps_slots()) && ending != Ending::MemoryGoes;
        let of_lost_stores = self.map.counts().orphaned > 0 && ending != Ending::MemoryGoes;
        if result.is_ok() && !maps_slots && !of_lost_stores {
            self.session.end_broken(self.map.memory().pages());
        }
        if let Some(mut store) = self.session.take_store() {
            let _ = store.report(&self.account.stats);
            if result.is_ok() && !maps_slots {
                store.say_goodbye();
            }
        }
        result
    }
}

/// Whether a call came first.
fn is_interrupted(done: &Result<(), Error>) -> bool {
    matches!(done, Err(Error::Stopped))
}
