//! What the scanner remembers of each 2 MiB.

/// State of a chunk, 24 bytes for 512 pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChunkState {
    /// Something may have happened here since the last visit.
    pub(crate) pending: bool,
    /// The kernel may have copied shared pages here since that was looked for.
    pub(crate) unchecked: bool,
    /// Mapped by one huge page at the last visit. Such a chunk is never write-protected.
    pub(crate) huge: bool,
    /// The pages' keys were taken while the chunk was huge, so that none is protected yet.
    pub(crate) unarmed: bool,
    /// Enough twins were found to split the huge page.
    pub(crate) split: bool,
    /// Passes between two looks at a huge page's keys.
    pub(crate) patience: u8,
    /// Passes left until the next.
    pub(crate) rest: u8,
    /// Pages found written twice in a row at the last visit.
    pub(crate) volatile: u16,
    /// Pages of a huge page with a known twin.
    pub(crate) twins: u16,
    /// Boundaries between mappings.
    pub(crate) fragments: u16,
    /// Fold of all keys at the last look.
    pub(crate) digest: u64,
}

/// Longest time between two looks at a huge page that does not change, in passes.
const MAX_PATIENCE: u8 = 64;
/// Fragments that a visit in every pass is worth.
const FRAGMENTS_PER_PASS: u16 = 32;
/// Longest time between two visits of a fragmented chunk, in passes.
pub(crate) const MAX_PERIOD: u64 = 16;

impl ChunkState {
    /// Passes from one visit to the next: what walking the chunk costs the kernel goes with its mappings, so
    /// fragmented ones are visited less often, up to every [`MAX_PERIOD`]th pass.
    pub(crate) fn period(&self) -> u64 {
        u64::from(self.fragments / FRAGMENTS_PER_PASS)
            .next_power_of_two()
            .min(MAX_PERIOD)
    }

    /// Whether the keys of a huge page are to be read in this pass.
    pub(crate) fn look_due(&mut self) -> bool {
        match self.rest {
            0 => true,
            _ => {
                self.rest -= 1;
                false
            }
        }
    }

    /// Notes a look at a huge page's keys; returns whether they were the same last time.
    pub(crate) fn looked(&mut self, digest: u64) -> bool {
        let same = self.digest == digest && self.patience > 0;
        self.digest = digest;
        self.patience = if same {
            (self.patience * 2).min(MAX_PATIENCE)
        } else {
            1
        };
        self.rest = self.patience - 1;
        same
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unchanged_huge_page_is_looked_at_ever_less() {
        let mut chunk = ChunkState::default();
        let looks: Vec<u32> = (0..40)
            .filter(|_| {
                chunk.look_due() && {
                    chunk.looked(7);
                    true
                }
            })
            .collect();
        assert_eq!(looks, [0, 1, 3, 7, 15, 31]);
    }

    #[test]
    fn a_changed_one_is_looked_at_again_at_once() {
        let mut chunk = ChunkState::default();
        assert!(!chunk.looked(7) && chunk.looked(7) && !chunk.looked(8));
        assert!(chunk.look_due());
    }

    #[test]
    fn fragments_lengthen_the_period() {
        let period = |fragments| {
            ChunkState {
                fragments,
                ..ChunkState::default()
            }
            .period()
        };
        assert_eq!([0, 31, 64, 512, 1024].map(period), [1, 1, 2, 16, 16]);
    }
}
