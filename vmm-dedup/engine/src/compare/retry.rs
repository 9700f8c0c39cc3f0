//! When what failed is tried again: an engine is made anew, a fork is made.

/// Passes until then, at first and at most: each failure doubles the pause.
const PAUSES: std::ops::RangeInclusive<u64> = 64..=4096;

/// How often something failed, and when it is tried again.
#[derive(Debug)]
pub(crate) struct Retry {
    due: u64,
    pause: u64,
    longest: u64,
    failures: u64,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            due: 0,
            pause: *PAUSES.start(),
            longest: *PAUSES.end(),
            failures: 0,
        }
    }
}

impl Retry {
    /// For what may succeed a moment later: pauses from one pass on, up to where the others begin.
    pub(crate) fn brief() -> Self {
        Self {
            pause: 1,
            longest: *PAUSES.start(),
            ..Self::default()
        }
    }

    /// Whether it is time to try, in this pass.
    pub(crate) fn is_due(&self, pass: u64) -> bool {
        pass >= self.due
    }

    /// It failed in this pass; returns the passes until it is tried again.
    pub(crate) fn fail(&mut self, pass: u64) -> u64 {
        let pause = self.pause;
        self.failures += 1;
        self.due = pass + pause;
        self.pause = (pause * 2).min(self.longest);
        pause
    }

    /// Failures so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut retry = Retry::default();
        assert!(retry.is_due(0));
        let pauses: Vec<u64> = (0..8).map(|_| retry.fail(10)).collect();
        assert_eq!(pauses, [64, 128, 256, 512, 1024, 2048, 4096, 4096]);
        assert!(!retry.is_due(10 + 4095) && retry.is_due(10 + 4096));
        assert_eq!(retry.failures(), 8);
        let mut brief = Retry::brief();
        let pauses: Vec<u64> = (0..8).map(|_| brief.fail(10)).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64]);
    }
}
