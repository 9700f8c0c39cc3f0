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
//! What remains are pages that a device reads on behalf of a process that no longer maps them (read-only pins). No
//! account tells of these, so slots that are free here are not rewritten before a quarantine has ended (`segments`).
//! They are free all the same: nobody can reference them, and they count in `vmmdedup_slots_cooling` only.

use crate::epochs::{Epoch, EpochViolation, Epochs, MemberId};
use crate::references::{References, Unbalanced};
use crate::slots::{Change, NotLive, Slots};
use std::collections::BTreeMap;
use vmm_dedup_protocol::Slot;

/// Why a reference change is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceViolation {
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
    /// Slots have been dropped since the epoch last advanced.
    pending: bool,
}

impl Lifetime {
    pub(crate) fn new(epoch: Epoch) -> Self {
        Self {
            slots: Slots::default(),
            epochs: Epochs::new(epoch),
            members: BTreeMap::new(),
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

    /// Applies a reported change. If slots were dropped, [`Self::advance`] must follow before anything else.
    pub(crate) fn apply(
        &mut self,
        id: MemberId,
        slot: Slot,
        delta: i32,
    ) -> Result<Change, ReferenceViolation> {
        let n = delta.unsigned_abs();
        match delta {
            0 => Ok(Change::None),
            1.. => {
                let held = self.member(id).held(slot);
                held.checked_add(n).ok_or(Unbalanced::Overflow { slot })?;
                let change = self.slots.reference(slot, n)?;
                self.member(id).add(slot, n)?;
                Ok(change)
            }
            _ => {
                self.member(id).sub(slot, n)?;
                Ok(self.release(slot, n))
            }
        }
    }

    /// Drops the references of a member whose process has ended, some at a time: calls `dropped` for slots that must
    /// leave the index. Returns whether there may be more; at the end the member is gone. [`Self::advance`] must
    /// follow each call.
    pub(crate) fn leave_some(&mut self, id: MemberId, mut dropped: impl FnMut(Slot)) -> bool {
        if let Some(some) = self.members.get_mut(&id).and_then(References::take_some) {
            for (slot, n) in some {
                if self.release(slot, n) == Change::Dropped {
                    dropped(slot);
                }
            }
            return true;
        }
        self.members.remove(&id);
        self.epochs.leave(id);
        false
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
    pub(crate) fn reclaim(&mut self, freed: impl FnMut(Slot)) {
        if self.slots.limbo() > 0 {
            self.slots.reclaim(self.epochs.quiescent(), freed);
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

    /// What the model check must find out to be wrong.
    #[cfg(test)]
    pub(crate) fn reclaim_without_waiting(&mut self) {
        self.slots.reclaim(Epoch::MAX, |_| ());
    }

    pub(crate) fn bytes(&self) -> usize {
        self.slots.bytes() + self.members.values().map(References::bytes).sum::<usize>()
    }

    fn release(&mut self, slot: Slot, n: u32) -> Change {
        let change = self.slots.release(slot, n, self.epochs.current() + 1);
        self.pending |= change == Change::Dropped;
        change
    }

    fn member(&mut self, id: MemberId) -> &mut References {
        self.members.get_mut(&id).expect("only members have references")
    }
}
