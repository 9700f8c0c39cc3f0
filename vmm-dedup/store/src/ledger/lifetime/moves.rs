//! Pages that move to other slots, who is led there, and what orphans reference of them.

use super::Lifetime;
use crate::ledger::epochs::MemberId;
use crate::ledger::slots::NotLive;
use vmm_dedup_protocol::Slot;

impl Lifetime {
    /// The page of a slot has a copy in another one, which was free and takes its place in the index; if it was not there,
    /// `listed` says whether the new one is. Returns the slots whose pages had moved to the old one: they lead to the new one now.
    /// Consequences as for [`Self::apply`].
    pub(crate) fn relocate(&mut self, old: Slot, new: Slot, listed: bool) -> Vec<Slot> {
        self.slots.publish(new);
        if !listed {
            self.unlisted.insert(new);
        }
        let led = self.link(old, new);
        self.orphans_follow(old, new);
        led
    }

    /// As [`Self::relocate`], to a slot that holds the same page and is in use already.
    pub(crate) fn relocate_to_twin(&mut self, old: Slot, twin: Slot) -> Result<Vec<Slot>, NotLive> {
        let led = self.recounting([old, twin], |all| {
            all.slots.add_references(twin, 1)?;
            Ok(all.link(old, twin))
        })?;
        self.orphans_follow(old, twin);
        Ok(led)
    }

    /// As [`Self::relocate`], for a series, to as many consecutive slots that were free. Returns pairs of slots, old and new,
    /// of which the old ones lead to the new ones now.
    pub(crate) fn relocate_series(&mut self, old: Slot, new: Slot) -> Vec<(Slot, Slot)> {
        let followers = self.series.remove(&old).unwrap_or(0);
        self.series.insert(new, followers);
        let mut forwards = Vec::new();
        for n in 0..=followers {
            let (Some(from), Some(to)) = (old.checked_add_in_segment(n), new.checked_add_in_segment(n))
            else {
                break;
            };
            self.slots.publish(to);
            if n > 0 {
                self.unlisted.insert(to);
                // The first is the series's, the second the old slot's.
                let added = self.slots.add_references(to, 1);
                debug_assert!(added.is_ok(), "it was just published");
            }
            forwards.push((from, to));
            forwards.extend(self.link(from, to).into_iter().map(|source| (source, to)));
            if n > 0 {
                self.drop_references(from, 1);
            }
            self.orphans_follow(from, to);
        }
        forwards
    }

    /// An old slot leads to a new one, to which a reference was just taken for it.
    fn link(&mut self, old: Slot, new: Slot) -> Vec<Slot> {
        debug_assert!(old != new && !self.moved.contains_key(&old));
        self.unlisted.insert(old);
        self.moved.insert(old, new);
        self.sources.insert((new, old));
        let led: Vec<Slot> = self.sources_of(old).collect();
        for source in &led {
            self.sources.remove(&(old, *source));
            self.sources.insert((new, *source));
            self.moved.insert(*source, new);
            let added = self.slots.add_references(new, 1);
            debug_assert!(added.is_ok(), "it is live");
            self.drop_references(old, 1);
        }
        led
    }

    /// A member's connection broke, and its process may live: counts what it references as an orphan's, some at a time. Returns
    /// whether there is more to do. The member may leave before that.
    pub(crate) fn orphan_some(&mut self, id: MemberId) -> bool {
        let Some(references) = self.members.get(&id) else {
            return false;
        };
        let uncounted = self.orphans.uncounted(id).unwrap_or(references.chunks());
        let (left, some) = references.last_of(uncounted).unwrap_or_default();
        self.orphans.set_uncounted(id, left);
        for (slot, n) in some {
            self.recounting([slot], |all| all.orphans.add(slot, n));
            if let Some(new) = self.moved_to(slot) {
                self.recounting([slot, new], |all| all.follow(id, slot, new));
            }
        }
        left > 0
    }

    /// A page has moved, and with it what orphans reference of it.
    fn orphans_follow(&mut self, old: Slot, new: Slot) {
        // There may be thousands of orphans, and a thousand pages move at once.
        if self.orphans.held(old) == 0 {
            return;
        }
        let holds = |id: &MemberId| self.members.get(id).is_some_and(|all| all.held(old) > 0);
        for id in self.orphans.members().filter(holds).collect::<Vec<_>>() {
            self.recounting([old, new], |all| all.follow(id, old, new));
        }
    }

    /// What was counted as an orphan's reference to a slot is one to where its page is now.
    fn follow(&mut self, orphan: MemberId, old: Slot, new: Slot) {
        let (n, there) = (self.member(orphan).held(old), self.member(orphan).held(new));
        let Some(now) = there.checked_add(n) else {
            return;
        };
        if n == 0 || !self.orphans.counts(orphan, old) {
            return;
        }
        let added = self.slots.add_references(new, n);
        debug_assert!(added.is_ok(), "the old slot holds a reference");
        let moved = self.member(orphan).add(new, n).is_ok() && self.member(orphan).sub(old, n).is_ok();
        debug_assert!(moved, "so much it holds there, and may hold here");
        self.shares.note(orphan, new, there, now, true);
        self.orphans.sub(old, n);
        if self.orphans.counts(orphan, new) {
            self.orphans.add(new, n);
        }
        self.drop_member_references(orphan, old, n, n);
    }
}
