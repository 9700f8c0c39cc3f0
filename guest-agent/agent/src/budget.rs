//! The agent's share of a core.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time that may be used at once, however small the share is.
const BURST: Duration = Duration::from_millis(20);

/// CPU time of this process.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// A share of a core, held in the long run.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    share: f64,
    /// What may be used now; below zero it is a debt.
    left: f64,
    /// Time and CPU time when that was so.
    at: Duration,
    cpu: Duration,
}

impl Budget {
    /// A share from now on. `cpu` is the CPU time so far.
    #[must_use]
    pub fn new(share: f64, now: Duration, cpu: Duration) -> Self {
        Self {
            share,
            left: BURST.as_secs_f64(),
            at: now,
            cpu,
        }
    }

    /// How long to wait until there is something left.
    pub fn wait(&mut self, now: Duration, cpu: Duration) -> Duration {
        let earned = now.saturating_sub(self.at).as_secs_f64() * self.share;
        let used = cpu.saturating_sub(self.cpu).as_secs_f64();
        self.left = (self.left + earned - used).min(BURST.as_secs_f64());
        (self.at, self.cpu) = (now, cpu);
        Duration::from_secs_f64((-self.left).max(0.0) / self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_long_run_it_is_the_share() {
        let mut budget = Budget::new(0.002, Duration::ZERO, Duration::ZERO);
        let (mut now, mut cpu) = (Duration::ZERO, Duration::ZERO);
        for step in 0..10_000_u64 {
            // Steps of 50 to 450 us.
            let took = Duration::from_micros(50 + step * 37 % 400);
            (now, cpu) = (now + took, cpu + took);
            now += budget.wait(now, cpu);
        }
        let share = cpu.as_secs_f64() / now.as_secs_f64();
        assert!((0.0019..0.0022).contains(&share), "{share}");
    }

    #[test]
    fn rest_is_not_saved_up() {
        let mut budget = Budget::new(0.002, Duration::ZERO, Duration::ZERO);
        let later = Duration::from_secs(100_000);
        assert_eq!(budget.wait(later, Duration::ZERO), Duration::ZERO);
        // 30 ms: 20 are the burst, 10 take 5 s.
        let wait = budget.wait(later, Duration::from_millis(30));
        assert!((4.9..5.1).contains(&wait.as_secs_f64()), "{wait:?}");
    }
}
