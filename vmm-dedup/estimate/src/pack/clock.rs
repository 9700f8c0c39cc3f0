//! CPU time of a thread, and how long many short things took.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time of this thread so far.
pub(super) fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // It is never negative.
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Microseconds of each of `count`; 0 if there is none.
#[allow(clippy::cast_precision_loss)] // a mean
pub(super) fn each_us(total: Duration, count: u64) -> f64 {
    total.as_secs_f64() * 1e6 / count.max(1) as f64
}

/// Nanoseconds of a step.
const STEP_NS: u128 = 50;
/// Steps; what takes longer counts as the last.
const STEPS: usize = 8192;

/// How long things took, in steps of 50 ns up to 0.4 ms.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; STEPS],
        }
    }
}

impl Histogram {
    /// Counts one.
    pub(super) fn count(&mut self, time: Duration) {
        let step = usize::try_from(time.as_nanos() / STEP_NS).unwrap_or(STEPS);
        self.counts[step.min(STEPS - 1)] += 1;
    }

    /// Adds what another one has counted.
    pub(super) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
    }

    /// How long `percent` of 100 took at most, in microseconds; 0 if there is none.
    #[allow(clippy::cast_precision_loss)] // a time
    pub(super) fn percentile_us(&self, percent: u64) -> f64 {
        let total: u64 = self.counts.iter().sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut so_far = 0;
        let step = self.counts.iter().position(|count| {
            so_far += count;
            so_far >= rank
        });
        step.map_or(0.0, |step| (step + 1) as f64 * STEP_NS as f64 / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_what_was_counted() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile_us(50).to_bits(), 0f64.to_bits());
        for us in 1..=100 {
            histogram.count(Duration::from_micros(us));
        }
        histogram.count(Duration::from_secs(1));
        assert!((histogram.percentile_us(50) - 51.0).abs() < 0.1);
        assert!((histogram.percentile_us(99) - 100.0).abs() < 0.1);
        assert!((histogram.percentile_us(100) - 409.6).abs() < 0.1);
    }
}
