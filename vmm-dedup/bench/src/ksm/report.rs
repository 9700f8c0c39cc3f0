//! Medians, ratios, and how they are shown.

use super::measured::Measured;
use crate::content::{Kind, pages_name};
use crate::plots::Plot;
use serde::Serialize;
use std::collections::BTreeMap;
use vmm_dedup_host::say;

#[derive(Debug, Serialize)]
struct Ksm {
    cpu_s: f64,
    wall_s: f64,
    saved_pages: f64,
    idle_pass_cpu_s: f64,
    dirty_pass_cpu_s: f64,
    freed_bytes: f64,
}

#[derive(Debug, Serialize)]
struct Ours {
    #[serde(flatten)]
    same: Ksm,
    /// The net saving that our metrics claim, to be compared with freed_bytes.
    claimed_bytes: f64,
    metadata_bytes_per_page: f64,
    vmas: f64,
    vmas_per_merged_page: f64,
    stop_p99_us: f64,
    stop_max_us: f64,
    cpu_stages_s: BTreeMap<String, f64>,
}

/// KSM/ours for costs, ours/KSM for gains: bigger is better in all. `claim` is freed/claimed.
#[derive(Debug, Serialize)]
struct Ratio {
    cpu: f64,
    idle: f64,
    dirty: f64,
    saved: f64,
    freed: f64,
    claim: f64,
}

#[derive(Debug, Serialize)]
struct Entry {
    name: Kind,
    thp: bool,
    ksm: Ksm,
    ours: Ours,
    ratio: Ratio,
    /// Every repetition, for the spread.
    runs: Runs,
}

#[derive(Debug, Serialize)]
struct Runs {
    ksm: Vec<Measured>,
    ours: Vec<Measured>,
}

/// The result of a comparison.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    mib: u32,
    repetitions: u32,
    /// Whether the store's memory came in folios of 64 KiB, as we recommend it.
    store_large_folios: bool,
    kernel: String,
    kinds: Vec<Entry>,
}

fn median(runs: &[Measured], field: impl Fn(&Measured) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(field).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

fn common(runs: &[Measured]) -> Ksm {
    Ksm {
        cpu_s: median(runs, |m| m.cpu_s),
        wall_s: median(runs, |m| m.wall_s),
        saved_pages: median(runs, |m| m.saved_pages as f64),
        idle_pass_cpu_s: median(runs, |m| m.idle_pass_cpu_s),
        dirty_pass_cpu_s: median(runs, |m| m.dirty_pass_cpu_s),
        freed_bytes: median(runs, |m| m.freed_bytes as f64),
    }
}

impl Report {
    pub(super) fn new(mib: u32, repetitions: u32, store_large_folios: bool) -> Self {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        Self {
            mib,
            repetitions,
            store_large_folios,
            kernel,
            kinds: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, name: Kind, thp: bool, theirs: &[Measured], our: &[Measured]) {
        let ksm = common(theirs);
        let stages = our
            .first()
            .map(|m| m.cpu_stages_s.keys().cloned().collect::<Vec<_>>())
            .unwrap_or_default();
        let stage = |name: &String| median(our, |m| m.cpu_stages_s.get(name).copied().unwrap_or(0.0));
        let ours = Ours {
            same: common(our),
            claimed_bytes: median(our, |m| m.claimed_bytes as f64),
            metadata_bytes_per_page: median(our, |m| m.metadata_bytes_per_page),
            vmas: median(our, |m| m.vmas as f64),
            vmas_per_merged_page: median(our, |m| m.vmas_per_merged_page),
            stop_p99_us: median(our, |m| m.stop_p99_us as f64),
            stop_max_us: median(our, |m| m.stop_max_us as f64),
            cpu_stages_s: stages.iter().map(|name| (name.clone(), stage(name))).collect(),
        };
        let ratio = Ratio {
            cpu: ksm.cpu_s / ours.same.cpu_s,
            idle: ksm.idle_pass_cpu_s / ours.same.idle_pass_cpu_s,
            dirty: ksm.dirty_pass_cpu_s / ours.same.dirty_pass_cpu_s,
            saved: ours.same.saved_pages / ksm.saved_pages,
            freed: ours.same.freed_bytes / ksm.freed_bytes,
            claim: ours.same.freed_bytes / ours.claimed_bytes,
        };
        let runs = Runs {
            ksm: theirs.to_vec(),
            ours: our.to_vec(),
        };
        self.kinds.push(Entry {
            name,
            thp,
            ksm,
            ours,
            ratio,
            runs,
        });
    }

    pub(super) fn plots(&self) -> Vec<Plot> {
        let bars = |name, title, unit, figure: fn(&Ksm) -> f64| {
            let sides = self.kinds.iter().flat_map(|e| {
                let group = format!("{} {}", e.name, pages_name(e.thp));
                [("KSM", &e.ksm), ("vmm-dedup", &e.ours.same)]
                    .map(|(side, figures)| (group.clone(), side.to_owned(), figure(figures)))
            });
            Plot::bars(name, title, unit, sides)
        };
        vec![
            bars("ksm-freed", "Memory freed", "MiB", |k| {
                k.freed_bytes / f64::from(1 << 20)
            }),
            bars("ksm-cpu", "CPU time to get there", "s", |k| k.cpu_s),
            bars(
                "ksm-idle",
                "CPU time of a pass when nothing was written",
                "ms",
                |k| k.idle_pass_cpu_s * 1e3,
            ),
        ]
    }

    pub(super) fn print(&self) {
        say!(
            "{} MiB, medians of {} runs, Linux {}",
            self.mib,
            self.repetitions,
            self.kernel
        );
        say!(
            "                        cpu s          idle ms        dirty ms        saved pages     freed MiB"
        );
        for e in &self.kinds {
            let (k, o) = (&e.ksm, &e.ours.same);
            let mib = f64::from(1 << 20);
            let name = format!("{} {}", e.name, pages_name(e.thp));
            say!(
                "{name:<15} ksm  {:>8.3}       {:>8.2}       {:>8.2}       {:>10.0}     {:>8.1}",
                k.cpu_s,
                k.idle_pass_cpu_s * 1e3,
                k.dirty_pass_cpu_s * 1e3,
                k.saved_pages,
                k.freed_bytes / mib
            );
            say!(
                "{:<15} ours {:>8.3}       {:>8.2}       {:>8.2}       {:>10.0}     {:>8.1}",
                "",
                o.cpu_s,
                o.idle_pass_cpu_s * 1e3,
                o.dirty_pass_cpu_s * 1e3,
                o.saved_pages,
                o.freed_bytes / mib
            );
            let r = &e.ratio;
            say!(
                "{:<15} =    {:>7.1}x       {:>7.1}x       {:>7.1}x       {:>9.3}x     {:>7.3}x  freed/claimed {:.3}",
                "",
                r.cpu,
                r.idle,
                r.dirty,
                r.saved,
                r.freed,
                r.claim
            );
            say!(
                "{:<15}      {:.1} metadata bytes/page, {:.3} VMAs per merged page, stops p99 {:.0} us, max {:.0} us",
                "",
                e.ours.metadata_bytes_per_page,
                e.ours.vmas_per_merged_page,
                e.ours.stop_p99_us,
                e.ours.stop_max_us
            );
        }
    }
}
