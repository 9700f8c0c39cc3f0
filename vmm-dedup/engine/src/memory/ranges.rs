//! Ranges of addresses.

use std::ops::Range;

/// What of `whole` is not in `parts`, which are in order.
pub(crate) fn complement(whole: &Range<usize>, parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut at = whole.start;
    let mut rest = Vec::new();
    for part in parts.iter().cloned().chain(std::iter::once(whole.end..whole.end)) {
        if part.start > at {
            rest.push(at..part.start);
        }
        at = at.max(part.end);
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complement_is_the_rest() {
        assert_eq!(complement(&(0..10), &[2..3, 5..7]), [0..2, 3..5, 7..10]);
        assert_eq!(complement(&(0..10), std::slice::from_ref(&(0..10))), []);
        assert!(complement(&(0..10), &[]).into_iter().eq(std::iter::once(0..10)));
    }
}
