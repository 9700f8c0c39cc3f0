//! Ranges of addresses.

use std::ops::Range;

/// What of `whole` is not in `parts`, which are in order.
pub(crate) fn complement(whole: &Range<usize>, parts: &[Range<usize>]) -> Vec<Range<usize>> {
    gaps(whole, parts).collect()
}

/// As [`complement`], for whoever must not ask for memory.
pub(crate) fn gaps<'a>(
    whole: &Range<usize>,
    parts: &'a [Range<usize>],
) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let mut at = whole.start;
    let parts = parts.iter().cloned().chain(std::iter::once(whole.end..whole.end));
    parts.filter_map(move |part| {
        let gap = at..part.start;
        at = at.max(part.end);
        (!gap.is_empty()).then_some(gap)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complement_is_the_rest() {
        assert_eq!(complement(&(0..10), &[2..3, 5..7]), [0..2, 3..5, 7..10]);
        assert!(complement(&(0..10), std::slice::from_ref(&(0..10))).is_empty());
        assert!(complement(&(0..10), &[]).into_iter().eq(std::iter::once(0..10)));
    }
}
