//! `bench ksm`: the same content, first under the kernel's KSM, then under our engine, in one run.
//!
//! Each measurement runs in a process of its own, so that nothing of one is left for the next. Both sides get the
//! whole machine in turn. CPU is read in nanoseconds from schedstat: of ksmd on one side, of the service's threads
//! and the whole store process on the other.

mod measured;
mod ours;
mod report;
mod theirs;

use crate::content::{self, Kind, page_sizes, pages_name};
use crate::kernel::Comparison;
use crate::plots::Plots;
use crate::report::print_json;
use crate::{host, worker};
use clap::Args;
use measured::Measured;
use report::Report;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use vmm_dedup_host::store::OwnStore;
use vmm_dedup_host::{Failure, children, note, termination};

/// Compare with the kernel's KSM: CPU, savings and memory really freed, on the same content in the same run.
#[derive(Args, Debug)]
pub(crate) struct KsmArgs {
    /// Memory to deduplicate, MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=65_536))]
    mib: u32,
    /// Instead of made-up content, what is in these memory images, each that of a guest (see `estimate` for what a
    /// FILE may be). Zero pages are not written, as guests do not touch what they have never used.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["kinds", "mib"])]
    images: Vec<PathBuf>,
    /// Repetitions of each measurement; medians are reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: u32,
    /// Only these content kinds.
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Only with (true) or without (false) transparent huge pages.
    #[arg(long)]
    thp: Option<bool>,
    /// Run although KSM is in use on this host: all of its pages are unmerged, again and again.
    #[arg(long)]
    force: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One measurement in a process of its own (internal).
#[derive(Args, Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkerArgs {
    /// Measure our engine with this store rather than KSM.
    #[arg(long)]
    store: Option<PathBuf>,
    /// The store's process.
    #[arg(long, default_value_t = 0)]
    store_pid: u32,
    #[arg(long, value_enum)]
    kind: Kind,
    #[arg(long)]
    thp: bool,
    #[arg(long)]
    mib: u32,
    #[arg(long, num_args = 1..)]
    images: Vec<PathBuf>,
}

/// Runs the comparison.
pub(crate) fn run(args: &KsmArgs, plots: &Plots) -> Result<(), Failure> {
    if args.kinds.contains(&Kind::Images) {
        return Err(Failure::usage(
            "images are named with --images FILE..., without --kinds",
        ));
    }
    let mib = match args.images.as_slice() {
        [] => args.mib,
        images => content::total_mib(images)?,
    };
    host::need_memory(u64::from(mib) << 21)?;
    let comparison = Comparison::begin(args.force)?;
    let large_folios = comparison.has_large_folios();
    let cleanup = move || {
        drop(comparison);
        children::remove_folder();
    };
    termination::on_termination(cleanup, || compare(args, mib, large_folios)).and_then(|report| {
        match args.json {
            true => print_json(&report)?,
            false => report.print(),
        }
        plots.write(|| report.plots())
    })
}

fn compare(args: &KsmArgs, mib: u32, large_folios: bool) -> Result<Report, Failure> {
    let all = [Kind::Scattered, Kind::Runs, Kind::Files];
    let kinds: &[Kind] = match (args.images.is_empty(), args.kinds.is_empty()) {
        (false, _) => &[Kind::Images],
        (true, true) => &all,
        (true, false) => &args.kinds,
    };
    let mut report = Report::new(mib, args.repetitions, large_folios);
    for kind in kinds {
        for thp in page_sizes(args.thp) {
            let (mut theirs, mut ours) = (Vec::new(), Vec::new());
            for repetition in 1..=args.repetitions {
                note!(
                    "{kind} {} run {repetition} of {}",
                    pages_name(*thp),
                    args.repetitions
                );
                let worker = WorkerArgs {
                    store: None,
                    store_pid: 0,
                    kind: *kind,
                    thp: *thp,
                    mib,
                    images: args.images.clone(),
                };
                theirs.push(measure(&worker)?);
                ours.push(measure_ours(worker)?);
            }
            report.add(*kind, *thp, &theirs, &ours);
        }
    }
    Ok(report)
}

fn measure_ours(worker: WorkerArgs) -> Result<Measured, Failure> {
    let store = OwnStore::start("bench", None)?;
    measure(&WorkerArgs {
        store: Some(store.socket().to_owned()),
        store_pid: store.pid(),
        ..worker
    })
}

/// Runs a worker process and reads its answer.
fn measure(args: &WorkerArgs) -> Result<Measured, Failure> {
    let mut command = children::command()?;
    command.args([
        "bench",
        "worker",
        "--kind",
        &args.kind.to_string(),
        "--mib",
        &args.mib.to_string(),
    ]);
    if args.thp {
        command.arg("--thp");
    }
    if let Some(store) = &args.store {
        command
            .arg("--store")
            .arg(store)
            .args(["--store-pid", &args.store_pid.to_string()]);
    }
    if !args.images.is_empty() {
        command.arg("--images").args(&args.images);
    }
    worker::ask(&mut command, &args.kind.to_string())
}

/// The process behind [`measure`].
pub(crate) fn work(args: &WorkerArgs) -> Result<(), Failure> {
    let mut area = content::fill(args.kind, args.thp, args.mib, &args.images)?;
    let measured = match &args.store {
        None => theirs::measure(&mut area)?,
        Some(store) => ours::measure(&mut area, store, args.store_pid)?,
    };
    worker::answer(&measured)
}
