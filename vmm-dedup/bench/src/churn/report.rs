//! Medians, ratios, and how they are shown.

use super::measured::{Round, Run, Store};
use super::pattern::Kind;
use crate::content::pages_name;
use crate::plots::Plot;
use crate::report::median;
use crate::service::Breaker;
use serde::Serialize;
use vmm_dedup_host::say;

/// KSM/ours for costs, ours/KSM for gains: bigger is better in all.
#[derive(Debug, PartialEq, Serialize)]
struct Ratio {
    /// Pages saved.
    saved: f64,
    freed: f64,
    /// CPU time of dedup.
    cpu: f64,
    /// Time of the writers.
    writers: f64,
    write_p99: f64,
    /// Freed / claimed, ours: 1 is true.
    claim: Option<f64>,
}

impl Ratio {
    fn of(ksm: &Round, ours: &Round) -> Self {
        let claimed = ours.ours.as_ref().map(|o| o.claimed_bytes as f64);
        Self {
            saved: ours.saved_pages as f64 / ksm.saved_pages as f64,
            freed: ours.freed_bytes as f64 / ksm.freed_bytes as f64,
            cpu: ksm.cpu_s / ours.cpu_s,
            writers: ksm.writes.writers_s / ours.writes.writers_s,
            write_p99: ksm.writes.write_p99_us / ours.writes.write_p99_us,
            claim: claimed.map(|claimed| ours.freed_bytes as f64 / claimed),
        }
    }
}

/// One side.
#[derive(Debug, Serialize)]
struct Figures {
    /// The first merging, before anything is replaced.
    first: Round,
    /// Over all rounds and repetitions.
    median: Round,
    /// The last round, over repetitions.
    last: Round,
    #[serde(skip_serializing_if = "Option::is_none")]
    one_guest_left: Option<Store>,
}

impl Figures {
    /// `None` without a round.
    fn of(runs: &[Run]) -> Option<Self> {
        let of = |rounds: Vec<&Round>| (!rounds.is_empty()).then(|| median(&rounds));
        let left: Vec<&Store> = runs
            .iter()
            .filter_map(|run| run.one_guest_left.as_ref())
            .collect();
        Some(Self {
            first: of(runs.iter().filter_map(|run| run.rounds.first()).collect())?,
            median: of(runs.iter().flat_map(Run::churn).collect())?,
            last: of(runs.iter().filter_map(|run| run.rounds.last()).collect())?,
            one_guest_left: (!left.is_empty()).then(|| median(&left)),
        })
    }
}

/// One kind, with pages of one size.
#[derive(Debug, Serialize)]
struct Entry {
    name: Kind,
    thp: bool,
    ksm: Figures,
    ours: Figures,
    ratio: Ratios,
    /// Every round of every repetition.
    runs: Runs,
}

#[derive(Debug, Serialize)]
struct Ratios {
    first: Ratio,
    median: Ratio,
    last: Ratio,
}

#[derive(Debug, Serialize)]
struct Runs {
    ksm: Vec<Run>,
    ours: Vec<Run>,
}

/// What was compared, and where.
#[derive(Debug, Serialize)]
pub(super) struct About {
    pub(super) mib: u32,
    pub(super) guests: u32,
    pub(super) rounds: u32,
    pub(super) repetitions: u32,
    pub(super) breaks: Breaker,
    pub(super) patience_s: u32,
    /// Whether the store's memory came in folios of 64 KiB, as we recommend it.
    pub(super) store_large_folios: bool,
    pub(super) kernel: String,
}

/// The result of a comparison.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    about: About,
    kinds: Vec<Entry>,
}

impl Report {
    pub(super) fn new(about: About) -> Self {
        Self {
            about,
            kinds: Vec::new(),
        }
    }

    /// Adds the runs of both sides, of which there are some.
    pub(super) fn add(&mut self, name: Kind, thp: bool, ksm: Vec<Run>, ours: Vec<Run>) {
        let runs = Runs { ksm, ours };
        let (Some(ksm), Some(ours)) = (Figures::of(&runs.ksm), Figures::of(&runs.ours)) else {
            return;
        };
        self.kinds.push(Entry {
            name,
            thp,
            ratio: Ratios {
                first: Ratio::of(&ksm.first, &ours.first),
                median: Ratio::of(&ksm.median, &ours.median),
                last: Ratio::of(&ksm.last, &ours.last),
            },
            ksm,
            ours,
            runs,
        });
    }

    pub(super) fn plots(&self) -> Vec<Plot> {
        let lines = |name, title, unit, figure: fn(&Round) -> f64| {
            let sides = self.kinds.iter().flat_map(|e| {
                let of = format!("{} {}", e.name, pages_name(e.thp));
                let sides = [("KSM", &e.runs.ksm), ("vmm-dedup", &e.runs.ours)];
                sides.map(|(side, runs)| {
                    // The first repetition: a line is one course of events.
                    let rounds = runs.first().into_iter().flat_map(|run| &run.rounds);
                    let points = rounds.map(|round| (f64::from(round.round), figure(round)));
                    (format!("{of}, {side}"), points.collect())
                })
            });
            Plot::lines(name, title, ("round", unit), sides.collect())
        };
        vec![
            lines("churn-shared", "Shared of what guests have in common", "%", |r| {
                r.saved_of_common * 100.0
            }),
            lines("churn-freed", "Memory freed", "MiB", |r| {
                r.freed_bytes as f64 / MIB
            }),
            lines("churn-cpu", "CPU time of dedup", "s", |r| r.cpu_s),
        ]
    }

    pub(super) fn print(&self) {
        let about = &self.about;
        say!(
            "{} guests of {} MiB, {} rounds, {} runs, breaks by the {}, Linux {}",
            about.guests,
            about.mib,
            about.rounds,
            about.repetitions,
            match about.breaks {
                Breaker::Kernel => "kernel",
                Breaker::Managed => "service",
            },
            about.kernel
        );
        for entry in &self.kinds {
            say!(
                "\n{:<22} {:>8} {:>9} {:>9} {:>10} {:>9}",
                format!("{} {}", entry.name, pages_name(entry.thp)),
                "shared %",
                "freed MiB",
                "CPU s",
                "writers s",
                "p99 us"
            );
            let Entry { ksm, ours, ratio, .. } = entry;
            for (when, ksm, ours, ratio) in [
                ("first", &ksm.first, &ours.first, &ratio.first),
                ("median", &ksm.median, &ours.median, &ratio.median),
                ("last", &ksm.last, &ours.last, &ratio.last),
            ] {
                line(when, "ksm", ksm);
                line(when, "ours", ours);
                ratio.print(when);
            }
            store(ours);
        }
    }
}

const MIB: f64 = 1048576.0;

fn line(when: &str, side: &str, round: &Round) {
    say!(
        "  {when:<8} {side:<11} {:>8.1} {:>9.1} {:>9.3} {:>10.3} {:>9.1}",
        round.saved_of_common * 100.0,
        round.freed_bytes as f64 / MIB,
        round.cpu_s,
        round.writes.writers_s,
        round.writes.write_p99_us
    );
}

impl Ratio {
    fn print(&self, when: &str) {
        let times = |ratio: f64, digits: usize| match ratio.is_finite() {
            true => format!("{ratio:.digits$}x"),
            false => "-".to_owned(),
        };
        say!(
            "  {when:<8} {:<11} {:>8} {:>9} {:>9} {:>10} {:>9}  freed/claimed {}",
            "=",
            times(self.saved, 3),
            times(self.freed, 3),
            times(self.cpu, 1),
            times(self.writers, 2),
            times(self.write_p99, 2),
            times(self.claim.unwrap_or(f64::NAN), 3)
        );
    }
}

fn store(figures: &Figures) {
    let show = |when: &str, more: String, store: &Store| {
        let settled = store
            .store_settled_s
            .map_or("not in keeping with it".to_owned(), |s| {
                format!("in keeping with it after {s:.0} s")
            });
        say!(
            "  {when:<8} {more}store: {:.1} MiB resident for {:.1} MiB in use, {settled}",
            store.store_resident_bytes as f64 / MIB,
            store.slots_in_use as f64 * 4096.0 / MIB
        );
    };
    for (when, round) in [("median", &figures.median), ("last", &figures.last)] {
        if let Some(ours) = &round.ours {
            let more = format!(
                "{} VMAs for {} runs of content, {:.3} per merged page; ",
                ours.vmas, round.common_runs, ours.vmas_per_merged_page
            );
            show(when, more, &ours.store);
        }
    }
    if let Some(left) = &figures.one_guest_left {
        show("one left", String::new(), left);
    }
}
