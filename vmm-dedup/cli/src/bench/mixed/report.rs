//! What `bench mixed` prints.

use super::summary::{Ratios, median};
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
    /// Speed on memory that was cold, some intervals after it turned hot.
    pub(super) after_change: Access,
    /// Huge pages built again there, of so many.
    pub(super) rebuilt: u64,
    pub(super) turned: u64,
    /// When the last of them was back, in monitor intervals.
    pub(super) rebuilt_after_intervals: Option<f64>,
    pub(super) rebuild_p50_us: u64,
    pub(super) rebuild_p99_us: u64,
    pub(super) rebuild_max_us: u64,
    /// Huge pages that were not built at a try.
    pub(super) rebuild_refused: u64,
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

    /// The same by the clock, with what was waited for.
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

/// All of them, from one run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    mib: u32,
    seconds: u32,
    interval_ms: u32,
    /// Medians.
    policies: Vec<Measured>,
    /// What `smartmd` reaches of the others, as far as they were measured.
    smartmd: Ratios,
    rounds: Vec<Measured>,
}

impl Report {
    pub(super) fn new(mib: u32, seconds: u32, interval_ms: u32) -> Self {
        Self {
            mib,
            seconds,
            interval_ms,
            policies: Vec::new(),
            smartmd: Ratios::default(),
            rounds: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, measured: Measured) {
        let name = measured.policy.clone();
        self.rounds.push(measured);
        let rounds: Vec<&Measured> = self.rounds.iter().filter(|m| m.policy == name).collect();
        let median = median(&rounds);
        match self.policies.iter_mut().find(|m| m.policy == name) {
            Some(known) => *known = median,
            None => self.policies.push(median),
        }
        self.smartmd = Ratios::of(&self.rounds);
    }

    pub(super) fn print(&self) {
        println!(
            "{} MiB, a sample every {} ms, {} s each",
            self.mib, self.interval_ms, self.seconds
        );
        println!(
            "{:<13} {:>8} {:>6} {:>9} {:>6} {:>6} {:>6} {:>9} {:>9} {:>11} {:>9}",
            "memory",
            "saved",
            "huge",
            "Macc/s",
            "speed",
            "p50ns",
            "p99ns",
            "monitor s",
            "dedup s",
            "rebuilt",
            "Macc/s"
        );
        for Measured {
            policy, process: p, ..
        } in &self.policies
        {
            println!(
                "{policy:<13} {:>8} {:>6} {:>9.2} {:>6.3} {:>6} {:>6} {:>9.3} {:>9.3} {:>5} of {:>2} {:>9.2}",
                p.saved_pages,
                p.huge_pages,
                p.access.per_cpu_s / 1e6,
                p.speed(),
                p.access.p50_ns,
                p.access.p99_ns,
                p.converge_monitor_cpu_s + p.steady_monitor_cpu_s,
                p.converge_dedup_cpu_s + p.steady_dedup_cpu_s,
                p.rebuilt,
                p.turned,
                p.after_change.per_cpu_s / 1e6,
            );
        }
        println!(
            "{:<13} {:>8} {:>6} {:>9} {:>6} {:>6} {:>9} {:>9}",
            "guests", "saved", "huge", "pages/s", "p50ns", "p99ns", "monitor s", "dedup s"
        );
        for Measured { policy, guests, .. } in &self.policies {
            let Some(g) = guests else { continue };
            println!(
                "{policy:<13} {:>8} {:>6} {:>9.0} {:>6} {:>6} {:>9.3} {:>9.3}",
                g.saved_pages,
                g.huge_pages,
                g.pages_per_cpu_s,
                g.access_p50_ns,
                g.access_p99_ns,
                g.monitor_cpu_s,
                g.dedup_cpu_s
            );
        }
        self.smartmd.print();
    }
}
