//! The account of a service's work: its figures, and what its CPU time was for.

use crate::sys::proc;
use vmm_dedup_protocol::stats::{CpuNs, ServiceStats};

/// What the CPU time of the last stretch of work was for.
pub(crate) type Stage = fn(&mut CpuNs) -> &mut u64;

/// Figures of one service, kept by its scanning thread.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) stats: ServiceStats,
    /// The thread's CPU time up to which all is booked, ns.
    booked: u64,
}

impl Account {
    /// To be called first in the thread whose time is booked.
    pub(crate) fn enter_thread(&mut self) {
        self.booked = proc::thread_cpu_ns();
    }

    /// Books the CPU time since the last call.
    pub(crate) fn lap(&mut self, stage: Stage) {
        let now = proc::thread_cpu_ns();
        *stage(&mut self.stats.cpu_ns) += now.saturating_sub(self.booked);
        self.booked = now;
    }

    /// Books the CPU time since a point (this thread's CPU time then) that is not to count for the stage around it.
    pub(crate) fn lap_within(&mut self, since: u64, stage: Stage) {
        let ns = proc::thread_cpu_ns().saturating_sub(since);
        *stage(&mut self.stats.cpu_ns) += ns;
        self.booked += ns;
    }
}

/// Nanoseconds, for histograms.
pub(crate) fn ns(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
