//! Who holds which slot, and when a slot is free. Pure: the same code runs in the server and in the model
//! check (`verification`).
//!
//! # The rule
//! A slot is written once in its file ([`crate::ledger::allocator`]): who maps it maps what he found, whatever becomes of the
//! slot's number. What has to be kept right is the account: **who can tell of a slot tells of the one that he found**, and **what
//! somebody has told that he maps is counted**. So a slot's number names another page, in another file, only when no member that can tell
//! maps the slot or may still map it, and when it has no reference. Two things keep that true:
//!
//! 1. *References.* A service reports every mapping it makes (+) and drops (-). A slot with references is Live.
//! 2. *Epochs.* A service may have mapped a slot and not have told yet. So a slot whose last reference goes first
//!    leaves the index (nobody can find it from now on), the epoch advances, and the slot waits in limbo until
//!    every member that can tell has acknowledged that epoch: whoever found it before has told by then, and brought it back.
//!
//! # Orphans
//! A member whose socket broke can tell nothing any more ([`Lifetime::lose`]). Its process may be alive and map
//! - slots it has references to: these stay counted;
//! - slots that it found and mapped without having been able to tell. Nobody's account is about these, so that nothing waits for them:
//!   their numbers may name other pages. Its mappings keep the files that it found, which nobody writes any more.
//!
//! A process may also go on looking up, until it notices. A number that it finds it takes for a place in the file that it was given for that
//! number. It compares what is there before it maps it, as it must for every slot. In that file a slot that it could find is not written
//! again; and when the number has been given to another file, the store has no mapping of the earlier one any more.
//!
//! The references end when the process has ended, and with it its mappings. A process that connects again becomes another
//! member. It must not tell of what it mapped as the earlier one: the numbers may name other slots. It takes its orphan over when it maps
//! nothing any more that it found as the earlier member: what it maps by then it has found as the new one, which accounts for it by the
//! same rules. So the orphan leaves as with a goodbye. A dead process costs nothing: the kernel tells within milliseconds (pidfd).
//!
//! A member that says goodbye leaves at once: it has told all references, drops those that it kept, and promises that its
//! process maps no slot which it found over this connection. Nobody but the process itself could tell otherwise, and
//! nobody else is harmed if the promise is broken: the slots that it still maps are free then, and the files that it maps
//! keep their memory. Its orphans, if it has some, are members of their own and stay until they are taken over.
//!
//! A mapping of a run with exceptions also covers slots that its guest does not show: private pages lie in their places.
//! Such slots are no more in use than if they were not covered, and nobody reports them.
//!
//! A *series* is a slot that is found in the index and *followers* that hold the same page and are found through it. The
//! series itself holds a reference to each follower, and gives them up when its first slot leaves the index: a follower
//! leaves with it, or later, when nobody maps it any more. So whoever found it through the index before that has told
//! by the time it is freed, as for the first slot.
//!
//! # Moves
//! A page may move: another slot has got a copy of it and takes the old one's place in the index. The old slot stays as it
//! is for those who map it. Its *forward* names the new one; whoever maps the old slot reads that, compares, maps the new
//! one over the old, and tells both changes.
//!
//! - *No new mapping of the old slot arises.* It is not in the index any more, and never comes back to it. Who found it
//!   before has told by the time it is freed, as for every slot that left the index.
//! - *The new slot is there for whoever follows the forward.* The old slot holds a reference to the new one until it is
//!   itself free. As long as a member that can tell maps the old slot, told or untold, that is not free (the rule), so the new one is
//!   live.
//! - *A forward may change.* When the new slot moves on, what leads to it leads to where it went from then on. A service
//!   that has read the forward before and maps what it named has not told: reading a forward is looking up, under the same
//!   epochs. So the slot in between, once it has lost its references, waits in limbo until that service has told.
//!
//! A service need not follow: it may map the old slot for as long as it likes, and its references are counted as ever. It then
//! keeps the memory of the old slot's segment, and nothing else.
//!
//! An orphan cannot tell that it follows, and its references are an account of pages, not of places: they go to the new slot at once.
//! So the old slot's segment may go. What the process maps of it stays as it is, and costs what the kernel says (`memory/held.rs`).
//!
//! # After the last reference
//! A slot that is free here is not written again in its file: only when its segment has gone, and its number is given to another
//! one, does it hold another page. So a segment may go, with its memory, as soon as nobody *references* its slots, while some may wait in
//! limbo. A late reference brings such a slot back to life in a segment that has gone: it is counted, and not found by
//! anybody. The number is given away when all slots are free and all members that can tell have said that they know the segment no
//! more.

mod moves;

use crate::ledger::epochs::{Epoch, EpochViolation, Epochs, MemberId};
use crate::ledger::orphans::Orphans;
use crate::ledger::references::{References, Unbalanced};
use crate::ledger::shares::Shares;
use crate::ledger::slots::{IndexChange, NotLive, SlotState, Slots};
use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::ops::RangeInclusive;
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

/// What became of a slot, for those who keep the index and the segments in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Change {
    /// Nobody references it any more.
    Died {
        slot: Slot,
        /// It must leave the index.
        listed: bool,
    },
    /// A reference came after it had died.
    Revived {
        slot: Slot,
        /// It must come back to the index.
        listed: bool,
    },
}

/// Members, their references and the slots.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lifetime {
    slots: Slots,
    epochs: Epochs,
    members: BTreeMap<MemberId, References>,
    /// For the store's account. The rule does not need it.
    orphans: Orphans,
    /// For what each user may have. The rule does not need it.
    shares: Shares,
    /// First slots of series that are in the index, and how many follow each.
    series: BTreeMap<Slot, u32>,
    /// Slots that hold a page and are not in the index themselves: those that follow in a series, and those that one took
    /// the place of.
    unlisted: BTreeSet<Slot>,
    /// Where pages have moved: from old slots that are not free to new ones, to each of which the old one holds a reference.
    moved: BTreeMap<Slot, Slot>,
    /// The same, from the new slot to the old.
    sources: BTreeSet<(Slot, Slot)>,
    /// What became of slots, until somebody asks.
    changes: Vec<Change>,
    /// Slots have been dropped since the epoch last advanced.
    pending: bool,
}

impl Lifetime {
    pub(crate) fn new(epoch: Epoch) -> Self {
        Self {
            slots: Slots::default(),
            epochs: Epochs::new(epoch),
            members: BTreeMap::new(),
            orphans: Orphans::default(),
            shares: Shares::default(),
            series: BTreeMap::new(),
            unlisted: BTreeSet::new(),
            moved: BTreeMap::new(),
            sources: BTreeSet::new(),
            changes: Vec::new(),
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

    pub(crate) fn members(&self) -> impl Iterator<Item = MemberId> {
        self.members.keys().copied()
    }

    /// What each user keeps.
    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }

    pub(crate) fn shares_mut(&mut self) -> &mut Shares {
        &mut self.shares
    }

    /// A connection of a user is given the index and the segments.
    pub(crate) fn join(&mut self, id: MemberId, user: u32) {
        self.epochs.join(id);
        self.shares.join(id, user);
        self.members.insert(id, References::default());
    }

    /// The member has a page in this slot, which was free.
    pub(crate) fn publish(&mut self, id: MemberId, slot: Slot) {
        self.slots.publish(slot);
        let added = self.member(id).add(slot, 1);
        debug_assert!(added.is_ok(), "nobody referenced a free slot");
        self.shares.note(id, slot, 0, 1, false);
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

    /// Whether a slot is not in the index although it holds a page.
    pub(crate) fn is_unlisted(&self, slot: Slot) -> bool {
        self.unlisted.contains(&slot)
    }

    /// How many slots follow in the series that a slot begins.
    pub(crate) fn followers(&self, first: Slot) -> Option<u32> {
        self.series.get(&first).copied()
    }

    /// The first series that begins in some consecutive slots.
    pub(crate) fn first_series(&self, slots: RangeInclusive<Slot>) -> Option<Slot> {
        self.series.range(slots).next().map(|(first, _)| *first)
    }

    /// Where a slot's page has moved.
    pub(crate) fn moved_to(&self, slot: Slot) -> Option<Slot> {
        self.moved.get(&slot).copied()
    }

    /// Slots in use whose pages are in other slots, too, since they moved.
    pub(crate) fn moving(&self) -> u64 {
        let live = |slot: &&Slot| matches!(self.slots.state(**slot), SlotState::Live(_));
        self.moved.keys().filter(live).count() as u64
    }

    /// References of connected services: those that series, moved slots and orphans hold are left out.
    pub(crate) fn claimed(&self) -> u64 {
        let unclaimed: u64 = self.series.values().map(|n| u64::from(*n)).sum();
        self.slots.references() - unclaimed - self.moved.len() as u64 - self.orphans.references()
    }

    /// Pages in use that of all members only orphans reference. Nothing is counted for the answer.
    pub(crate) fn held_by_orphans_alone(&self) -> u64 {
        self.orphans.alone
    }

    /// Does what may change who references these slots, and counts anew which of their pages only orphans reference.
    fn recounting<const N: usize, T>(&mut self, slots: [Slot; N], act: impl FnOnce(&mut Self) -> T) -> T {
        if self.orphans.is_empty() {
            return act(self);
        }
        let before = self.alone_of(slots);
        let done = act(self);
        self.orphans.alone = self.orphans.alone + self.alone_of(slots) - before;
        done
    }

    /// How many of the pages of these slots only orphans reference.
    fn alone_of<const N: usize>(&self, slots: [Slot; N]) -> u64 {
        let pages = slots.map(|slot| self.moved_to(slot).unwrap_or(slot));
        let is_first = |n: usize| !pages[..n].contains(&pages[n]);
        (0..N)
            .filter(|n| is_first(*n) && self.is_alone(pages[*n]))
            .count() as u64
    }

    /// Whether of all members only orphans reference a page, which has not moved from here. It may have moved here.
    fn is_alone(&self, page: Slot) -> bool {
        let slots = || iter::once(page).chain(self.sources_of(page));
        let of_others = |slot| {
            let SlotState::Live(all) = self.slots.state(slot) else {
                return false;
            };
            let left = all - self.orphans.held(slot);
            left > 0 && left > self.unclaimed(slot)
        };
        slots().any(|slot| self.orphans.held(slot) > 0) && !slots().any(of_others)
    }

    /// References to a slot that a series and moved slots hold.
    fn unclaimed(&self, slot: Slot) -> u64 {
        let series = self.series.range(..slot).next_back();
        let follows = series.is_some_and(|(first, n)| slot.number() <= first.number() + n);
        self.sources_of(slot).count() as u64 + u64::from(follows)
    }

    /// The slots whose pages moved to this one.
    fn sources_of(&self, slot: Slot) -> impl Iterator<Item = Slot> {
        let led = self.sources.range((slot, Slot::FIRST)..);
        led.take_while(move |(to, _)| *to == slot)
            .map(|(_, source)| *source)
    }

    /// Applies a reported change. Afterwards, before anything else, its consequences are to be drawn:
    /// [`Self::take_changes`], then [`Self::advance`].
    pub(crate) fn apply(&mut self, id: MemberId, slot: Slot, delta: i32) -> Result<(), ReferenceViolation> {
        debug_assert!(self.orphans.uncounted(id).is_none(), "an orphan tells nothing");
        self.recounting([slot], |all| all.apply_uncounted(id, slot, delta))
    }

    fn apply_uncounted(&mut self, id: MemberId, slot: Slot, delta: i32) -> Result<(), ReferenceViolation> {
        let n = delta.unsigned_abs();
        match delta {
            0 => {}
            1.. => {
                let held = self.member(id).held(slot);
                let now = held.checked_add(n).ok_or(Unbalanced::Overflow { slot })?;
                let change = self.slots.add_references(slot, n)?;
                self.member(id).add(slot, n)?;
                self.shares.note(id, slot, held, now, true);
                if change == IndexChange::Returns {
                    let listed = !self.is_unlisted(slot);
                    self.changes.push(Change::Revived { slot, listed });
                }
            }
            _ => {
                let held = self.member(id).held(slot);
                self.member(id).sub(slot, n)?;
                self.drop_member_references(id, slot, held, n);
            }
        }
        Ok(())
    }

    /// A member's connection has ended, and it can tell nothing any more: no slot waits for what it may have found. What it
    /// references stays until it leaves. [`Self::reclaim`] should follow.
    pub(crate) fn lose(&mut self, id: MemberId) {
        self.epochs.leave(id);
    }

    /// Drops the references of a member whose process has ended, some at a time. Returns whether there may be more to do;
    /// at the end the member is gone. [`Self::take_changes`] and [`Self::advance`] must follow each call.
    pub(crate) fn leave_some(&mut self, id: MemberId) -> bool {
        let Some(some) = self.members.get_mut(&id).and_then(References::take_some) else {
            self.members.remove(&id);
            self.orphans.remove(id);
            self.shares.leave(id);
            self.epochs.leave(id);
            return false;
        };
        // Of a chunk all are counted, or none.
        let counted = some
            .first()
            .is_some_and(|(slot, _)| self.orphans.counts(id, *slot));
        for (slot, n) in some {
            self.recounting([slot], |all| {
                if counted {
                    all.orphans.sub(slot, n);
                }
                all.drop_member_references(id, slot, n, n);
            });
        }
        true
    }

    /// Takes out what became of slots because of the last calls, in order.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// To be called when dropped slots have left the index: the new epoch, if there were any.
    pub(crate) fn advance(&mut self) -> Option<Epoch> {
        std::mem::take(&mut self.pending).then(|| self.epochs.advance())
    }

    /// The member reports what it had read before the lookups it has told about.
    pub(crate) fn acknowledge(&mut self, id: MemberId, epoch: Epoch) -> Result<(), EpochViolation> {
        self.epochs.acknowledge(id, epoch)
    }

    /// Frees what nobody can map any more. Consequences as for [`Self::apply`]: what a slot led to may have died.
    pub(crate) fn reclaim(&mut self) {
        if self.slots.limbo() > 0 {
            self.reclaim_until(self.epochs.quiescent());
        }
    }

    fn reclaim_until(&mut self, quiescent: Epoch) {
        let mut freed = Vec::new();
        self.slots.reclaim(quiescent, |slot| freed.push(slot));
        for slot in freed {
            self.unlisted.remove(&slot);
            if let Some(new) = self.moved.remove(&slot) {
                self.sources.remove(&(new, slot));
                self.drop_references(new, 1);
            }
        }
    }

    /// Whether all of some slots are free: nobody who can tell maps one, or is about to.
    pub(crate) fn are_free(&self, mut slots: impl Iterator<Item = Slot>) -> bool {
        slots.all(|slot| self.slots.state(slot) == SlotState::Free)
    }

    /// Slots have been dropped since the last [`Self::advance`].
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// Whether the slot can be found through the index.
    #[cfg(test)]
    pub(crate) fn is_found(&self, slot: Slot) -> bool {
        let within = |(first, followers): (&Slot, &u32)| {
            let past = first.number() + followers;
            (first.number()..=past).contains(&slot.number())
        };
        let listed = !self.is_unlisted(slot) && matches!(self.slots.state(slot), SlotState::Live(_));
        listed || self.series.iter().any(within)
    }

    /// What the model check must find out to be wrong.
    #[cfg(test)]
    pub(crate) fn reclaim_without_waiting(&mut self) {
        self.reclaim_until(Epoch::MAX);
    }

    pub(crate) fn bytes(&self) -> usize {
        // A set's node holds eleven entries.
        let sets = self.unlisted.len() * 8 + self.series.len() * 12 + self.moved.len() * 24;
        self.slots.bytes()
            + sets
            + self.orphans.bytes()
            + self.shares.bytes()
            + self.members.values().map(References::bytes).sum::<usize>()
    }

    /// A member that held so many references to a slot has given up `n` of them.
    fn drop_member_references(&mut self, id: MemberId, slot: Slot, held: u32, n: u32) {
        self.drop_references(slot, n);
        let others = matches!(self.slots.state(slot), SlotState::Live(_));
        self.shares.note(id, slot, held, held - n, others);
    }

    fn drop_references(&mut self, slot: Slot, n: u32) {
        let leaving = self.epochs.current() + 1;
        if self.slots.drop_references(slot, n, leaving) != IndexChange::Leaves {
            return;
        }
        self.pending = true;
        let listed = !self.is_unlisted(slot);
        self.changes.push(Change::Died { slot, listed });
        let followers = self.series.remove(&slot).unwrap_or(0);
        for follower in (1..=followers).filter_map(|n| slot.checked_add_in_segment(n)) {
            self.drop_references(follower, 1);
        }
    }

    fn member(&mut self, id: MemberId) -> &mut References {
        self.members.get_mut(&id).expect("only members have references")
    }
}

#[cfg(test)]
mod tests;
