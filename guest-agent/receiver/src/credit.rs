//! How much may come, over time.

use std::time::Duration;

/// A bucket of tokens that fills at a rate, up to a limit. Times are since any fixed moment; one that goes back counts as no
/// time.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    per_second: u64,
    most: u64,
    tokens: u64,
    filled: Duration,
}

impl Bucket {
    /// A full bucket.
    #[must_use]
    pub fn new(per_second: u64, most: u64, now: Duration) -> Self {
        Self {
            per_second,
            most,
            tokens: most,
            filled: now,
        }
    }

    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.filled);
        let more = passed.as_millis().saturating_mul(u128::from(self.per_second)) / 1000;
        // Time that is worth no token yet is kept.
        if more > 0 {
            let more = u64::try_from(more).unwrap_or(u64::MAX);
            self.tokens = self.tokens.saturating_add(more).min(self.most);
            self.filled = now;
        }
        if now < self.filled {
            self.filled = now;
        }
    }

    /// Takes up to so many tokens; returns how many there were.
    pub fn take(&mut self, most: u64, now: Duration) -> u64 {
        self.fill(now);
        let taken = self.tokens.min(most);
        self.tokens -= taken;
        taken
    }

    /// Puts back tokens that were taken in vain.
    pub fn give_back(&mut self, tokens: u64) {
        self.tokens = self.tokens.saturating_add(tokens).min(self.most);
    }

    /// Tokens that there are.
    pub fn available(&mut self, now: Duration) -> u64 {
        self.fill(now);
        self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn it_fills_at_its_rate_also_when_looked_at_often() {
        let mut bucket = Bucket::new(10, 20, ms(0));
        assert_eq!(bucket.take(30, ms(0)), 20);
        let taken: u64 = (1..=1000).map(|at| bucket.take(1, ms(at))).sum();
        assert_eq!(taken, 10);
        assert_eq!(bucket.available(ms(1_000_000)), 20);
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_and_takes_nothing() {
        let mut bucket = Bucket::new(10, 20, ms(10_000));
        bucket.take(20, ms(10_000));
        assert_eq!(bucket.available(ms(0)), 0);
        assert_eq!(bucket.available(ms(1000)), 10);
    }
}
