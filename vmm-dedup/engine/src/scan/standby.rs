//! Not merging: standing by, bringing everything back to private memory, and the end.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::merge::following::Copies;
use crate::scan::control::Ending;
use crate::scan::pass::Pass;
use crate::unmerge::address_space::AddressSpace;
use std::ops::Range;

/// Tries to make pages private that writers break at the same time.
const TRIES: usize = 3;

impl Pass {
    /// Instead of a pass while nothing is to be merged: holds back nobody, and says that it is alive.
    pub(crate) fn standby_pass(&mut self) {
        self.note_breaks();
        self.note_unpacked();
        self.hear_hints();
        self.heed_hints_in_standby();
        self.session.find_store(&mut self.map);
        if let Err(error) = self.stand_by() {
            self.lose_store(&error);
        }
        self.heard.done();
        self.report();
    }

    /// Lets go of everything that was found, and tells the store so. Pages that map slots still follow, and leave stores that are
    /// gone: they cannot be pinned for writing. Copies may be, and stay, since nobody has looked at direct I/O.
    pub(super) fn stand_by(&mut self) -> Result<(), Error> {
        self.drop_found();
        self.follow_in_standby();
        match self.vacate_old_stores(Copies::Stay) {
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
        self.session.acknowledge()
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

    /// Brings everything back to private memory, and says so to whoever asked.
    pub(crate) fn unmerge_on_request(&mut self) -> Result<(), Error> {
        self.note_breaks();
        self.drop_found();
        let done = self.unmerge();
        // All of it may be merged again, once that is wanted.
        self.map.requeue_all();
        self.report();
        let told = self.answer_unmerged(&done);
        if let Err(error) = told {
            self.lose_store(&error);
        }
        done
    }

    /// Makes everything private: afterwards no page depends on the store. Pages that the kernel copied earlier are private
    /// already and stay in place.
    fn unmerge(&mut self) -> Result<(), Error> {
        let end = Page::try_from(self.map.memory().end()).unwrap_or(Page::MAX);
        let given_back = self.make_private(0..end);
        let told = self.tell_store();
        given_back.and(told)
    }

    /// Makes all pages of a range private that map slots or are packed.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`].
    pub(super) fn make_private(&mut self, pages: Range<Page>) -> Result<(), Error> {
        self.space.bring_back(&mut self.map, &pages);
        self.make_shared_private(pages)
    }

    /// The same where what was packed is back, as far as there was memory for it.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`].
    pub(super) fn make_shared_private(&mut self, pages: Range<Page>) -> Result<(), Error> {
        for _attempt in 0..TRIES {
            let mut rest = pages.clone();
            while let Some(run) = AddressSpace::next_shared(&self.map, &rest) {
                rest.start = run.end;
                self.space.make_private(&mut self.map, &mut self.account, run);
                self.show_progress();
            }
            self.note_breaks();
            if AddressSpace::next_shared(&self.map, &pages).is_none() {
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

    /// The end.
    pub(crate) fn finish(&mut self, ending: Ending) -> Result<(), Error> {
        self.note_breaks();
        // The rebuilding thread outlives this one for as long as there is no memory for what is packed.
        let all = 0..Page::try_from(self.map.memory().end()).unwrap_or(Page::MAX);
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
        // References of pages that were published and will not be merged any more. What cannot be told to the store ends
        // with this process.
        let _ = self.stand_by();
        self.end_registrations();
        self.ended = true;
        self.fill_stats();
        if let Some(mut store) = self.session.take_store() {
            let _ = store.report(&self.account.stats);
            // Pages that the kernel copied lie in mappings of slots which they do not show: the slots may be freed, as those
            // under a run's exceptions.
            let maps_slots = self.account.stats.pages_mapped > 0 && ending != Ending::MemoryGoes;
            if result.is_ok() && !maps_slots {
                store.say_goodbye();
            }
        }
        result
    }
}
