//! Numbers that nobody can foresee: the kernel's.

use std::collections::VecDeque;

/// Bytes that are asked for at once.
const BUFFER: usize = 256;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Dice(VecDeque<u64>);

impl Dice {
    /// A number below this one, which is less than 2^32: all as likely as another, but for one part in 2^32.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        ((self.next() >> 32) * end) >> 32
    }

    /// # Panics
    /// If the kernel has no random numbers, which it told the store to have when that began: a place that can be foreseen is none.
    fn next(&mut self) -> u64 {
        while self.0.is_empty() {
            let mut bytes = [0; BUFFER];
            let (filled, _) = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
                .map(|filled| bytes.split_at(filled))
                .expect("the kernel gives random numbers, as it did for the salt");
            let (numbers, _) = filled.as_chunks::<8>();
            self.0
                .extend(numbers.iter().map(|number| u64::from_ne_bytes(*number)));
        }
        self.0.pop_front().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_about_as_often() {
        let (mut dice, mut counts) = (Dice::default(), [0u32; 10]);
        (0..10_000).for_each(|_| counts[usize::try_from(dice.below(10)).unwrap()] += 1);
        // Six standard deviations.
        assert!(
            counts.iter().all(|count| (820..1180).contains(count)),
            "{counts:?}"
        );
    }
}
