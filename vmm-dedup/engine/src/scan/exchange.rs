//! Candidates > found: what a pass has learnt is exchanged with the store, and what comes of it is merged.

use crate::error::Error;
use crate::scan::pass::Pass;
use crate::store::session::ResyncCause;
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
                let (twins, mut with) = self.finding();
                twins.take_news(&mut with);
            }
            self.account.lap(|cpu| &mut cpu.store);
            self.yield_and_poll()?;
            let (twins, mut with) = self.finding();
            if twins.hash_some(&mut with) {
                continue;
            }
            if !self.twins.is_empty() && !self.direct_io.glance() {
                // Until it is looked at again, with the next pass, nothing can be done about what was found.
                return self.stand_by();
            } else if !self.twins.is_empty() {
                self.merge()?;
            } else if self.map.outbox().is_empty() {
                break;
            }
        }
        self.acknowledge()
    }

    /// What was deferred is to be merged once its chunk has quiesced.
    fn take_quiesced(&mut self) {
        let quiesced = self.merging.deferred.take_quiesced(&self.map, self.number);
        self.twins.add(quiesced.published);
        let (twins, mut with) = self.finding();
        twins.find_again_or_sight(&mut with, &quiesced.twins);
    }

    /// A key that enters the index is no sighting any more, and if it leaves unseen by us (much entered at once, or its twin
    /// found no mapping), nobody would ever be asked for our page. So from time to time, if that may have happened, all that
    /// the index lacks is sighted anew. It is withdrawn first: a key that is sighted twice by one VM would be asked for.
    fn resync(&mut self) -> Result<(), Error> {
        if !self.session.begin_resync(self.number) {
            return Ok(());
        }
        let deferred = self.merging.deferred.pages();
        let mut candidates = self.map.candidates_with(|_| true);
        candidates.retain(|(page, _)| !deferred.contains(page));
        for some in candidates.chunks(MAX_BATCH) {
            if let Err(error) = self.yield_and_poll() {
                self.session.schedule_resync(self.number, ResyncCause::Missed);
                return Err(error);
            }
            let (twins, mut with) = self.finding();
            let missing = twins.find_again(&mut with, some);
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
