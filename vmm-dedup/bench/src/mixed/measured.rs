//! What one measurement tells, from its process to the report.

use serde::{Deserialize, Serialize};

/// Speed of random access.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Access {
    /// Accesses in a second of the thread's CPU time.
    pub(super) per_cpu_s: f64,
    /// Accesses in a second, with all waiting.
    pub(super) per_s: f64,
    /// The same, divided by those to the control area in turns with them.
    pub(super) of_control: f64,
    pub(super) of_control_by_clock: f64,
    pub(super) p50_ns: u32,
    pub(super) p99_ns: u32,
}

/// Plain memory under one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Process {
    /// What told which memory is used.
    pub(super) use_source: String,
    pub(super) saved_pages: u64,
    /// 2 MiB pages that were left when it had settled.
    pub(super) huge_pages: u64,
    pub(super) metadata_bytes: u64,
    /// Before there was dedup.
    pub(super) undisturbed: Access,
    pub(super) access: Access,
    /// Until it had settled.
    pub(super) converge_monitor_cpu_s: f64,
    pub(super) converge_dedup_cpu_s: f64,
    /// In the measurement after that.
    pub(super) steady_monitor_cpu_s: f64,
    pub(super) steady_dedup_cpu_s: f64,
    /// `None`: there was none.
    pub(super) churned: Option<Churned>,
    /// Speed on memory that was cold, some intervals after it turned hot.
    pub(super) after_change: Access,
    /// Huge pages built again there, of so many.
    pub(super) rebuilt: u64,
    pub(super) turned: u64,
    /// When the last of them was back, in monitor intervals.
    pub(super) rebuilt_after_intervals: Option<f64>,
    /// When nine tenths of them were.
    pub(super) most_rebuilt_after_intervals: Option<f64>,
    pub(super) rebuild_p50_us: u64,
    pub(super) rebuild_p99_us: u64,
    pub(super) rebuild_max_us: u64,
    /// Huge pages that were not built at a try, and why.
    pub(super) rebuild_refused: RebuildRefused,
}

/// When it had settled after content was replaced.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Churned {
    pub(super) rounds: u32,
    pub(super) saved_pages: u64,
    pub(super) huge_pages: u64,
    pub(super) access: Access,
    /// From the first round until it had settled.
    pub(super) monitor_cpu_s: f64,
    pub(super) dedup_cpu_s: f64,
}

/// Tries to build a huge page that came to nothing.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RebuildRefused {
    /// A page was pinned, or copied by the kernel, so that it might have been.
    pub(super) pinned: u64,
    /// The host had no huge page.
    pub(super) memory: u64,
    /// No mapping was left, or a call failed.
    pub(super) other: u64,
}

/// Guests under one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Guests {
    /// What told which memory is used, for each guest.
    pub(super) use_source: String,
    pub(super) saved_pages: u64,
    pub(super) huge_pages: u64,
    /// Pages verified or written by all guests in a second of their vCPUs' CPU time.
    pub(super) pages_per_cpu_s: f64,
    /// First access to a page in the guest, upper bounds.
    pub(super) access_p50_ns: u64,
    pub(super) access_p99_ns: u64,
    pub(super) monitor_cpu_s: f64,
    pub(super) dedup_cpu_s: f64,
}

impl Process {
    /// Speed as a part of what it was before there was dedup, and of the control area's: neither other memory nor
    /// another hour of the machine counts.
    pub(super) fn speed(&self) -> f64 {
        self.access.of_control / self.undisturbed.of_control
    }

    /// [`Self::speed`] after churn.
    pub(super) fn speed_after_churn(&self) -> Option<f64> {
        let churned = self.churned.as_ref()?;
        Some(churned.access.of_control / self.undisturbed.of_control)
    }

    /// [`Self::speed`] by the clock, with what was waited for.
    pub(super) fn rate(&self) -> f64 {
        self.access.of_control_by_clock / self.undisturbed.of_control_by_clock
    }

    /// CPU time of all that dedup does, seconds.
    pub(super) fn cpu_s(&self) -> f64 {
        let monitor = self.converge_monitor_cpu_s + self.steady_monitor_cpu_s;
        monitor + self.converge_dedup_cpu_s + self.steady_dedup_cpu_s
    }
}

/// One policy in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) policy: String,
    pub(super) round: u32,
    pub(super) process: Process,
    /// `None` without KVM.
    pub(super) guests: Option<Guests>,
}
