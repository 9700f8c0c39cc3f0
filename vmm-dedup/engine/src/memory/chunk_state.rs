//! What the scanner remembers of each 2 MiB.

use crate::memory::thp_state::{Folds, HugeState};

/// State of a chunk, 52 bytes for 512 pages.
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
    /// Lent to somebody else: not looked at, see [`crate::scan::hotplug`].
    pub(crate) released: bool,
    /// Enough twins were found to split the huge page.
    pub(crate) split: bool,
    /// Passes between two looks at a huge page's keys.
    pub(crate) patience: u8,
    /// Passes left until the next.
    pub(crate) rest: u8,
    /// How often somebody waited for the huge page while it was away to be merged as one, since it last changed.
    pub(crate) wanted: u8,
    /// Pages of a huge page with a known twin.
    pub(crate) twins: u16,
    /// Boundaries between mappings.
    pub(crate) fragments: u16,
    /// The pass in which pages that are held back are to be merged; 0: none are.
    pub(crate) ripe_at: u32,
    /// The pass in which pages may be held back no longer.
    pub(crate) latest: u32,
    /// What the policy for mixed pages knows.
    pub(crate) mixed: HugeState,
}

const _: () = assert!(size_of::<ChunkState>() <= 52);

/// Longest time between two looks at a huge page that does not change, in passes.
const MAX_PATIENCE: u8 = 64;
/// Passes for which nothing new must have come to a chunk before its scattered twins are merged. By then a page without a
/// twin has had a chance to find one.
const CALM_PASSES: u32 = 3;
/// Longest time that a page with a twin waits for that.
const MOST_HELD_PASSES: u32 = 8;
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

    /// Holds pages back from merging, until nothing new has come for some passes.
    pub(crate) fn hold(&mut self, pass: u64) {
        if self.ripe_at == 0 {
            let now = u32::try_from(pass).unwrap_or(u32::MAX);
            self.ripe_at = now.saturating_add(CALM_PASSES);
            self.latest = now.saturating_add(MOST_HELD_PASSES);
        }
    }

    /// Something new has come: what is held back waits on.
    pub(crate) fn stir(&mut self, pass: u64) {
        if self.ripe_at != 0 {
            let now = u32::try_from(pass).unwrap_or(u32::MAX);
            self.ripe_at = now.saturating_add(CALM_PASSES).min(self.latest);
        }
    }

    /// Whether what was held back is to be merged in this pass.
    pub(crate) fn is_ripe(&self, pass: u64) -> bool {
        self.ripe_at != 0 && pass >= self.ripe_at.into()
    }

    /// The end of a pass: what was ripe has been merged.
    pub(crate) fn end_pass(&mut self, pass: u64) {
        if self.is_ripe(pass) {
            self.ripe_at = 0;
        }
    }

    /// The chunk's huge page was split: it is tracked from now on.
    pub(crate) fn note_split(&mut self) {
        (self.huge, self.unarmed, self.pending) = (false, true, true);
        (self.patience, self.rest) = (0, 0);
        self.forget_twins();
        self.mixed.split_by_us();
    }

    /// What was known of twins does not hold any more.
    pub(crate) fn forget_twins(&mut self) {
        (self.split, self.twins, self.wanted) = (false, 0, 0);
    }

    /// The huge page was taken to be merged, and stayed one. Whether it is worth it will be asked again.
    pub(crate) fn stayed_huge(&mut self) {
        (self.split, self.twins) = (false, 0);
        self.look_again();
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

    /// Notes a look at a huge page's keys, of which these folds were taken; returns whether they were the same last time.
    pub(crate) fn looked(&mut self, folds: &Folds) -> bool {
        let same = self.mixed.remember(folds) && self.patience > 0;
        if !same {
            self.mixed.forget_sampling();
            self.wanted = 0;
        }
        self.patience = if same {
            (self.patience * 2).min(MAX_PATIENCE)
        } else {
            1
        };
        self.rest = self.patience - 1;
        same
    }

    /// Lets the next pass look at the whole huge page.
    pub(crate) fn look_again(&mut self) {
        self.rest = 0;
        self.mixed.forget_sampling();
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
                    chunk.looked(&[Some(7); 4]);
                    true
                }
            })
            .collect();
        assert_eq!(looks, [0, 1, 3, 7, 15, 31]);
    }

    #[test]
    fn a_changed_one_is_looked_at_again_at_once() {
        let mut chunk = ChunkState::default();
        assert!(!chunk.looked(&[Some(7); 4]) && chunk.looked(&[Some(7); 4]) && !chunk.looked(&[Some(8); 4]));
        assert!(chunk.look_due());
    }

    #[test]
    fn a_chunk_is_ripe_when_calm_and_not_put_off_for_ever() {
        let mut chunk = ChunkState::default();
        chunk.stir(1);
        assert!(!chunk.is_ripe(100));
        chunk.hold(1);
        chunk.hold(3);
        assert!(!chunk.is_ripe(3) && chunk.is_ripe(4));
        let ripe = (3..).find(|pass| {
            chunk.stir(*pass);
            chunk.is_ripe(*pass)
        });
        assert_eq!(ripe, Some(9));
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
