//! What one connection references: a count for every slot, in chunks so that a VM pays for the parts of the store
//! that it uses, and so that all of it can be dropped exactly.

use vmm_dedup_protocol::Slot;

/// Slots of one chunk. Small in unit tests, so that they cross chunks and the model check copies little.
pub(super) const CHUNK: usize = if cfg!(test) { 2 } else { 1024 };

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

/// The references that a chunk holds.
#[allow(clippy::cast_possible_truncation)] // slot numbers are 32 bits
fn held_of(chunk: usize, counts: &[u32; CHUNK]) -> Vec<(Slot, u32)> {
    let held = counts.iter().enumerate().filter(|(_, n)| **n > 0);
    held.filter_map(|(at, n)| Some((Slot::try_new((chunk * CHUNK + at) as u32)?, *n)))
        .collect()
}

/// References of one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct References {
    chunks: Vec<Option<Box<[u32; CHUNK]>>>,
    total: u64,
}

/// A slot's chunk, and its place in it.
pub(super) fn place(slot: Slot) -> (usize, usize) {
    let n = slot.number() as usize;
    (n / CHUNK, n % CHUNK)
}

impl References {
    pub(crate) fn held(&self, slot: Slot) -> u32 {
        let (chunk, at) = place(slot);
        self.chunks
            .get(chunk)
            .and_then(Option::as_deref)
            .map_or(0, |counts| counts[at])
    }

    pub(crate) fn add(&mut self, slot: Slot, n: u32) -> Result<(), Unbalanced> {
        let (chunk, at) = place(slot);
        if self.chunks.len() <= chunk {
            self.chunks.resize_with(chunk + 1, || None);
        }
        let count = &mut self.chunks[chunk].get_or_insert_with(|| Box::new([0; CHUNK]))[at];
        *count = count.checked_add(n).ok_or(Unbalanced::Overflow { slot })?;
        self.total += u64::from(n);
        Ok(())
    }

    pub(crate) fn sub(&mut self, slot: Slot, n: u32) -> Result<(), Unbalanced> {
        let (chunk, at) = place(slot);
        let Some(Some(counts)) = self.chunks.get_mut(chunk) else {
            return Err(Unbalanced::BelowZero { slot, n, held: 0 });
        };
        let held = counts[at];
        counts[at] = held
            .checked_sub(n)
            .ok_or(Unbalanced::BelowZero { slot, n, held })?;
        self.total -= u64::from(n);
        Ok(())
    }

    /// How many chunks there are.
    pub(crate) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// The references to the slots of the last of the first chunks that holds some, and its number; `None`: no chunk does.
    pub(crate) fn last_of(&self, chunks: usize) -> Option<(usize, Vec<(Slot, u32)>)> {
        let first = self.chunks.iter().take(chunks).enumerate();
        let (chunk, counts) = first
            .rev()
            .find_map(|(n, counts)| Some((n, counts.as_deref()?)))?;
        Some((chunk, held_of(chunk, counts)))
    }

    /// Takes out the references to the slots of one chunk, the last; `None` when nothing is left.
    pub(crate) fn take_some(&mut self) -> Option<Vec<(Slot, u32)>> {
        loop {
            let counts = self.chunks.pop()?;
            let Some(counts) = counts else { continue };
            let taken = held_of(self.chunks.len(), &counts);
            self.total -= taken.iter().map(|(_, n)| u64::from(*n)).sum::<u64>();
            return Some(taken);
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn bytes(&self) -> usize {
        self.chunks.iter().flatten().count() * CHUNK * 4 + self.chunks.capacity() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
