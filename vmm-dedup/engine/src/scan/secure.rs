//! Sharing that hides itself, for trust domains whose tenants are hostile to each other: what a guest can time does not tell whether
//! another VM has the same page. After VUsion (Oliverio et al., SOSP'17). The store says so when a service joins.
//!
//! # What is done with every page alike
//!
//! Nothing of the store is mapped into the guest, nothing is looked up in its index, and no key is told. A page takes part when it
//! is cold ([`pack`](mod@crate::pack)), whoever else has it; a huge page that is not used is split before, whatever is in it. The page is
//! published: the store copies it into a slot of its own, from a random place, or counts one more reference to the slot that has it. The answer is the same. Then its place in the guest is emptied as that of any
//! packed page, and its record in the packer's table names the slot. A page that nobody else has is a *fake merge*: it takes as much memory as
//! before. Who reads or writes such a page waits for the rebuilding thread, which copies the slot into a fresh page. That is one piece of
//! code, which asks neither who else has the slot nor how many.
//!
//! What does differ comes later: the reference is given up by this thread, in a batch of the next pass, and the store's slot may die then.
//!
//! # Why no page is lost
//!
//! All that is said of packed pages holds. The bytes of a page lie in the store's memory, which a record keeps mapped
//! ([`HeldSlot`](crate::store::connection::HeldSlot)): the memory stays whatever becomes of the store. The store writes no slot twice, and
//! nobody else can. The page is compared with the slot as this process maps it, while it is taken: what was compared is what is copied
//! back. The connection has a reference for each record, from before the page is taken until after the record has gone. So the store keeps
//! the slot, and if it dies or the connection breaks, the mapping does. Records of an earlier connection are brought back once there has been
//! another for a while, and only then the earlier membership is taken over.
//!
//! # Moves
//!
//! Where the store has emptied a segment, records follow: old and new slot are compared, and the record changes under the table's lock. No
//! guest page is touched.

use crate::error::Error;
use crate::memory::page_map::PageMap;
use crate::scan::order::Chunks;
use crate::scan::pass::Pass;
use crate::thp::split;

/// Pages that come back between two looks at what else there is to do.
const BACK_AT_ONCE: usize = 64;

impl Pass {
    /// Lets records name the slots that theirs have moved to.
    pub(super) fn follow_slots(&mut self) {
        let (Some(packing), Some(store)) = (&mut self.packing, self.session.store()) else {
            return;
        };
        for slot in packing.follow(store) {
            self.map.note_held(slot);
        }
        self.give_up_slots();
        self.account.lap(|cpu| &mut cpu.merge);
    }

    /// Brings back what lies in slots of earlier connections, once there has been another for a while.
    pub(super) fn leave_earlier_stores(&mut self) -> Result<(), Error> {
        if !self.session.vacates_old_stores() {
            return Ok(());
        }
        let pages = match (&self.packing, self.session.store()) {
            (Some(packing), Some(store)) => packing.pages_of_earlier(store.membership()).collect(),
            _ => Vec::new(),
        };
        let mut done = true;
        for some in pages.chunks(BACK_AT_ONCE) {
            for page in some {
                done &= self
                    .space
                    .bring_chunk_back(&mut self.map, &(*page..page + 1), false);
            }
            self.account.lap(|cpu| &mut cpu.break_);
            self.yield_and_poll()?;
        }
        self.session.note_vacated(done);
        Ok(())
    }

    /// Splits huge pages that rest, whatever is in them, so that their pages can take part; those that the policy lets it split. What turns
    /// out to be used is built again as ever.
    pub(super) fn split_idle(&mut self) -> Result<(), Error> {
        let mut chunks = Chunks::new(&self.map);
        loop {
            let monitor = &self.monitor;
            let rests = |map: &mut PageMap, at: usize| {
                let chunk = map.chunk(at);
                chunk.huge && !chunk.lent && monitor.lets_split_idle(&chunk.thp)
            };
            let Some(at) = chunks.next(&mut self.map, rests) else {
                return Ok(());
            };
            if !self.direct_io.glance() {
                return Ok(());
            }
            let first = self.map.chunk_at(at).pages.start;
            split::split_if_huge(&mut self.map, &mut self.account, &self.monitor, first);
            self.account.lap(|cpu| &mut cpu.break_);
            self.yield_and_poll()?;
        }
    }

    /// Whether pages lie in slots of earlier connections.
    pub(super) fn keeps_earlier_slots(&self) -> bool {
        let now = self.session.store().map(|store| store.membership());
        let earlier = |packing: &crate::pack::Packing| {
            now.is_none_or(|now| packing.pages_of_earlier(now).next().is_some())
        };
        self.session.has_broken() && self.session.is_secure() && self.packing.as_ref().is_some_and(earlier)
    }

    /// Whether pages lie in slots.
    pub(super) fn keeps_slots(&self) -> bool {
        self.session.is_secure() && self.account.stats.packing.pages > 0
    }
}
