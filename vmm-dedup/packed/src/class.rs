//! Size classes: what packed bytes take in a segment.
//!
//! Classes are 64 bytes apart, and each has 8 bytes more than its lines: an overlay's bit vector. So an overlay of n lines
//! takes 64 n + 8 bytes, and no line of its own for a header.

use crate::page::LINE_BYTES;

/// Bytes that each class has beside its lines.
const HEAD_BYTES: usize = 8;
/// Lines of the largest class.
const MOST_LINES: usize = 63;

/// A size class: 8 bytes and 0 to 63 lines of 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(u8);

impl Class {
    /// How many classes there are.
    pub const COUNT: usize = MOST_LINES + 1;
    /// The bytes that the largest class holds.
    pub const MOST_BYTES: usize = HEAD_BYTES + MOST_LINES * LINE_BYTES;

    /// The smallest class that holds `length` bytes; `None` if there is none.
    #[must_use]
    pub fn holding(length: usize) -> Option<Self> {
        let lines = length.saturating_sub(HEAD_BYTES).div_ceil(LINE_BYTES);
        u8::try_from(lines)
            .ok()
            .filter(|lines| usize::from(*lines) <= MOST_LINES)
            .map(Self)
    }

    /// The largest class that fits into `room` bytes; `None` if not even the smallest does.
    #[must_use]
    pub fn fitting(room: usize) -> Option<Self> {
        let lines = room.checked_sub(HEAD_BYTES)? / LINE_BYTES;
        u8::try_from(lines.min(MOST_LINES)).ok().map(Self)
    }

    /// Its number, from 0.
    #[must_use]
    pub fn number(self) -> usize {
        usize::from(self.0)
    }

    /// The bytes that it takes.
    #[must_use]
    pub fn bytes(self) -> usize {
        HEAD_BYTES + self.number() * LINE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_has_the_smallest_class_that_holds_it() {
        for length in 0..=Class::MOST_BYTES {
            let class = Class::holding(length).unwrap();
            assert!(class.bytes() >= length);
            assert!(length <= HEAD_BYTES || class.bytes() - length < LINE_BYTES);
            assert_eq!(Class::fitting(class.bytes()), Some(class));
        }
        assert_eq!(Class::holding(Class::MOST_BYTES + 1), None);
        assert_eq!(Class::fitting(HEAD_BYTES - 1), None);
        assert_eq!(Class::fitting(1 << 20).unwrap().number(), Class::COUNT - 1);
    }

    #[test]
    fn an_overlay_has_no_header_line() {
        let three_lines = Class::holding(8 + 3 * LINE_BYTES).unwrap();
        assert_eq!(three_lines.bytes(), 8 + 3 * LINE_BYTES);
    }
}
