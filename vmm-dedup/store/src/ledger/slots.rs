//! The life of a slot, as a pure state machine: Free → Live(references) → Limbo(epoch) → Free, and from Limbo back
//! to Live when a reference arrives that was taken before the slot left the index. A slot that was live is published again
//! only in another segment of the same number.
//!
//! Eight bytes a slot, where a chunk of slots are not all free. The caller keeps the index in step: a slot leaves the index when it stops
//! being Live, and comes back when it is Live again. (`lifetime` knows of Live slots that are not in the index.)

use crate::ledger::chunks::Chunks;
use crate::ledger::epochs::Epoch;
use std::collections::VecDeque;
use vmm_dedup_protocol::Slot;

/// Where in its life a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Nobody who can tell maps it, and nobody can find it.
    Free,
    /// In the index, with this many references.
    Live(u64),
    /// Out of the index since this epoch; somebody who read the index before may still map it.
    Limbo(Epoch),
}

const KIND: u64 = 3;

/// The queue of slots in limbo keeps memory for so many.
const LEAST_QUEUE: usize = 1024;

impl SlotState {
    fn encode(self) -> u64 {
        match self {
            SlotState::Free => 0,
            SlotState::Live(refs) => refs << 2 | 1,
            SlotState::Limbo(epoch) => epoch << 2 | 2,
        }
    }

    fn decode(word: u64) -> Self {
        match word & KIND {
            0 => SlotState::Free,
            1 => SlotState::Live(word >> 2),
            _ => SlotState::Limbo(word >> 2),
        }
    }
}

/// What the caller has to do about the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexChange {
    /// Nothing.
    None,
    /// The last reference went: take the slot out of the index.
    Leaves,
    /// A reference came to a slot in limbo: put it back into the index.
    Returns,
}

/// A reference to a slot that holds no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{slot} holds no page: references may only be taken to slots found in the index")]
pub(crate) struct NotLive {
    /// Which one.
    pub(crate) slot: Slot,
}

/// All slots of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Slots {
    words: Chunks<u64>,
    /// Slots in the order of the epochs at which they entered limbo; some may have left it since.
    queue: VecDeque<(Epoch, Slot)>,
    live: u64,
    limbo: u64,
    references: u64,
}

impl Slots {
    pub(crate) fn state(&self, slot: Slot) -> SlotState {
        SlotState::decode(self.words.get(slot))
    }

    fn set(&mut self, slot: Slot, state: SlotState) {
        self.words.set(slot, state.encode());
    }

    /// A page was written into a free slot. Its publisher, or the slot that it moved from, has the first reference.
    pub(crate) fn publish(&mut self, slot: Slot) {
        assert_eq!(self.state(slot), SlotState::Free, "only free slots are written");
        self.set(slot, SlotState::Live(1));
        self.live += 1;
        self.references += 1;
    }

    /// Adds references.
    pub(crate) fn add_references(&mut self, slot: Slot, n: u32) -> Result<IndexChange, NotLive> {
        let n = u64::from(n);
        let (refs, change) = match self.state(slot) {
            SlotState::Free => return Err(NotLive { slot }),
            SlotState::Live(refs) => (refs + n, IndexChange::None),
            SlotState::Limbo(_) => {
                self.limbo -= 1;
                self.live += 1;
                (n, IndexChange::Returns)
            }
        };
        self.references += n;
        self.set(slot, SlotState::Live(refs));
        Ok(change)
    }

    /// Drops references that their owner is known to have. `leaving` is the epoch that the caller will advance to
    /// after it took what was dropped out of the index.
    pub(crate) fn drop_references(&mut self, slot: Slot, n: u32, leaving: Epoch) -> IndexChange {
        let SlotState::Live(refs) = self.state(slot) else {
            unreachable!("a slot with references is live")
        };
        let left = refs
            .checked_sub(u64::from(n))
            .expect("the owners' references add up to the slot's");
        self.references -= u64::from(n);
        if left > 0 {
            self.set(slot, SlotState::Live(left));
            return IndexChange::None;
        }
        self.set(slot, SlotState::Limbo(leaving));
        self.live -= 1;
        self.limbo += 1;
        self.queue.push_back((leaving, slot));
        self.compact();
        IndexChange::Leaves
    }

    /// Frees what left the index no later than `quiescent`.
    pub(crate) fn reclaim(&mut self, quiescent: Epoch, mut freed: impl FnMut(Slot)) {
        while let Some((epoch, slot)) = self.queue.front().copied()
            && epoch <= quiescent
        {
            self.queue.pop_front();
            if self.state(slot) == SlotState::Limbo(epoch) {
                self.set(slot, SlotState::Free);
                self.limbo -= 1;
                freed(slot);
            }
        }
        if self.queue.capacity() > LEAST_QUEUE.max(4 * self.queue.len()) {
            self.queue.shrink_to(2 * self.queue.len());
        }
    }

    /// A member that acknowledges nothing while slots come and go must not make the queue grow.
    fn compact(&mut self) {
        let limbo = usize::try_from(self.limbo).unwrap_or(usize::MAX);
        if self.queue.len() > limbo.saturating_mul(2).saturating_add(64) {
            let words = &self.words;
            self.queue
                .retain(|(epoch, slot)| words.get(*slot) == SlotState::Limbo(*epoch).encode());
            // Dropped, resurrected and dropped again within one epoch: once is enough.
            let mut seen = std::collections::HashSet::new();
            self.queue.retain(|entry| seen.insert(*entry));
        }
    }

    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    pub(crate) fn limbo(&self) -> u64 {
        self.limbo
    }

    /// References of all owners.
    pub(crate) fn references(&self) -> u64 {
        self.references
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words.bytes() + self.queue.capacity() * size_of::<(Epoch, Slot)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(n: u32) -> Slot {
        Slot::try_new(n).unwrap()
    }

    #[test]
    fn a_slot_lives_waits_and_is_freed() {
        let mut slots = Slots::default();
        slots.publish(slot(3));
        assert_eq!(slots.add_references(slot(3), 2), Ok(IndexChange::None));
        assert_eq!(slots.drop_references(slot(3), 2, 5), IndexChange::None);
        assert_eq!(slots.drop_references(slot(3), 1, 5), IndexChange::Leaves);
        assert_eq!(slots.state(slot(3)), SlotState::Limbo(5));
        slots.reclaim(4, |_| panic!("too early"));
        let mut freed = Vec::new();
        slots.reclaim(5, |s| freed.push(s));
        assert_eq!((freed, slots.state(slot(3))), (vec![slot(3)], SlotState::Free));
        assert_eq!((slots.live(), slots.limbo(), slots.references()), (0, 0, 0));
    }

    #[test]
    fn a_late_reference_brings_a_slot_back() {
        let mut slots = Slots::default();
        slots.publish(slot(0));
        slots.drop_references(slot(0), 1, 5);
        assert_eq!(slots.add_references(slot(0), 1), Ok(IndexChange::Returns));
        slots.reclaim(9, |_| panic!("it is live"));
        assert_eq!(slots.state(slot(0)), SlotState::Live(1));
    }

    #[test]
    fn free_slots_take_no_references() {
        let mut slots = Slots::default();
        assert_eq!(slots.add_references(slot(7), 1), Err(NotLive { slot: slot(7) }));
    }

    #[test]
    fn slots_that_are_free_again_take_no_memory() {
        const MANY: u32 = 100_000;
        let mut slots = Slots::default();
        for n in 0..MANY {
            slots.publish(slot(n));
            slots.drop_references(slot(n), 1, 5);
        }
        assert!(slots.bytes() > 2_000_000);
        slots.reclaim(5, |_| ());
        assert!(slots.bytes() < 20_000, "{}", slots.bytes());
    }

    #[test]
    fn the_queue_stays_small_while_nobody_acknowledges() {
        let mut slots = Slots::default();
        slots.publish(slot(0));
        for epoch in 2..100_000 {
            slots.drop_references(slot(0), 1, epoch);
            slots.add_references(slot(0), 1).unwrap();
        }
        assert!(slots.bytes() < 10_000);
    }
}
