//! What is remembered of each 2 MiB for the policy: use, repetition, what was asked.

use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE};
use std::time::Duration;
use vmm_dedup_protocol::key::Key;

/// A look at a huge page that was seen before and has not changed reads one page in so many (slide 12: 25 %).
pub(crate) const SAMPLING: usize = 4;

/// Intervals between two samples of a huge page that was used in all intervals lately.
const REST_OF_HOT: u8 = 3;

/// Samples within which the store makes a huge page of what is shared as one.
const PATIENCE_WITH_STORE: u8 = 2;

/// How much of a huge page the store was asked about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Nothing.
    #[default]
    Nothing,
    /// A quarter, and what looks repeated.
    Sample,
    /// Everything.
    Whole,
}

/// What a look at a huge page read: a fold of the keys of each quarter, if that was read.
pub(crate) type Folds = [Option<u16>; SAMPLING];

/// What a sample tells of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Nobody touched it.
    None,
    /// It was touched first after the guest had run for so long.
    After(Duration),
}

impl Use {
    /// It is in use, and nothing tells how often: as often as can be.
    pub(crate) const AT_ONCE: Self = Self::After(Duration::ZERO);
}

/// How often a 2 MiB range was used lately: one up for each interval in which it was, one down for each in which it was
/// not (slide 11), between 0 and 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Frequency(u8);

impl Frequency {
    /// Bounds how long a range that was hot for ever takes to be cold.
    const MAX: u8 = 7;
    /// Used in all intervals lately.
    pub(crate) const MOST: Self = Self(Self::MAX);

    /// Notes an interval.
    pub(crate) fn note(&mut self, accessed: bool) {
        self.0 = if accessed {
            (self.0 + 1).min(Self::MAX)
        } else {
            self.0.saturating_sub(1)
        };
    }

    pub(crate) fn value(self) -> u32 {
        u32::from(self.0)
    }
}

/// How long a guest runs before it uses a 2 MiB range, microseconds: a mean in which the last samples count most. Rare uses
/// come at random, so one sample tells little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pace(u16);

impl Pace {
    /// Bounds how much one sample tells, and stands for no use.
    const MAX: u16 = 4000;
    /// A sample counts one part in so many.
    const WEIGHT: u16 = 4;

    pub(crate) fn note(&mut self, used: Use) {
        let us = match used {
            Use::None => Self::MAX,
            Use::After(ran) => u16::try_from(ran.as_micros()).map_or(Self::MAX, |us| us.min(Self::MAX)),
        };
        self.0 = self.0 - self.0 / Self::WEIGHT + us / Self::WEIGHT;
    }

    pub(crate) fn us(self) -> u32 {
        u32::from(self.0)
    }
}

/// Part of [`crate::memory::chunk_state::ChunkState`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HugeState {
    /// Intervals with use.
    pub(crate) frequency: Frequency,
    /// How soon it is used.
    pub(crate) pace: Pace,
    /// Samples of its use since it became huge, or small, as far as that counts.
    pub(crate) samples: u8,
    /// Intervals to pass before it is sampled again.
    rest: u8,
    /// It was huge and we split it: to be watched, and built again when it is used.
    pub(crate) ours: bool,
    pub(crate) asked: Asked,
    /// Sharing broken here since its use was last sampled.
    pub(crate) breaks: u8,
    /// The same since it was split: most of them lie in mappings of their own.
    pub(crate) broken: u16,
    /// Intervals to wait before a failed rebuild is tried again.
    pub(crate) wait: u8,
    /// All of a sample had twins.
    pub(crate) likely_whole: bool,
    /// Quarter to be read at the next look; `None`: everything.
    next: Option<u8>,
    /// Subpages in each quarter that look repeated.
    repeated: [u8; SAMPLING],
    folds: [u16; SAMPLING],
}

impl HugeState {
    /// Quarters to be read now.
    pub(crate) fn quarters(&self) -> [bool; SAMPLING] {
        std::array::from_fn(|quarter| self.next.is_none_or(|next| usize::from(next) == quarter))
    }

    /// Whether the next look reads everything.
    pub(crate) fn looks_at_all(&self) -> bool {
        self.next.is_none()
    }

    /// Takes over what was read; whether it is what was read before. Goes on with the next quarter.
    pub(crate) fn remember(&mut self, folds: &Folds) -> bool {
        let mut same = true;
        for (known, new) in self.folds.iter_mut().zip(folds) {
            if let Some(new) = new {
                same &= known == new;
                *known = *new;
            }
        }
        let quarter = self.next.map_or(0, |next| (usize::from(next) + 1) % SAMPLING);
        self.next = u8::try_from(quarter).ok();
        same
    }

    /// It is small pages now.
    pub(crate) fn split_by_us(&mut self) {
        (self.ours, self.asked, self.next) = (true, Asked::Nothing, None);
        self.likely_whole = false;
        (self.breaks, self.broken, self.wait) = (0, 0, 0);
        (self.frequency, self.pace, self.samples, self.rest) = Default::default();
    }

    /// It is a huge page again, as hot as that takes.
    pub(crate) fn rebuilt(&mut self) {
        self.ours = false;
        (self.pace, self.samples, self.rest) = Default::default();
    }

    /// The next look reads everything.
    pub(crate) fn forget_sampling(&mut self) {
        self.next = None;
    }

    /// Notes how many subpages of a quarter look repeated.
    pub(crate) fn note_repeated(&mut self, quarter: usize, count: usize) {
        self.repeated[quarter] = u8::try_from(count).unwrap_or(u8::MAX);
    }

    /// Sharing was broken here.
    pub(crate) fn note_break(&mut self) {
        self.breaks = self.breaks.saturating_add(1);
        self.broken = self.broken.saturating_add(1);
    }

    /// Takes over a sample.
    pub(crate) fn note_use(&mut self, used: Use) {
        self.frequency.note(used != Use::None);
        self.pace.note(used);
        self.samples = self.samples.saturating_add(1);
        self.rest = if self.frequency == Frequency::MOST {
            REST_OF_HOT
        } else {
            0
        };
    }

    /// Whether a huge page is to be sampled in this interval. What has been hot for long is sampled less often, since each
    /// sample makes somebody wait.
    pub(crate) fn sample_due(&mut self) -> bool {
        let due = self.rest == 0;
        self.rest = self.rest.saturating_sub(1);
        due
    }

    /// It shares what may become a huge page of the store: whether to wait for that still.
    pub(crate) fn may_become_huge(&self) -> bool {
        self.samples < PATIENCE_WITH_STORE
    }

    /// Repetition rate: subpages that look repeated, of 512.
    pub(crate) fn repetition(&self) -> u32 {
        self.repeated.iter().map(|n| u32::from(*n)).sum()
    }
}

/// Quarters take every fourth subpage, so that each is a fair sample.
pub(crate) fn quarter_of(subpage: usize) -> usize {
    subpage % SAMPLING
}

/// Adds a key to a fold of keys.
#[allow(clippy::cast_possible_truncation)] // a fold
pub(crate) fn fold(all: u16, key: Key) -> u16 {
    let mixed = (key.raw() ^ u64::from(all)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as u16
}

const _: () = assert!(CHUNK_PAGES / SAMPLING <= u8::MAX as usize);
// Slide 20: 1/2^16 of memory for use and repetition.
const _: () = assert!(size_of::<HugeState>() <= HUGE_SIZE >> 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_pages_are_read_quarter_by_quarter() {
        let mut state = HugeState::default();
        assert_eq!(state.quarters(), [true; 4]);
        assert!(!state.remember(&[Some(1), Some(2), Some(3), Some(4)]));
        for quarter in [0, 1, 2, 3, 0] {
            assert_eq!(state.quarters().iter().position(|q| *q), Some(quarter));
            let mut folds = [None; 4];
            folds[quarter] = u16::try_from(quarter + 1).ok();
            assert!(state.remember(&folds));
        }
        assert!(!state.remember(&[None, Some(7), None, None]));
        state.forget_sampling();
        assert!(state.looks_at_all());
    }

    #[test]
    fn what_is_hot_for_long_is_sampled_every_fourth_time() {
        let mut state = HugeState::default();
        let mut due = |used| {
            let due = state.sample_due();
            if due {
                state.note_use(used);
            }
            due
        };
        let hot: Vec<bool> = (0..15).map(|_| due(Use::AT_ONCE)).collect();
        assert!(hot[..7].iter().all(|due| *due));
        assert_eq!(hot[7..], [false, false, false, true, false, false, false, true]);
        let cold: Vec<bool> = (0..8).map(|_| due(Use::None)).collect();
        assert_eq!(cold, [false, false, false, true, true, true, true, true]);
    }

    #[test]
    fn the_rate_is_the_sum_of_the_quarters() {
        let mut state = HugeState::default();
        (0..4).for_each(|quarter| state.note_repeated(quarter, 128));
        assert_eq!(state.repetition(), 512);
        state.note_repeated(2, 28);
        assert_eq!(state.repetition(), 412);
    }
}
