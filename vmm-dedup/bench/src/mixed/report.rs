//! What `bench mixed` prints.

use super::measured::Measured;
use super::summary::Ratios;
use crate::plots::Plot;
use crate::report::median;
use crate::service::Breaker;
use serde::Serialize;
use vmm_dedup_host::say;

/// All measurements of one run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    mib: u32,
    seconds: u32,
    interval_ms: u32,
    breaks: Breaker,
    /// Medians.
    policies: Vec<Measured>,
    /// What `smartmd` reaches of the others, as far as they were measured.
    smartmd: Ratios,
    rounds: Vec<Measured>,
}

impl Report {
    pub(super) fn new(mib: u32, seconds: u32, interval_ms: u32, breaks: Breaker) -> Self {
        Self {
            mib,
            seconds,
            interval_ms,
            breaks,
            policies: Vec::new(),
            smartmd: Ratios::default(),
            rounds: Vec::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rounds.is_empty()
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

    pub(super) fn plots(&self) -> Vec<Plot> {
        let bars = |name, title, unit, of: fn(&Measured) -> (f64, Option<f64>)| {
            let figures = self.policies.iter().flat_map(|measured| {
                let (process, guests) = of(measured);
                let figure = |of: &str, figure| (measured.policy.clone(), of.to_owned(), figure);
                [
                    Some(figure("memory", process)),
                    guests.map(|guests| figure("guests", guests)),
                ]
            });
            Plot::bars(name, title, unit, figures.flatten())
        };
        vec![
            bars("mixed-saved", "Pages saved", "pages", |m| {
                let guests = m.guests.as_ref().map(|g| g.saved_pages as f64);
                (m.process.saved_pages as f64, guests)
            }),
            bars(
                "mixed-speed",
                "Speed of access, by that without dedup",
                "ratio",
                |m| (m.process.speed(), None),
            ),
            bars("mixed-p99", "99 of 100 accesses take at most", "ns", |m| {
                let guests = m.guests.as_ref().map(|g| g.access_p99_ns as f64);
                (f64::from(m.process.access.p99_ns), guests)
            }),
        ]
    }

    pub(super) fn print(&self) {
        say!(
            "{} MiB, a sample every {} ms, {} s each, {} breaks",
            self.mib,
            self.interval_ms,
            self.seconds,
            self.breaks.name()
        );
        say!(
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
            say!(
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
        for Measured {
            policy, process: p, ..
        } in &self.policies
        {
            let Some(churned) = &p.churned else { continue };
            say!(
                "{policy:<13} {:>8} {:>6} {:>9.2} {:>6.3} {:>6} {:>6} {:>9.3} {:>9.3}  after {} rounds of churn",
                churned.saved_pages,
                churned.huge_pages,
                churned.access.per_cpu_s / 1e6,
                p.speed_after_churn().unwrap_or(f64::NAN),
                churned.access.p50_ns,
                churned.access.p99_ns,
                churned.monitor_cpu_s,
                churned.dedup_cpu_s,
                churned.rounds,
            );
        }
        say!(
            "{:<13} {:>8} {:>6} {:>9} {:>6} {:>6} {:>9} {:>9}",
            "guests",
            "saved",
            "huge",
            "pages/s",
            "p50ns",
            "p99ns",
            "monitor s",
            "dedup s"
        );
        for Measured { policy, guests, .. } in &self.policies {
            let Some(g) = guests else { continue };
            say!(
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
