//! The CPU budget: a thread that has used more than its share sleeps until it has not.

use crate::sys::proc;
use std::time::{Duration, Instant};

/// CPU time that may be saved up while idle, as a share of one second of budget.
const BURST: Duration = Duration::from_millis(500);

/// Keeps CPU time below a share of wall time.
///
/// At any time `used <= share * elapsed + share * BURST`: over 10 s the budget is exceeded by at most a twentieth.
#[derive(Debug)]
pub(crate) struct Pacer {
    share: f64,
    since: Instant,
    /// CPU time of this thread and its helpers that does not count.
    cpu_at_start: u64,
    /// CPU time that helpers of this thread (the fault thread) have used.
    others_ns: u64,
}

impl Pacer {
    /// For the calling thread, and a share of a core in percent.
    pub(crate) fn new(percent: f64) -> Self {
        let share = percent / 100.0;
        Self {
            share,
            since: Instant::now(),
            cpu_at_start: proc::thread_cpu_ns(),
            others_ns: 0,
        }
    }

    /// Another budget, from now on: what was used before is forgotten.
    pub(crate) fn set_percent(&mut self, percent: f64) {
        let share = percent / 100.0;
        if share.to_bits() != self.share.to_bits() {
            let cpu_at_start = proc::thread_cpu_ns() + self.others_ns;
            *self = Self {
                share,
                since: Instant::now(),
                cpu_at_start,
                others_ns: self.others_ns,
            };
        }
    }

    /// Tells the total CPU time of helpers, which counts against the same budget.
    pub(crate) fn charge_others(&mut self, total_ns: u64) {
        self.others_ns = total_ns;
    }

    /// How long to sleep now.
    #[allow(clippy::cast_precision_loss)] // durations
    pub(crate) fn debt(&mut self) -> Duration {
        let used = (proc::thread_cpu_ns() + self.others_ns).saturating_sub(self.cpu_at_start);
        self.debt_at(used as f64 / 1e9, self.since.elapsed().as_secs_f64())
    }

    fn debt_at(&mut self, used: f64, elapsed: f64) -> Duration {
        if self.share >= 1.0 {
            return Duration::ZERO;
        }
        let burst = BURST.as_secs_f64();
        // Forget credit beyond the burst: move the start forward until credit is what it may be.
        let credit = elapsed - used / self.share;
        if credit > burst {
            self.since += Duration::from_secs_f64(credit - burst);
        }
        Duration::from_secs_f64((-credit).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_budget_there_is_no_debt() {
        assert_eq!(Pacer::new(20.0).debt_at(0.1, 0.6), Duration::ZERO);
    }

    #[test]
    fn debt_is_paid_at_the_rate_of_the_budget() {
        let debt = Pacer::new(20.0).debt_at(0.2, 0.5);
        assert!((debt.as_secs_f64() - 0.5).abs() < 1e-9, "{debt:?}");
    }

    #[test]
    fn a_new_budget_forgets_what_was_used() {
        let mut pacer = Pacer::new(10.0);
        pacer.charge_others(3_600_000_000_000);
        assert!(pacer.debt() > Duration::from_secs(3600));
        pacer.set_percent(20.0);
        assert!(pacer.debt() < Duration::from_secs(1));
    }

    #[test]
    fn idle_time_is_not_saved_up_for_ever() {
        let mut pacer = Pacer::new(20.0);
        let before = pacer.since;
        pacer.debt_at(0.0, 100.0);
        assert_eq!(pacer.since - before, Duration::from_secs_f64(99.5));
    }
}
