//! The life of a slot, as a pure state machine: Free → Live(references) → Limbo(epoch) → Free, and from Limbo back
//! to Live when a reference arrives that was taken before the slot left the index.
//!
//! Eight bytes a slot. The caller keeps the index in step: a slot is in the index exactly while it is Live.

use crate::epochs::Epoch;
use std::collections::VecDeque;
use vmm_dedup_protocol::Slot;

/// Where in its life a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Nobody maps it; its bytes may be rewritten.
    Free,
    /// In the index, with this many references.
    Live(u64),
    /// Out of the index since this epoch; somebody who read the index before may still map it.
    Limbo(Epoch),
}

const KIND: u64 = 3;

impl State {
    fn encode(self) -> u64 {
        match self {
            State::Free => 0,
            State::Live(refs) => refs << 2 | 1,
            State::Limbo(epoch) => epoch << 2 | 2,
        }
    }

    fn decode(word: u64) -> Self {
        match word & KIND {
            0 => State::Free,
            1 => State::Live(word >> 2),
            _ => State::Limbo(word >> 2),
        }
    }
}

/// What the caller has to do about the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// The last reference went: take the slot out of the index.
    Dropped,
    /// A reference came to a slot in limbo: put it back into the index.
    Resurrected,
}

/// A reference to a slot that holds no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{slot} holds no page: references may only be taken to slots found in the index")]
pub struct NotLive {
    /// Which one.
    pub(crate) slot: Slot,
}

/// All slots of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Slots {
    words: Vec<u64>,
    /// Slots in the order of the epochs at which they entered limbo; some may have left it since.
    queue: VecDeque<(Epoch, Slot)>,
    live: u64,
    limbo: u64,
    references: u64,
}

impl Slots {
    pub(crate) fn state(&self, slot: Slot) -> State {
        State::decode(self.words.get(slot.number() as usize).copied().unwrap_or(0))
    }

    fn set(&mut self, slot: Slot, state: State) {
        let at = slot.number() as usize;
        if self.words.len() <= at {
            self.words.resize(at + 1, 0);
        }
        self.words[at] = state.encode();
    }

    /// A page was written into a free slot; its publisher has the first reference.
    pub(crate) fn publish(&mut self, slot: Slot) {
        assert_eq!(self.state(slot), State::Free, "only free slots are written");
        self.set(slot, State::Live(1));
        self.live += 1;
        self.references += 1;
    }

    /// Adds references.
    pub(crate) fn reference(&mut self, slot: Slot, n: u32) -> Result<Change, NotLive> {
        let n = u64::from(n);
        let (refs, change) = match self.state(slot) {
            State::Free => return Err(NotLive { slot }),
            State::Live(refs) => (refs + n, Change::None),
            State::Limbo(_) => {
                self.limbo -= 1;
                self.live += 1;
                (n, Change::Resurrected)
            }
        };
        self.references += n;
        self.set(slot, State::Live(refs));
        Ok(change)
    }

    /// Drops references that their owner is known to have. `leaving` is the epoch that the caller will advance to
    /// after it took what was dropped out of the index.
    pub(crate) fn release(&mut self, slot: Slot, n: u32, leaving: Epoch) -> Change {
        let State::Live(refs) = self.state(slot) else {
            unreachable!("a slot with references is live")
        };
        let left = refs
            .checked_sub(u64::from(n))
            .expect("the owners' references add up to the slot's");
        self.references -= u64::from(n);
        if left > 0 {
            self.set(slot, State::Live(left));
            return Change::None;
        }
        self.set(slot, State::Limbo(leaving));
        self.live -= 1;
        self.limbo += 1;
        self.queue.push_back((leaving, slot));
        self.compact();
        Change::Dropped
    }

    /// Frees what left the index no later than `quiescent`.
    pub(crate) fn reclaim(&mut self, quiescent: Epoch, mut freed: impl FnMut(Slot)) {
        while let Some((epoch, slot)) = self.queue.front().copied()
            && epoch <= quiescent
        {
            self.queue.pop_front();
            if self.state(slot) == State::Limbo(epoch) {
                self.set(slot, State::Free);
                self.limbo -= 1;
                freed(slot);
            }
        }
    }

    /// A member that acknowledges nothing while slots come and go must not make the queue grow.
    fn compact(&mut self) {
        let limbo = usize::try_from(self.limbo).unwrap_or(usize::MAX);
        if self.queue.len() > limbo.saturating_mul(2).saturating_add(64) {
            let words = &self.words;
            self.queue
                .retain(|(epoch, slot)| words[slot.number() as usize] == State::Limbo(*epoch).encode());
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
        self.words.capacity() * 8 + self.queue.capacity() * size_of::<(Epoch, Slot)>()
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
        assert_eq!(slots.reference(slot(3), 2), Ok(Change::None));
        assert_eq!(slots.release(slot(3), 2, 5), Change::None);
        assert_eq!(slots.release(slot(3), 1, 5), Change::Dropped);
        assert_eq!(slots.state(slot(3)), State::Limbo(5));
        slots.reclaim(4, |_| panic!("too early"));
        let mut freed = Vec::new();
        slots.reclaim(5, |s| freed.push(s));
        assert_eq!((freed, slots.state(slot(3))), (vec![slot(3)], State::Free));
        assert_eq!((slots.live(), slots.limbo(), slots.references()), (0, 0, 0));
    }

    #[test]
    fn a_late_reference_brings_a_slot_back() {
        let mut slots = Slots::default();
        slots.publish(slot(0));
        slots.release(slot(0), 1, 5);
        assert_eq!(slots.reference(slot(0), 1), Ok(Change::Resurrected));
        slots.reclaim(9, |_| panic!("it is live"));
        assert_eq!(slots.state(slot(0)), State::Live(1));
    }

    #[test]
    fn free_slots_take_no_references() {
        let mut slots = Slots::default();
        assert_eq!(slots.reference(slot(7), 1), Err(NotLive { slot: slot(7) }));
    }

    #[test]
    fn the_queue_stays_small_while_nobody_acknowledges() {
        let mut slots = Slots::default();
        slots.publish(slot(0));
        for epoch in 2..100_000 {
            slots.release(slot(0), 1, epoch);
            slots.reference(slot(0), 1).unwrap();
        }
        assert!(slots.bytes() < 10_000);
    }
}
