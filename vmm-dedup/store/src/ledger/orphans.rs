//! What orphans reference, all together: members whose connections broke while their processes may live
//! ([`crate::ledger::lifetime`]). The lifetime keeps here how many pages nobody else references, and corrects that number with each
//! reference that changes: whoever asks for one VM after the other asks for it each time.
//!
//! The lifetime counts an orphan's references some at a time. Those that it has not counted yet are as a connected member's.

use crate::ledger::chunks::{Chunks, place};
use crate::ledger::epochs::MemberId;
use std::collections::BTreeMap;
use vmm_dedup_protocol::Slot;

/// All orphans.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Orphans {
    /// Which they are, and how many of the first chunks of what each references are not counted yet.
    members: BTreeMap<MemberId, usize>,
    /// The sum of their references to each slot. Each orphan's count has 32 bits, so the sum of all needs more.
    counts: Chunks<u64>,
    references: u64,
    /// Pages that of all members only orphans reference.
    pub(super) alone: u64,
}

impl Orphans {
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = MemberId> {
        self.members.keys().copied()
    }

    /// How many of the first chunks of what a member references are not counted. `None`: it is no orphan.
    pub(crate) fn uncounted(&self, id: MemberId) -> Option<usize> {
        self.members.get(&id).copied()
    }

    /// Whether an orphan's references to a slot are counted.
    pub(crate) fn counts(&self, id: MemberId, slot: Slot) -> bool {
        self.uncounted(id).is_some_and(|first| place(slot).0 >= first)
    }

    /// From now on all but so many chunks of what a member references count as an orphan's.
    pub(crate) fn set_uncounted(&mut self, id: MemberId, chunks: usize) {
        self.members.insert(id, chunks);
    }

    /// An orphan holds nothing any more, and is gone.
    pub(crate) fn remove(&mut self, id: MemberId) {
        self.members.remove(&id);
        if self.is_empty() {
            debug_assert_eq!((self.references, self.alone), (0, 0));
            *self = Self::default();
        }
    }

    /// References that orphans hold to a slot.
    pub(crate) fn held(&self, slot: Slot) -> u64 {
        self.counts.get(slot)
    }

    /// All references that orphans hold.
    pub(crate) fn references(&self) -> u64 {
        self.references
    }

    pub(crate) fn add(&mut self, slot: Slot, n: u32) {
        self.counts.set(slot, self.held(slot) + u64::from(n));
        self.references += u64::from(n);
    }

    /// Takes away references that were added.
    pub(crate) fn sub(&mut self, slot: Slot, n: u32) {
        self.counts.set(slot, self.held(slot) - u64::from(n));
        self.references -= u64::from(n);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.counts.bytes()
    }
}
