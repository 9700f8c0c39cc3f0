//! A mutator that does the same in every run.

/// Numbers that parsers get wrong.
const EDGES: [u64; 12] = [
    0,
    1,
    7,
    0x7f,
    0xff,
    0x200,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 48,
    1 << 63,
    u64::MAX,
];
/// Longest input.
const MOST_BYTES: usize = 70_000;

/// Makes inputs out of seeds.
#[derive(Debug)]
pub struct Mutator {
    seeds: Vec<Vec<u8>>,
    state: u64,
}

impl Mutator {
    /// With these seeds, of which there must be one at least.
    ///
    /// # Panics
    /// Without seeds.
    #[must_use]
    pub fn new(seeds: Vec<Vec<u8>>) -> Self {
        assert!(!seeds.is_empty(), "there is nothing to begin with");
        Self { seeds, state: 0 }
    }

    /// The next input: a seed with some changes.
    pub fn input(&mut self) -> Vec<u8> {
        let seed = self.below(self.seeds.len());
        let mut input = self.seeds[seed].clone();
        for _ in 0..=self.below(4) {
            self.change(&mut input);
        }
        input.truncate(MOST_BYTES);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let rest = input.len() - at;
        match self.below(8) {
            0 if rest > 0 => input[at] ^= 1 << self.below(8),
            1 if rest > 0 => input[at] = self.byte(),
            2 => input.truncate(at),
            3 => {
                let len = self.below(rest.min(16) + 1);
                input.drain(at..at + len);
            }
            4 => {
                let byte = self.byte();
                let len = self.below(16);
                input.splice(at..at, std::iter::repeat_n(byte, len));
            }
            5 => {
                let edge = EDGES[self.below(EDGES.len())].to_le_bytes();
                let len = [1, 2, 4, 8][self.below(4)].min(rest);
                input[at..at + len].copy_from_slice(&edge[..len]);
            }
            // A piece of the input once more, elsewhere.
            6 => {
                let from = self.below(input.len() + 1);
                let len = self.below((input.len() - from).min(300) + 1);
                let piece = input[from..from + len].to_vec();
                input.splice(at..at, piece);
            }
            // The end of another seed.
            _ => {
                let other = self.below(self.seeds.len());
                let from = self.below(self.seeds[other].len() + 1);
                input.truncate(at);
                input.extend_from_slice(&self.seeds[other][from..]);
            }
        }
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    #[allow(clippy::cast_possible_truncation)] // below limit
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn inputs_are_many_and_the_same_in_every_run() {
        let inputs = || {
            let mut mutator = Mutator::new(vec![b"one".to_vec(), b"the other".to_vec()]);
            (0..1000).map(|_| mutator.input()).collect::<Vec<_>>()
        };
        let first = inputs();
        assert_eq!(first, inputs());
        assert!(first.iter().collect::<HashSet<_>>().len() > 500);
    }

    #[test]
    fn an_empty_seed_is_changed_too() {
        let mut mutator = Mutator::new(vec![Vec::new()]);
        assert!((0..100).any(|_| !mutator.input().is_empty()));
    }
}
