//! What the store is told of pages, and when what was told holds no more.

use super::PageMap;
use crate::memory::layout::Page;
use crate::memory::outbox::{Outbox, Told};
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::MAX_BATCH;

impl PageMap {
    /// What the store was not told yet.
    pub(crate) fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Takes out what one message tells.
    pub(crate) fn next_message(&mut self) -> Told {
        let sightings = self.sightings_of_one_message();
        self.outbox.take_message(sightings)
    }

    /// How many sightings go into the next message: as many as fit. The store asks for what one message lists, and a huge page
    /// should be asked for as one, so a chunk that is listed from its first page on is not cut.
    fn sightings_of_one_message(&self) -> usize {
        let sightings = &self.outbox.sightings;
        let next = sightings.get(MAX_BATCH);
        let Some(next) = next.filter(|next| self.memory().has(next.page)) else {
            return sightings.len().min(MAX_BATCH);
        };
        let first = self.chunk_at(self.chunk_of(next.page)).pages.start;
        let first = sightings
            .range(..MAX_BATCH)
            .rposition(|sighting| sighting.page == first);
        first.filter(|first| *first > 0).unwrap_or(MAX_BATCH)
    }

    /// Nobody is to be told of keys: only of references.
    pub(crate) fn tell_refs_only(&mut self) {
        self.outbox.keep_refs_only();
    }

    /// A slot is held for a page whose place is empty, for which the store counts no reference yet.
    pub(crate) fn note_held(&mut self, slot: Slot) {
        self.outbox.take_ref(slot);
    }

    /// There is nobody to be told.
    pub(crate) fn forget_outbox(&mut self) {
        self.outbox.clear();
    }

    /// A line key does not tell the pages apart that have it.
    pub(crate) fn note_ambiguous(&mut self, key: Key) {
        self.outbox.ambiguous.push_back(key.raw());
    }

    /// Sightings of candidates are about to be repeated by [`PageMap::sight`]: they are withdrawn first, since the store would
    /// ask for a key that one VM sights twice. A page that is no candidate of that key any more has withdrawn it already.
    pub(crate) fn withdraw_sightings(&mut self, candidates: &[(Page, Key)]) {
        for (page, key) in candidates {
            if self.known(*page).candidate() == Some(*key) {
                self.outbox.withdrawals.push_back(key.raw());
            }
        }
    }
}
