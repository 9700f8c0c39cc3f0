//! What an engine has done, and what that cost.

use rustix::time::{ClockId, clock_gettime};
use std::time::Instant;

/// An account; all counts are totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "settings", derive(serde::Serialize))]
pub struct Account {
    /// Pages that were keyed, compared with another, or searched for.
    pub pages: u64,
    /// Comparisons of two pages.
    pub comparisons: u64,
    /// 64-byte lines that comparing and keying read, of both pages of a comparison.
    pub lines: u64,
    /// Bytes that this moved between memory and whoever compares (for lines in caches as well).
    pub bytes: u64,
    /// Time that callers waited.
    pub wall_ns: u64,
    /// CPU time of the callers' threads, and of threads that drive a device for them.
    pub cpu_ns: u64,
    /// CPU time that a model of a device took elsewhere. Hardware would take none.
    pub device_cpu_ns: u64,
}

/// Measures the time of one call.
#[derive(Debug)]
pub struct Stopwatch {
    wall: Instant,
    cpu_ns: u64,
}

impl Stopwatch {
    /// Begins now, for this thread.
    pub fn start() -> Self {
        Self {
            wall: Instant::now(),
            cpu_ns: thread_cpu_ns(),
        }
    }

    /// Ends, on the thread that started it, and notes the time.
    pub fn stop(self, account: &mut Account) {
        account.wall_ns += u64::try_from(self.wall.elapsed().as_nanos()).unwrap_or(u64::MAX);
        account.cpu_ns += self.stop_cpu();
    }

    /// Ends, on the thread that started it: the CPU time, ns.
    pub fn stop_cpu(self) -> u64 {
        thread_cpu_ns().saturating_sub(self.cpu_ns)
    }
}

fn thread_cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, ns) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + ns.unwrap_or(0)
}
