//! What the store is to be told of pages. Transitions of [`PageMap`](super::page_map::PageMap) put it here; the
//! [`Session`](crate::store::session::Session) sends it.

use crate::memory::layout::Page;
use std::collections::VecDeque;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{MAX_AMBIGUOUS, MAX_BATCH, RefDelta};

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
    pub(super) sightings: VecDeque<Sighting>,
    /// Keys of earlier sightings that do not hold any more.
    pub(super) withdrawals: VecDeque<u64>,
    /// Line keys of pages that differ from the only slot with that key.
    pub(super) ambiguous: VecDeque<u64>,
    /// References to slots that were taken or given up.
    pub(super) refs: VecDeque<RefDelta>,
}

/// What one message tells, as in [`Outbox`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) sightings: Vec<Sighting>,
    pub(crate) withdrawals: Vec<u64>,
    pub(crate) ambiguous: Vec<u64>,
    pub(crate) refs: Vec<RefDelta>,
}

impl Outbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.sightings.is_empty()
            && self.withdrawals.is_empty()
            && self.ambiguous.is_empty()
            && self.refs.is_empty()
    }

    /// Whether references were taken or given up.
    pub(crate) fn has_refs(&self) -> bool {
        !self.refs.is_empty()
    }

    /// Whether keys are to be withdrawn.
    pub(crate) fn has_withdrawals(&self) -> bool {
        !self.withdrawals.is_empty()
    }

    /// Whether there is enough of something to fill a message.
    pub(crate) fn fills_a_message(&self) -> bool {
        let most = self.sightings.len().max(self.withdrawals.len());
        most.max(self.refs.len()) >= MAX_BATCH
    }

    /// Takes out what comes first, as much as one message takes, of sightings so many.
    pub(super) fn take_message(&mut self, sightings: usize) -> Told {
        Told {
            sightings: first(&mut self.sightings, sightings.min(MAX_BATCH)),
            withdrawals: first(&mut self.withdrawals, MAX_BATCH),
            ambiguous: first(&mut self.ambiguous, MAX_AMBIGUOUS),
            refs: first(&mut self.refs, MAX_BATCH),
        }
    }

    /// Leaves out all but references.
    pub(super) fn keep_refs_only(&mut self) {
        self.sightings.clear();
        self.withdrawals.clear();
        self.ambiguous.clear();
    }

    /// There is nobody to be told.
    pub(super) fn clear(&mut self) {
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
    pub(super) fn drop_ref(&mut self, slot: Slot) {
        self.refs.push_back(RefDelta {
            slot: slot.number(),
            delta: -1,
        });
    }
}

/// Takes what comes first, so many at most.
fn first<T>(all: &mut VecDeque<T>, most: usize) -> Vec<T> {
    all.drain(..all.len().min(most)).collect()
}
