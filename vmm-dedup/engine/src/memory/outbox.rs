//! What the store is to be told of pages. Transitions of [`PageMap`](super::page_map::PageMap) put it here; the
//! [`Session`](crate::store::session::Session) sends it.

use crate::memory::layout::Page;
use std::collections::VecDeque;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::RefDelta;

/// A page that was reported by its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sighting {
    pub(crate) page: Page,
    pub(crate) key: Key,
}

/// Messages to the store that were not sent yet, in the order in which they came.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outbox {
    /// Pages whose keys no slot has.
    pub(crate) sightings: VecDeque<Sighting>,
    /// Keys of earlier sightings that do not hold any more.
    pub(crate) withdrawals: VecDeque<u64>,
    /// Line keys of pages that differ from the only slot with that key.
    pub(crate) ambiguous: VecDeque<u64>,
    /// References to slots that were taken or given up.
    pub(crate) refs: VecDeque<RefDelta>,
}

impl Outbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.sightings.is_empty()
            && self.withdrawals.is_empty()
            && self.ambiguous.is_empty()
            && self.refs.is_empty()
    }

    /// There is nobody to be told.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// One more page maps the slot.
    pub(super) fn take_ref(&mut self, slot: Slot) {
        self.refs.push_back(RefDelta {
            slot: slot.number(),
            delta: 1,
        });
    }

    /// One page less maps the slot, or a publisher does not map what it published.
    pub(crate) fn drop_ref(&mut self, slot: Slot) {
        self.refs.push_back(RefDelta {
            slot: slot.number(),
            delta: -1,
        });
    }
}
