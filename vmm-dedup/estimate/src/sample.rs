//! Which contents are looked at, and what that says about all of them.

use crate::error::Error;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{KEY_WORDS, Key, Salt, line_words};

/// Pages that are recorded one by one before sampling sets in: those of 16 GiB.
const MOST_RECORDS: u64 = 1 << 22;
/// Coarsest sampling.
const MOST: u64 = 1 << 16;
/// Half the width of a 95 % interval, in standard deviations.
const DEVIATIONS: f64 = 1.96;

/// One content in so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample(u64);

/// The unit of sampling that a page belongs to: all pages with the same key lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Unit(u64);

impl Unit {
    /// Pages that are always looked at. They are patterns, like zero, of which there may be so many that leaving
    /// them to chance would spoil the estimate.
    pub(crate) const CERTAIN: Self = Self(u64::MAX);
}

impl Sample {
    /// Every content: exact.
    pub const ALL: Self = Self(1);

    /// One content in `one_in`.
    ///
    /// # Errors
    /// Unless that is a power of two up to 65536.
    pub fn try_new(one_in: u64) -> Result<Self, Error> {
        if one_in.is_power_of_two() && one_in <= MOST {
            Ok(Self(one_in))
        } else {
            Err(Error::Sample(one_in))
        }
    }

    /// What is fitting for so many pages: exact up to 16 GiB.
    #[must_use]
    pub fn fitting(pages: u64) -> Self {
        Self(pages.div_ceil(MOST_RECORDS).next_power_of_two().min(MOST))
    }

    /// The k of "one in k".
    #[must_use]
    pub fn one_in(self) -> u64 {
        self.0
    }

    /// The page's unit if it is in the sample.
    #[inline]
    pub(crate) fn unit(self, page: &[u8]) -> Option<Unit> {
        if self == Self::ALL {
            return Some(Unit::CERTAIN);
        }
        let lines = key_lines(page);
        if lines.iter().all(|word| *word == lines[0]) {
            return Some(Unit::CERTAIN);
        }
        let key = Key::of_lines(&lines, Salt(0)).raw();
        (key.is_multiple_of(self.0)).then_some(Unit(key))
    }

    /// From the sums over sampled units, of a number and of its square, those of all units: the number and half the
    /// width of its 95 % interval. Horvitz and Thompson's estimator with Poisson sampling.
    #[allow(clippy::cast_precision_loss)] // an estimate
    pub(crate) fn expand(self, sum: u64, squares: u64) -> (u64, u64) {
        let k = self.0 as f64;
        let deviation = (squares as f64 * k * (k - 1.0)).sqrt();
        (sum.saturating_mul(self.0), rounded_up(deviation * DEVIATIONS))
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // not negative; saturates
fn rounded_up(value: f64) -> u64 {
    value.ceil() as u64
}

fn key_lines(page: &[u8]) -> [u64; KEY_WORDS] {
    debug_assert_eq!(page.len(), PAGE_SIZE);
    line_words(|word| page[word * 8..][..8].try_into().map_or(0, u64::from_ne_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_powers_of_two() {
        assert!(Sample::try_new(0).is_err());
        assert!(Sample::try_new(3).is_err());
        assert!(Sample::try_new(1 << 17).is_err());
        assert_eq!(Sample::try_new(16).unwrap().one_in(), 16);
    }

    #[test]
    fn sixteen_gib_are_exact_and_more_is_sampled() {
        assert_eq!(Sample::fitting(0), Sample::ALL);
        assert_eq!(Sample::fitting(1 << 22), Sample::ALL);
        assert_eq!(Sample::fitting((1 << 22) + 1).one_in(), 2);
        assert_eq!(Sample::fitting(u64::MAX).one_in(), MOST);
    }

    #[test]
    fn all_has_no_error() {
        assert_eq!(Sample::ALL.expand(7, 49), (7, 0));
    }
}
