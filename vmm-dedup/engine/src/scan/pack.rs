//! Packing within a pass: what is cold is packed, and what came back goes home.

use crate::error::Error;
use crate::lookup::publish;
use crate::memory::layout::Page;
use crate::pack::WINDOW;
use crate::scan::pass::Pass;

impl Pass {
    /// Takes note of packed pages that came back since somebody touched them.
    pub(super) fn note_unpacked(&mut self) {
        if let Some(packing) = &mut self.packing {
            packing.take_home(&mut self.map);
            self.give_up_slots();
            self.account.lap(|cpu| &mut cpu.merge);
        }
    }

    /// Packs what is cold, as far as this pass comes.
    pub(super) fn pack_cold(&mut self) -> Result<(), Error> {
        let packed = self.try_to_pack();
        if let Some(packing) = &mut self.packing {
            packing.clean_up();
        }
        packed
    }

    fn try_to_pack(&mut self) -> Result<(), Error> {
        let probes = self.monitor.probes();
        // They have twins.
        let deferred = self.merging.deferred.pages();
        while let Some(packing) = &mut self.packing
            && let Some(at) = packing.next_chunk(&mut self.map)
        {
            let mut cold = packing.look(&mut self.map, &mut self.space.pagemap, probes, at)?;
            if self.session.is_secure() {
                self.share_cold(&cold)?;
                // Nothing is pending. A large VM has much to share, and others give up slots meanwhile.
                if self.session.is_waited_for() {
                    self.keep_up()?;
                }
                self.yield_and_poll()?;
                continue;
            }
            cold.retain(|page| !deferred.contains(page));
            for window in cold.chunks(WINDOW) {
                // As before each window of merging: what refers to a page without pinning it must not be there.
                if !self.direct_io.glance_again() {
                    return Ok(());
                }
                self.pack_window(window);
                self.account.lap(|cpu| &mut cpu.merge);
                self.yield_and_poll()?;
            }
            self.yield_and_poll()?;
        }
        Ok(())
    }

    fn pack_window(&mut self, pages: &[Page]) {
        let Some(packing) = &mut self.packing else { return };
        packing.prepare(&self.map, pages);
        self.pack_prepared();
    }

    /// Takes the pages that were prepared.
    pub(super) fn pack_prepared(&mut self) {
        let Some(packing) = &mut self.packing else { return };
        // No discard meets pages that are away, until the states say what became of them.
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        let packed = packing.pack(&mut self.map, &mut self.space.pagemap, self.number);
        self.account.stats.packing.stop.observe(packed.stop_ns);
        self.account.stats.refused_pinned_total += packed.pinned;
    }

    /// Publishes cold pages of one chunk, and empties their places.
    pub(super) fn share_cold(&mut self, cold: &[Page]) -> Result<(), Error> {
        if cold.is_empty()
            || self
                .packing
                .as_ref()
                .is_none_or(|packing| packing.is_over_budget())
        {
            return Ok(());
        }
        let published = publish::publish(&mut self.map, &mut self.session, &mut self.account, false, cold)?;
        self.account.lap(|cpu| &mut cpu.store);
        for window in published.chunks(WINDOW) {
            let slots: Vec<_> = window
                .iter()
                .filter_map(|request| Some((request.page, request.slot?)))
                .collect();
            let (Some(packing), Some(store)) = (&mut self.packing, self.session.store()) else {
                return Ok(());
            };
            let lost = packing.prepare_slots(store, &slots);
            lost.into_iter()
                .for_each(|slot| self.map.give_up_published(Some(slot)));
            // What refers to a page without pinning it must not be there.
            if self.direct_io.glance_again() {
                self.pack_prepared();
            } else if let Some(packing) = &mut self.packing {
                packing.give_up_prepared();
            }
            self.give_up_slots();
            self.account.lap(|cpu| &mut cpu.merge);
            // Everything that was published is held or given up, so no interruption loses a reference.
        }
        self.tell_store()
    }

    /// Tells the store, with the next message, of slots that no record names any more.
    pub(super) fn give_up_slots(&mut self) {
        let Some(packing) = &mut self.packing else { return };
        let now = self.session.store().map(|store| store.membership());
        for held in packing.take_freed() {
            // Those of an earlier connection are accounted for by that.
            if Some(held.membership) == now {
                self.map.give_up_published(Some(held.slot));
            }
        }
    }
}
