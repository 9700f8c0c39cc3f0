//! Memory as the device sees it: lines of pages.

use crate::scan_table::Ppn;
use std::cmp::Ordering;

/// Bytes of a line.
pub const LINE_BYTES: usize = 64;
/// Lines of a page.
pub const PAGE_LINES: usize = 64;

/// A line that was read: 8 words in memory order.
pub type Line = [u64; 8];

/// Where the device reads. What it reads may change at any time; a line that changes while it is read may come torn.
pub trait Memory {
    /// Reads a line (below [`PAGE_LINES`]) of a page; `None` if there is no memory that the device may read.
    fn line(&self, page: Ppn, line: usize) -> Option<Line>;
}

/// Compares lines as `memcmp` does: by the first byte that differs.
pub(crate) fn compare_lines(a: &Line, b: &Line) -> Ordering {
    match a.iter().zip(b).find(|(a, b)| a != b) {
        None => Ordering::Equal,
        Some((a, b)) => a.to_ne_bytes().cmp(&b.to_ne_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lines_are_ordered_as_their_bytes(a: [u8; LINE_BYTES], equal in 0..=LINE_BYTES, b: [u8; LINE_BYTES]) {
            let mut b = b;
            b[..equal].copy_from_slice(&a[..equal]);
            let words = |bytes: &[u8; LINE_BYTES]| -> Line {
                std::array::from_fn(|w| u64::from_ne_bytes(std::array::from_fn(|i| bytes[w * 8 + i])))
            };
            prop_assert_eq!(compare_lines(&words(&a), &words(&b)), a.cmp(&b));
        }
    }
}
