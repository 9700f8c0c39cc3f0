//! In which order blocks are looked at: round after round, those that do not change less and less often.

use std::ops::Range;

/// Blocks that are looked at in one step.
pub const STEP: u32 = 8;
/// A block that stays the same is looked at in every 2^CALMEST-th round at last.
const CALMEST: u8 = 3;

/// See the module's text.
#[derive(Debug)]
pub struct Walk {
    memory: Vec<Range<u32>>,
    /// How often each block was the same, up to [`CALMEST`].
    calm: Vec<u8>,
    next: u32,
    round: u32,
}

impl Walk {
    /// Over these blocks, which are ascending.
    #[must_use]
    pub fn new(memory: Vec<Range<u32>>) -> Self {
        let end = memory.last().map_or(0, |last| last.end);
        Self {
            memory,
            calm: vec![0; end as usize],
            next: 0,
            round: 0,
        }
    }

    /// One more than the highest block.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.memory.last().map_or(0, |last| last.end)
    }

    /// Blocks with memory.
    pub fn blocks(&self) -> impl Iterator<Item = u32> {
        self.memory.iter().cloned().flatten()
    }

    /// The next blocks to be looked at, at most [`STEP`]; `None` at the end of the round. Each is due if `all` is true.
    pub fn next(&mut self, all: bool) -> Option<Range<u32>> {
        let round = self.round;
        let due = |block: u32| {
            let calm = self.calm[block as usize];
            // Different blocks in different rounds.
            all || round.wrapping_add(block).is_multiple_of(1 << calm)
        };
        for memory in self.memory.iter().filter(|memory| memory.end > self.next) {
            let from = memory.start.max(self.next);
            if let Some(start) = (from..memory.end).find(|block| due(*block)) {
                let most = memory.end.min(start + STEP);
                let end = (start + 1..most).find(|block| !due(*block)).unwrap_or(most);
                self.next = end;
                return Some(start..end);
            }
        }
        (self.next, self.round) = (0, round.wrapping_add(1));
        None
    }

    /// These blocks could not be told: they come next.
    pub fn put_back(&mut self, block: u32) {
        self.next = self.next.min(block);
    }

    /// Whether a block was another one than at the last look.
    pub fn looked(&mut self, block: u32, changed: bool) {
        let calm = &mut self.calm[block as usize];
        *calm = if changed { 0 } else { (*calm + 1).min(CALMEST) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(walk: &mut Walk, all: bool) -> Vec<u32> {
        std::iter::from_fn(|| walk.next(all)).flatten().collect()
    }

    #[test]
    fn a_round_goes_over_all_memory_in_steps() {
        let mut walk = Walk::new(vec![0..3, 10..30]);
        let steps: Vec<Range<u32>> = std::iter::from_fn(|| walk.next(false)).collect();
        assert_eq!(steps, [0..3, 10..18, 18..26, 26..30]);
        assert_eq!((walk.end(), walk.blocks().count()), (30, 23));
    }

    #[test]
    fn what_stays_the_same_is_looked_at_every_eighth_time() {
        let mut walk = Walk::new(std::iter::once(0..16).collect());
        for _ in 0..20 {
            for block in round(&mut walk, false) {
                walk.looked(block, block == 5);
            }
        }
        let mut seen = [0; 16];
        for _ in 0..8 {
            round(&mut walk, false)
                .into_iter()
                .for_each(|block| seen[block as usize] += 1);
        }
        let expected: [i32; 16] = std::array::from_fn(|block| if block == 5 { 8 } else { 1 });
        assert_eq!(seen, expected);
        assert_eq!(round(&mut walk, true).len(), 16);
    }

    #[test]
    fn what_could_not_be_told_comes_next() {
        let mut walk = Walk::new(std::iter::once(0..20).collect());
        assert_eq!(walk.next(false), Some(0..8));
        walk.put_back(6);
        assert_eq!(walk.next(false), Some(6..14));
    }
}
