//! A number for every slot, zero for most, in chunks: memory is taken for the parts of the store that are used, and given back.

use vmm_dedup_protocol::{SLOTS_PER_SEGMENT, Slot};

/// Slots of one chunk. Small in unit tests, so that they cross chunks and the model check copies little.
pub(super) const CHUNK: usize = if cfg!(test) { 2 } else { 1024 };

/// A slot's chunk, and its place in it.
pub(super) fn place(slot: Slot) -> (usize, usize) {
    let n = slot.number() as usize;
    (n / CHUNK, n % CHUNK)
}

/// The numbers of some consecutive slots, not all zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Chunk<T> {
    /// How many are not zero.
    used: usize,
    numbers: [T; CHUNK],
}

/// A number for every slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Chunks<T> {
    /// The last one is there.
    chunks: Vec<Option<Box<Chunk<T>>>>,
}

impl<T: Copy + Default + PartialEq> Chunks<T> {
    pub(super) fn get(&self, slot: Slot) -> T {
        let (chunk, at) = place(slot);
        let there = self.chunks.get(chunk).and_then(Option::as_ref);
        there.map_or_else(T::default, |chunk| chunk.numbers[at])
    }

    pub(super) fn set(&mut self, slot: Slot, number: T) {
        let (chunk, at) = place(slot);
        let is_zero = number == T::default();
        if self.chunks.len() <= chunk {
            if is_zero {
                return;
            }
            self.chunks.resize_with(chunk + 1, || None);
        }
        let place = &mut self.chunks[chunk];
        if is_zero && place.is_none() {
            return;
        }
        let there = place.get_or_insert_with(|| {
            let numbers = [T::default(); CHUNK];
            Box::new(Chunk { used: 0, numbers })
        });
        let was_zero = std::mem::replace(&mut there.numbers[at], number) == T::default();
        there.used = there.used + usize::from(was_zero) - usize::from(is_zero);
        if there.used == 0 {
            *place = None;
            self.trim();
        }
    }

    /// Whether a number of some slot of a segment is not zero.
    pub(super) fn has_any_of_segment(&self, number: u32) -> bool {
        const { assert!((SLOTS_PER_SEGMENT as usize).is_multiple_of(CHUNK)) }
        let of_each = SLOTS_PER_SEGMENT as usize / CHUNK;
        let chunks = self.chunks.iter().skip(number as usize * of_each);
        chunks.take(of_each).any(Option::is_some)
    }

    /// One more than the number of the last chunk that is not all zero.
    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The last of the first chunks that is not all zero: its number, and its slots whose numbers are not zero.
    pub(super) fn last_of(&self, chunks: usize) -> Option<(usize, Vec<(Slot, T)>)> {
        let first = self.chunks.iter().take(chunks).enumerate();
        let (n, chunk) = first.rev().find_map(|(n, chunk)| Some((n, chunk.as_deref()?)))?;
        Some((n, used(n, chunk)))
    }

    /// Takes out the last chunk: its slots whose numbers are not zero.
    pub(super) fn take_last(&mut self) -> Option<Vec<(Slot, T)>> {
        let chunk = self.chunks.pop()??;
        let taken = used(self.chunks.len(), &chunk);
        self.trim();
        Some(taken)
    }

    fn trim(&mut self) {
        while let Some(None) = self.chunks.last() {
            self.chunks.pop();
        }
        if self.chunks.capacity() > 64.max(4 * self.chunks.len()) {
            self.chunks.shrink_to(2 * self.chunks.len());
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.iter().flatten().count() * size_of::<Chunk<T>>() + self.chunks.capacity() * 8
    }
}

#[allow(clippy::cast_possible_truncation)] // slot numbers are 32 bits
fn used<T: Copy + Default + PartialEq>(n: usize, chunk: &Chunk<T>) -> Vec<(Slot, T)> {
    let numbers = chunk.numbers.iter().enumerate();
    numbers
        .filter(|(_, number)| **number != T::default())
        .filter_map(|(at, number)| Some((Slot::try_new((n * CHUNK + at) as u32)?, *number)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_zero_again_takes_no_memory() {
        let mut chunks = Chunks::<u64>::default();
        let slot = |n| Slot::try_new(n).unwrap();
        for n in 0..1000 {
            chunks.set(slot(n), 1);
        }
        assert!(chunks.bytes() >= 1000 * 8 && chunks.len() == 1000 / CHUNK);
        // From the middle on, then the rest: nothing is left in between.
        for n in (500..1000).chain(0..500) {
            chunks.set(slot(n), 0);
        }
        assert_eq!((chunks.len(), chunks.get(slot(7))), (0, 0));
        assert!(chunks.bytes() <= 64 * 8, "{}", chunks.bytes());
        chunks.set(slot(3), 0);
        assert_eq!(chunks, Chunks::default());
    }

    #[test]
    fn a_segments_slots_are_its_own() {
        let mut chunks = Chunks::<u32>::default();
        for at in [SLOTS_PER_SEGMENT, 2 * SLOTS_PER_SEGMENT - 1] {
            chunks.set(Slot::try_new(at).unwrap(), 1);
            assert_eq!(
                [0, 1, 2].map(|n| chunks.has_any_of_segment(n)),
                [false, true, false]
            );
            chunks.set(Slot::try_new(at).unwrap(), 0);
        }
        assert!(!chunks.has_any_of_segment(1));
    }
}
