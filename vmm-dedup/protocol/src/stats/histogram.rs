//! Durations by buckets.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Upper bounds of the buckets of a [`Histogram`], microseconds; the last bucket holds everything above.
const BOUNDS_US: [u64; BUCKETS - 1] = [
    1, 2, 5, 10, 25, 50, 75, 100, 150, 200, 250, 300, 400, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000,
    1_000_000,
];

/// Buckets of a [`Histogram`].
pub const BUCKETS: usize = 22;

/// A histogram of durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Histogram {
    /// Observations per bucket; bucket `i` counts those up to [`Histogram::bound_us`].
    pub buckets: [u64; BUCKETS],
    /// Sum of all durations, nanoseconds.
    pub sum_ns: u64,
    /// Longest duration, nanoseconds.
    pub max_ns: u64,
}

impl Histogram {
    /// Adds one duration in nanoseconds.
    pub fn observe(&mut self, ns: u64) {
        let bucket = BOUNDS_US.partition_point(|bound| bound * 1000 < ns);
        self.buckets[bucket] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// The durations of both.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        for (to, more) in self.buckets.iter_mut().zip(other.buckets) {
            *to = to.saturating_add(more);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self
    }

    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Upper bound of a bucket in microseconds; the last one has none (`u64::MAX`).
    pub fn bound_us(bucket: usize) -> u64 {
        BOUNDS_US.get(bucket).copied().unwrap_or(u64::MAX)
    }

    /// An upper bound in microseconds for the `q`-quantile (0..=1): its bucket's bound, or the maximum if lower.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )]
    pub fn quantile_us(&self, q: f64) -> u64 {
        let wanted = (self.count() as f64 * q).ceil() as u64;
        let mut seen: u64 = 0;
        for (i, n) in self.buckets.iter().enumerate() {
            seen = seen.saturating_add(*n);
            if seen >= wanted && seen > 0 {
                return Self::bound_us(i).min(self.max_ns.div_ceil(1000));
            }
        }
        self.max_ns.div_ceil(1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_their_bound_says() {
        let mut h = Histogram::default();
        for ns in [1, 1000, 1001, 250_000, u64::MAX] {
            h.observe(ns);
        }
        assert_eq!(h.buckets[0], 2);
        assert_eq!(h.buckets[1], 1);
        assert_eq!(h.buckets[10], 1);
        assert_eq!(h.buckets[BUCKETS - 1], 1);
        assert_eq!(h.count(), 5);
    }

    #[test]
    fn hostile_numbers_do_not_overflow() {
        let h = Histogram {
            buckets: [u64::MAX; BUCKETS],
            sum_ns: u64::MAX,
            max_ns: u64::MAX,
        };
        assert_eq!(h.quantile_us(1.0), 1);
    }

    #[test]
    fn quantiles_are_upper_bounds() {
        let mut h = Histogram::default();
        (0..99).for_each(|_| h.observe(90_000));
        h.observe(5_000_000);
        assert_eq!(h.quantile_us(0.5), 100);
        assert_eq!(h.quantile_us(0.99), 100);
        assert_eq!(h.quantile_us(1.0), 5000);
    }
}
