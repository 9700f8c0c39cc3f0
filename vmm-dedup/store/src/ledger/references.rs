//! What one connection references: a count for every slot, in chunks so that a VM pays for the parts of the store
//! that it uses, and so that all of it can be dropped exactly.

use crate::ledger::chunks::Chunks;
use vmm_dedup_protocol::Slot;

/// Why a reference change is no possible one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unbalanced {
    /// More references dropped than held.
    #[error("{n} references to {slot} were dropped, but this connection holds {held}")]
    BelowZero {
        /// The slot.
        slot: Slot,
        /// References dropped.
        n: u32,
        /// References held.
        held: u32,
    },
    /// A count that no VM can have.
    #[error("{slot} has got more references than a count can hold")]
    Overflow {
        /// The slot.
        slot: Slot,
    },
}

/// References of one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct References {
    counts: Chunks<u32>,
    total: u64,
}

impl References {
    pub(crate) fn held(&self, slot: Slot) -> u32 {
        self.counts.get(slot)
    }

    pub(crate) fn add(&mut self, slot: Slot, n: u32) -> Result<(), Unbalanced> {
        let count = self.held(slot).checked_add(n);
        self.counts.set(slot, count.ok_or(Unbalanced::Overflow { slot })?);
        self.total += u64::from(n);
        Ok(())
    }

    pub(crate) fn sub(&mut self, slot: Slot, n: u32) -> Result<(), Unbalanced> {
        let held = self.held(slot);
        let left = held.checked_sub(n);
        let left = left.ok_or(Unbalanced::BelowZero { slot, n, held })?;
        self.counts.set(slot, left);
        self.total -= u64::from(n);
        Ok(())
    }

    /// Whether a slot of a segment is referenced.
    pub(crate) fn are_to_segment(&self, number: u32) -> bool {
        self.counts.has_any_of_segment(number)
    }

    /// How many chunks there are.
    pub(crate) fn chunks(&self) -> usize {
        self.counts.len()
    }

    /// The references to the slots of the last of the first chunks that holds some, and its number; `None`: no chunk does.
    pub(crate) fn last_of(&self, chunks: usize) -> Option<(usize, Vec<(Slot, u32)>)> {
        self.counts.last_of(chunks)
    }

    /// Takes out the references to the slots of one chunk, the last; `None` when nothing is left.
    pub(crate) fn take_some(&mut self) -> Option<Vec<(Slot, u32)>> {
        let taken = self.counts.take_last()?;
        self.total -= taken.iter().map(|(_, n)| u64::from(*n)).sum::<u64>();
        Some(taken)
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn bytes(&self) -> usize {
        self.counts.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::chunks::place;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((0u32..40, 1u32..4, any::<bool>()), 0..300)) {
            let (mut refs, mut model) = (References::default(), BTreeMap::<Slot, u32>::new());
            for (number, n, up) in steps {
                let slot = Slot::try_new(number).unwrap();
                let held = model.get(&slot).copied().unwrap_or(0);
                if up {
                    refs.add(slot, n).unwrap();
                    model.insert(slot, held + n);
                } else if held >= n {
                    refs.sub(slot, n).unwrap();
                    model.insert(slot, held - n);
                } else {
                    prop_assert_eq!(refs.sub(slot, n), Err(Unbalanced::BelowZero { slot, n, held }));
                }
            }
            prop_assert_eq!(refs.total(), model.values().map(|n| u64::from(*n)).sum::<u64>());
            model.retain(|_, n| *n > 0);
            let (mut read, mut chunks) = (BTreeMap::new(), refs.chunks());
            while let Some((chunk, some)) = refs.last_of(chunks) {
                prop_assert!(chunk < chunks && some.iter().all(|(slot, _)| place(*slot).0 == chunk));
                read.extend(some);
                chunks = chunk;
            }
            prop_assert_eq!(&read, &model);
            let mut taken = BTreeMap::new();
            while let Some(some) = refs.take_some() {
                taken.extend(some);
            }
            prop_assert_eq!(taken, model);
            prop_assert_eq!(refs.total(), 0);
        }
    }

    #[test]
    fn counts_do_not_wrap() {
        let mut refs = References::default();
        let slot = Slot::try_new(0).unwrap();
        refs.add(slot, u32::MAX).unwrap();
        assert_eq!(refs.add(slot, 1), Err(Unbalanced::Overflow { slot }));
        assert_eq!(refs.held(slot), u32::MAX);
    }
}
