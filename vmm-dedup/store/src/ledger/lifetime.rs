//! Who holds which slot, and when a slot may be reused. Pure: the same code runs in the server and in the model
//! check (`verification`).
//!
//! # The rule
//! A slot's bytes are rewritten only when no process maps it or may still map it. Three things keep that true:
//!
//! 1. *References.* A service reports every mapping it makes (+) and drops (-). A slot with references is Live.
//! 2. *Epochs.* A service may have mapped a slot and not have told yet. So a slot whose last reference goes first
//!    leaves the index (nobody can find it from now on), the epoch advances, and the slot waits in limbo until
//!    every member has acknowledged that epoch: whoever found it before has told by then, and brought it back.
//! 3. *Orphans.* A member whose socket broke cannot tell any more. Its process may be alive and map
//!    - slots it has references to: these stay counted;
//!    - slots that it found and mapped without having been able to tell: these are in the index, or left it after
//!      the last epoch the member acknowledged. So it stays a member that acknowledges nothing: such slots do not
//!      leave limbo.
//!
//!    Both end when the process has ended, and with it its mappings: only then does a member leave. A process that
//!    connects again becomes another member; its orphan stays until the process ends. The price is that limbo only
//!    grows meanwhile (bounded by the size of the store, shown as `vmmdedup_slots_limbo`, warned about with the
//!    process's number). A dead process costs nothing: the kernel tells within milliseconds (pidfd).
//!
//! A member that says goodbye leaves at once: it has told all references, drops those that it kept, and promises that its
//! process maps no slot which it found over this connection. Nobody but the process itself could tell otherwise, and
//! nobody else is harmed if the promise is broken: the slots that it still maps are reused, so that it sees pages of its
//! own trust domain there, which it may read anyway. Its orphans, if it has some, are members of their own and stay.
//!
//! A mapping of a run with exceptions also covers slots that its guest does not show: private pages lie in their places.
//! Such slots are no more in use than if they were not covered, and nobody reports them.
//!
//! A *series* is a slot that is found in the index and *followers* that hold the same page and are found through it. The
//! series itself holds a reference to each follower, and gives them up when its first slot leaves the index: a follower
//! leaves with it, or later, when nobody maps it any more. So whoever found it through the index before that has told
//! by the time it is freed, as for the first slot.
//!
//! What remains are pages that a device reads on behalf of a process that no longer maps them. No account tells of these,
//! so the allocator decides when a slot that is free here may be written again ([`crate::ledger::allocator`]). It is
//! free all the same: nobody can reference it.

use crate::ledger::epochs::{Epoch, EpochViolation, Epochs, MemberId};
use crate::ledger::references::{References, Unbalanced};
#[cfg(test)]
use crate::ledger::slots::SlotState;
use crate::ledger::slots::{IndexChange, NotLive, Slots};
use std::collections::{BTreeMap, BTreeSet};
use vmm_dedup_protocol::Slot;

/// Why a reference change is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReferenceViolation {
    /// The slot is free.
    #[error(transparent)]
    NotLive(#[from] NotLive),
    /// The connection's count does not allow it.
    #[error(transparent)]
    Unbalanced(#[from] Unbalanced),
}

/// Members, their references and the slots.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lifetime {
    slots: Slots,
    epochs: Epochs,
    members: BTreeMap<MemberId, References>,
    /// First slots of series that are in the index, and how many follow each.
    series: BTreeMap<Slot, u32>,
    /// Slots that hold a page and are not in the index themselves: those that follow in a series, and those that one took
    /// the place of.
    unlisted: BTreeSet<Slot>,
    /// Slots have been dropped since the epoch last advanced.
    pending: bool,
}

impl Lifetime {
    pub(crate) fn new(epoch: Epoch) -> Self {
        Self {
            slots: Slots::default(),
            epochs: Epochs::new(epoch),
            members: BTreeMap::new(),
            series: BTreeMap::new(),
            unlisted: BTreeSet::new(),
            pending: false,
        }
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(crate) fn epochs(&self) -> &Epochs {
        &self.epochs
    }

    pub(crate) fn references(&self, id: MemberId) -> Option<&References> {
        self.members.get(&id)
    }

    /// A connection is given the index and the segments.
    pub(crate) fn join(&mut self, id: MemberId) {
        self.epochs.join(id);
        self.members.insert(id, References::default());
    }

    /// The member has a page in this slot, which was free.
    pub(crate) fn publish(&mut self, id: MemberId, slot: Slot) {
        self.slots.publish(slot);
        let added = self.member(id).add(slot, 1);
        debug_assert!(added.is_ok(), "nobody referenced a free slot");
    }

    /// The member has a page in the first of these consecutive slots, which were all free and hold the same.
    pub(crate) fn publish_series(&mut self, id: MemberId, first: Slot, followers: &[Slot]) {
        self.publish(id, first);
        for slot in followers {
            self.slots.publish(*slot);
        }
        self.unlisted.extend(followers);
        let count = u32::try_from(followers.len()).unwrap_or(u32::MAX);
        self.series.insert(first, count);
    }

    /// A slot has left the index although it is referenced: another one took its place.
    pub(crate) fn unlist(&mut self, slot: Slot) {
        self.unlisted.insert(slot);
    }

    /// References of services: those that series hold are left out.
    pub(crate) fn claimed(&self) -> u64 {
        let unclaimed: u64 = self.series.values().map(|n| u64::from(*n)).sum();
        self.slots.references() - unclaimed
    }

    /// Applies a reported change. If slots were dropped, [`Self::advance`] must follow before anything else.
    pub(crate) fn apply(
        &mut self,
        id: MemberId,
        slot: Slot,
        delta: i32,
    ) -> Result<IndexChange, ReferenceViolation> {
        let n = delta.unsigned_abs();
        match delta {
            0 => Ok(IndexChange::None),
            1.. => {
                let held = self.member(id).held(slot);
                held.checked_add(n).ok_or(Unbalanced::Overflow { slot })?;
                let change = self.slots.add_references(slot, n)?;
                self.member(id).add(slot, n)?;
                Ok(self.for_index(slot, change))
            }
            _ => {
                self.member(id).sub(slot, n)?;
                Ok(self.drop_references(slot, n))
            }
        }
    }

    /// Drops the references of a member whose process has ended, some at a time. Returns the slots that must leave the
    /// index, and whether there may be more to do; at the end the member is gone. [`Self::advance`] must follow each call.
    pub(crate) fn leave_some(&mut self, id: MemberId) -> (Vec<Slot>, bool) {
        let Some(some) = self.members.get_mut(&id).and_then(References::take_some) else {
            self.members.remove(&id);
            self.epochs.leave(id);
            return (Vec::new(), false);
        };
        let leaves = |(slot, n)| (self.drop_references(slot, n) == IndexChange::Leaves).then_some(slot);
        (some.into_iter().filter_map(leaves).collect(), true)
    }

    /// To be called when dropped slots have left the index: the new epoch, if there were any.
    pub(crate) fn advance(&mut self) -> Option<Epoch> {
        std::mem::take(&mut self.pending).then(|| self.epochs.advance())
    }

    /// The member reports what it had read before the lookups it has told about.
    pub(crate) fn acknowledge(&mut self, id: MemberId, epoch: Epoch) -> Result<(), EpochViolation> {
        self.epochs.acknowledge(id, epoch)
    }

    /// Frees what nobody can map any more.
    pub(crate) fn reclaim(&mut self, mut freed: impl FnMut(Slot)) {
        if self.slots.limbo() > 0 {
            let unlisted = &mut self.unlisted;
            self.slots.reclaim(self.epochs.quiescent(), |slot| {
                unlisted.remove(&slot);
                freed(slot);
            });
        }
    }

    /// Slots have been dropped since the last [`Self::advance`].
    #[cfg(test)]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// What the model check must find out to be wrong, too.
    #[cfg(test)]
    pub(crate) fn forget_epoch(&mut self, id: MemberId) {
        self.epochs.leave(id);
    }

    /// Whether the slot can be found through the index.
    #[cfg(test)]
    pub(crate) fn is_found(&self, slot: Slot) -> bool {
        let within = |(first, followers): (&Slot, &u32)| {
            let past = first.number() + followers;
            (first.number()..=past).contains(&slot.number())
        };
        let listed = !self.unlisted.contains(&slot) && matches!(self.slots.state(slot), SlotState::Live(_));
        listed || self.series.iter().any(within)
    }

    /// What the model check must find out to be wrong.
    #[cfg(test)]
    pub(crate) fn reclaim_without_waiting(&mut self) {
        self.slots.reclaim(Epoch::MAX, |_| ());
    }

    pub(crate) fn bytes(&self) -> usize {
        // Rarely more than a few hundred entries; a set's node holds eleven.
        let sets = self.unlisted.len() * 8 + self.series.len() * 12;
        self.slots.bytes() + sets + self.members.values().map(References::bytes).sum::<usize>()
    }

    fn drop_references(&mut self, slot: Slot, n: u32) -> IndexChange {
        let leaving = self.epochs.current() + 1;
        let change = self.slots.drop_references(slot, n, leaving);
        if change == IndexChange::Leaves {
            self.pending = true;
            let followers = self.series.remove(&slot).unwrap_or(0);
            for follower in (1..=followers).filter_map(|n| slot.checked_add_in_segment(n)) {
                self.slots.drop_references(follower, 1, leaving);
            }
        }
        self.for_index(slot, change)
    }

    /// What is not in the index does not leave it and does not come back to it.
    fn for_index(&self, slot: Slot, change: IndexChange) -> IndexChange {
        if self.unlisted.contains(&slot) {
            IndexChange::None
        } else {
            change
        }
    }

    fn member(&mut self, id: MemberId) -> &mut References {
        self.members.get_mut(&id).expect("only members have references")
    }
}
