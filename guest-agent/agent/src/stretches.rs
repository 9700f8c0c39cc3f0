//! Sets of frames, as ascending stretches that do not touch.

use std::ops::Range;

/// A set of frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameSet(Vec<Range<u64>>);

impl FrameSet {
    /// Of frames in any order, some maybe twice.
    #[must_use]
    pub fn of(mut frames: Vec<Range<u64>>) -> Self {
        frames.retain(|range| !range.is_empty());
        frames.sort_unstable_by_key(|range| range.start);
        let mut set: Vec<Range<u64>> = Vec::with_capacity(frames.len());
        for range in frames {
            match set.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => set.push(range),
            }
        }
        Self(set)
    }

    /// The stretches.
    #[must_use]
    pub fn stretches(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Whether there is no frame.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many frames.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        let mut others = other.0.iter().peekable();
        for range in &self.0 {
            let mut start = range.start;
            while let Some(other) = others.next_if(|other| other.end <= range.start) {
                debug_assert!(other.end <= start);
            }
            for other in others.clone().take_while(|other| other.start < range.end) {
                if start < other.start {
                    left.push(start..other.start);
                }
                start = start.max(other.end);
            }
            if start < range.end {
                left.push(start..range.end);
            }
        }
        Self(left)
    }

    /// Those that are in either.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        Self::of([&self.0[..], &other.0[..]].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set_of(ranges: &[(u64, u64)]) -> (FrameSet, BTreeSet<u64>) {
        let ranges: Vec<Range<u64>> = ranges.iter().map(|(start, len)| *start..start + len).collect();
        let plain = ranges.iter().cloned().flatten().collect();
        (FrameSet::of(ranges), plain)
    }

    fn frames(set: &FrameSet) -> BTreeSet<u64> {
        let touches = set.0.windows(2).any(|pair| pair[0].end >= pair[1].start);
        assert!(!touches && set.0.iter().all(|range| !range.is_empty()), "{set:?}");
        set.0.iter().cloned().flatten().collect()
    }

    proptest! {
        #[test]
        fn sets_do_what_sets_do(
            a in prop::collection::vec((0_u64..60, 0_u64..9), 0..9),
            b in prop::collection::vec((0_u64..60, 0_u64..9), 0..9),
        ) {
            let ((a, plain_a), (b, plain_b)) = (set_of(&a), set_of(&b));
            prop_assert_eq!(&frames(&a), &plain_a);
            prop_assert_eq!(a.len(), plain_a.len() as u64);
            prop_assert_eq!(frames(&a.without(&b)), plain_a.difference(&plain_b).copied().collect());
            prop_assert_eq!(frames(&a.with(&b)), plain_a.union(&plain_b).copied().collect());
        }
    }
}
