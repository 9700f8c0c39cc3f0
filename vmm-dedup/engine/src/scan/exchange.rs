//! Candidates > found: what a pass has learnt is exchanged with the store, and what comes of it is merged.

use crate::error::Error;
use crate::lookup::candidates;
use crate::scan::pass::{MAX_FOUND, Pass};
use crate::store::session::ResyncCause;
use vmm_dedup_protocol::index::News;
use vmm_dedup_protocol::message::MAX_BATCH;

/// How often a pass looks at the news. The next pass sees the rest: a store, or a service that has it told of the same keys again and
/// again, must not keep this one from its end.
const LOOKS_AT_NEWS: u32 = 256;

impl Pass {
    /// Works until there is nothing left to tell, hash, publish or merge; or until merging is suspended.
    pub(super) fn exchange(&mut self) -> Result<(), Error> {
        self.follow_moves()?;
        self.vacate_files()?;
        self.take_quiesced();
        self.resync()?;
        let mut looks = LOOKS_AT_NEWS;
        loop {
            self.tell_store()?;
            if looks > 0 {
                looks -= 1;
                self.take_news();
            }
            self.account.lap(|cpu| &mut cpu.store);
            self.yield_and_poll()?;
            if self.finder.has_pages_to_hash() && self.found.len() < MAX_FOUND {
                let (map, session, account) = (&mut self.map, &self.session, &mut self.account);
                let found = self.finder.hash_some(map, session, account, self.number);
                self.found.extend(found);
                self.account.lap(|cpu| &mut cpu.hash);
            } else if !self.found.is_empty() && !self.direct_io.glance() {
                // Until it is looked at again, with the next pass, nothing can be done about what was found.
                return self.stand_by();
            } else if !self.found.is_empty() {
                self.merge()?;
            } else if self.map.outbox().is_empty() {
                break;
            }
        }
        self.acknowledge()
    }

    /// Found > admitted > merged.
    pub(super) fn merge(&mut self) -> Result<(), Error> {
        let found = std::mem::take(&mut self.found);
        let suspended = !self.direct_io.glance();
        let (planner, mut with) = self.planning();
        planner.admit(&mut with, suspended, found)?;
        planner.prepare(&mut with);
        let mut result = Ok(());
        // What is left once merging is suspended comes back, for `exchange` to let go of.
        while result.is_ok() && self.direct_io.glance_again() && {
            let (planner, mut with) = self.planning();
            planner.step(&mut with)
        } {
            result = self.yield_and_poll();
        }
        let wrong = self.planner.take_wrong_proposals();
        self.finder.search_mut().note_wrong(wrong);
        // An interrupted pass leaves the rest to the next one.
        self.found
            .extend(self.planner.end(&mut self.space, &self.account));
        self.account.lap(|cpu| &mut cpu.merge);
        result?;
        self.tell_store()
    }

    /// What was deferred is to be merged once its chunk has quiesced.
    fn take_quiesced(&mut self) {
        let quiesced = self.planner.deferred.take_quiesced(&self.map, self.number);
        self.found.extend(quiesced.published);
        let missing = self.find_again(&quiesced.twins);
        for (page, key) in missing {
            self.map.sight(page, key, self.number);
        }
    }

    /// Looks whether what entered the index lately concerns a candidate.
    fn take_news(&mut self) {
        let Some(news) = self.session.news() else {
            return;
        };
        let candidates = candidates::in_news(&self.map, &news);
        let missing = self.find_again(&candidates);
        match news {
            News::Overrun => self.session.schedule_resync(self.number, ResyncCause::Missed),
            // What entered the index is no sighting for the store any more. If it has left already, it must become one again.
            News::Keys(_) => {
                for (page, key) in missing {
                    self.map.sight(page, key, self.number);
                }
            }
        }
    }

    /// A key that enters the index is no sighting any more, and if it leaves unseen by us (much entered at once, or its twin
    /// found no mapping), nobody would ever be asked for our page. So from time to time, if that may have happened, all that
    /// the index lacks is sighted anew. It is withdrawn first: a key that is sighted twice by one VM would be asked for.
    fn resync(&mut self) -> Result<(), Error> {
        if !self.session.begin_resync(self.number) {
            return Ok(());
        }
        let deferred = self.planner.deferred.pages();
        let mut candidates = self.map.candidates_with(|_| true);
        candidates.retain(|(page, _)| !deferred.contains(page));
        for some in candidates.chunks(MAX_BATCH) {
            if let Err(error) = self.yield_and_poll() {
                self.session.schedule_resync(self.number, ResyncCause::Missed);
                return Err(error);
            }
            let missing = self.find_again(some);
            self.map.withdraw_sightings(&missing);
            self.tell_store()?;
            // The store may have asked for some of them meanwhile, for the sake of other sightings.
            for (page, key) in missing {
                if self.map.known(page).candidate() == Some(key) {
                    self.map.sight(page, key, self.number);
                }
            }
        }
        self.account.lap(|cpu| &mut cpu.store);
        Ok(())
    }
}
