//! `bench mixed`: what each policy for huge pages saves, and what it costs in speed, all policies in one run.
//!
//! Each policy works in processes and with stores of its own, on plain memory and on guests. The memory has a hot part, a warm
//! and a cold part with many duplicates, and a cold unique part; then the roles change. Speed is accesses per second of the
//! accessing thread's CPU time, so that other load on the machine counts little.
//!
//! Speed differs by some per cent from process to process, since the memory does, and from minute to minute, since the
//! machine does. So each process measures itself before there is dedup as well, and all the time a control area beside the
//! memory under test; policies take turns, in one order and then in the other, and what is compared are ratios of one round.

mod agent;
mod churn;
mod guests;
mod measured;
mod parts;
mod process;
mod report;
mod setup;
mod subject;
mod summary;

use crate::plots::Plots;
use crate::report::print_json;
use crate::service::Breaker;
use crate::{host, worker};
use clap::Args;
use measured::Measured;
use report::Report;
use serde::de::DeserializeOwned;
use setup::Setup;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use subject::Subject;
use vmm_dedup::UseSource;
use vmm_dedup_host::store::OwnStore;
use vmm_dedup_host::{Failure, children, kvm, note, termination};

/// Compare the policies for huge pages: memory saved, speed of random access, CPU time.
///
/// The memory: a quarter is hot (one page in 32 has a twin); a quarter is warm, read some hundred times a second in each
/// 2 MiB, and three eighths are cold (every second page has a twin in both); the rest is cold and unique. Later a part of
/// the cold memory turns hot. Needs 2 MiB pages (transparent_hugepage "madvise" or "always"); the guests need /dev/kvm,
/// and are left out without it.
#[derive(Args, Debug)]
pub(crate) struct MixedArgs {
    /// Memory under test, MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=65_536))]
    mib: u32,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Milliseconds between two samples of what is used.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..=60_000))]
    interval_ms: u32,
    /// Rounds; of each figure the median is reported, and of ratios the median of the rounds' ratios.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Rounds in which content is replaced, before the figures are taken once more: in each a quarter of the 256 KiB extents of
    /// the warm and the cold memory, by content that is new and repeats as before. A round lasts two intervals.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    churn: u32,
    /// Only these policies; without dedup ("none") is always measured. POLICY@US samples use for so many microseconds
    /// (100 to 100000): shorter samples find less memory in use. All policies, and ingens with several, unless given.
    #[arg(long, value_delimiter = ',', value_name = "POLICY[@US]")]
    policies: Vec<Subject>,
    /// What tells which memory is used: fault-sampling, damon, page-idle, writes, or agent: one that knows what is hot, warm and cold,
    /// and tells it each interval, of plain memory. (Guests of the bench have no vsock, so that fault-sampling tells.)
    #[arg(long, default_value_t = UseSource::default())]
    use_source: UseSource,
    /// Who copies shared pages on write: as a service has it, unless given.
    #[arg(long, value_enum)]
    breaks: Option<Breaker>,
    /// Measure plain memory only, no guests.
    #[arg(long)]
    no_guests: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One policy in a process of its own (internal).
#[derive(Args, Debug)]
pub(crate) struct WorkerArgs {
    #[arg(long, requires = "store")]
    subject: Option<Subject>,
    #[arg(long)]
    store: Option<PathBuf>,
    #[arg(long, default_value_t = 0)]
    store_pid: u32,
    #[arg(long)]
    mib: u32,
    #[arg(long)]
    seconds: u32,
    #[arg(long)]
    interval_ms: u32,
    #[arg(long)]
    churn: u32,
    #[arg(long)]
    use_source: UseSource,
    #[arg(long, value_enum)]
    breaks: Breaker,
    /// Guests, not plain memory.
    #[arg(long)]
    guests: bool,
}

/// Runs the comparison.
pub(crate) fn run(args: &MixedArgs, plots: &Plots) -> Result<(), Failure> {
    host::need_memory(u64::from(args.mib) << 21)?;
    let breaks = args.breaks.unwrap_or_else(Breaker::usual);
    let report = Report::new(args.mib, args.seconds, args.interval_ms, breaks);
    let so_far = Arc::new(Mutex::new(report));
    let (told, json, folder) = (so_far.clone(), args.json, plots.clone());
    let is_stopped = Arc::new(AtomicBool::new(true));
    let stopped = is_stopped.clone();
    let finish = move || {
        children::remove_folder();
        // Also of a run that is stopped: what was measured was measured.
        let report = locked(&told);
        show(&report, json);
        if stopped.load(Ordering::Relaxed) && !report.is_empty() {
            let _ = (folder.write(|| report.plots())).inspect_err(|failure| note!("{failure}"));
        }
    };
    termination::on_termination(finish, || {
        let compared = compare(args, &so_far);
        is_stopped.store(compared.is_err(), Ordering::Relaxed);
        compared
    })?;
    plots.write(|| locked(&so_far).plots())
}

fn locked(report: &Mutex<Report>) -> MutexGuard<'_, Report> {
    report.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows what there is of a report.
fn show(report: &Report, json: bool) {
    match (report.is_empty(), json) {
        (true, _) => {}
        (false, false) => report.print(),
        (false, true) => {
            let _ = print_json(report).inspect_err(|failure| note!("{failure}"));
        }
    }
}

fn compare(args: &MixedArgs, report: &Mutex<Report>) -> Result<(), Failure> {
    let subjects = if args.policies.is_empty() {
        Subject::usual()
    } else {
        args.policies.clone()
    };
    let guests = !args.no_guests && can_run_guests();
    for round in 1..=args.rounds {
        let mut turns: Vec<Option<Subject>> = std::iter::once(None)
            .chain(subjects.iter().copied().map(Some))
            .collect();
        if round % 2 == 0 {
            turns.reverse();
        }
        for subject in turns {
            let name = subject::name(subject);
            note!("round {round} of {}: {name}", args.rounds);
            let process = measure(args, subject, false)?;
            let guests = guests.then(|| measure(args, subject, true)).transpose()?;
            locked(report).add(Measured {
                policy: name,
                round,
                process,
                guests,
            });
        }
    }
    Ok(())
}

fn can_run_guests() -> bool {
    match kvm::need() {
        Ok(()) => true,
        Err(failure) => {
            note!("no guests: {failure}");
            false
        }
    }
}

/// Measures in a process of its own: what one did to its address space is not to be another's trouble.
fn measure<T: DeserializeOwned>(
    args: &MixedArgs,
    subject: Option<Subject>,
    guests: bool,
) -> Result<T, Failure> {
    let mut command = children::command()?;
    command.args(["bench", "mixed-worker"]);
    for (name, value) in [
        ("--mib", args.mib),
        ("--seconds", args.seconds),
        ("--interval-ms", args.interval_ms),
        ("--churn", args.churn),
    ] {
        command.args([name, &value.to_string()]);
    }
    command.args(["--use-source", args.use_source.name()]);
    let breaks = args.breaks.unwrap_or_else(Breaker::usual);
    command.args(["--breaks", breaks.name()]);
    if guests {
        command.arg("--guests");
    }
    let store = subject.map(|_| OwnStore::start("mixed", None)).transpose()?;
    if let (Some(subject), Some(store)) = (subject, &store) {
        let store_pid = store.pid().to_string();
        command.args(["--subject", &subject.to_string(), "--store-pid", &store_pid]);
        command.arg("--store").arg(store.socket());
    }
    worker::ask(&mut command, &subject::name(subject))
}

/// The process behind [`measure`].
pub(crate) fn work(args: &WorkerArgs) -> Result<(), Failure> {
    let setup = Setup {
        subject: args.subject,
        use_source: args.use_source,
        breaks: args.breaks,
        store: args.store.as_deref(),
        store_pid: args.store_pid,
        seconds: Duration::from_secs(args.seconds.into()),
        interval_ms: args.interval_ms.into(),
        churn: args.churn,
    };
    if args.guests {
        worker::answer(&guests::measure(&setup)?)
    } else {
        worker::answer(&process::measure(&setup, args.mib)?)
    }
}
