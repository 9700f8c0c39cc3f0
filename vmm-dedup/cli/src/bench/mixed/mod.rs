//! `bench mixed`: what each policy for huge pages saves, and what it costs in speed, all policies in one run.
//!
//! Each policy works in processes and with stores of its own, on plain memory and on guests. The memory has a hot part, a warm
//! and a cold part with many duplicates, and a cold unique part; then the roles change. Speed is accesses per second of the
//! accessing thread's CPU time, so that other load on the machine counts little.
//!
//! Speed differs by some per cent from process to process, since the memory does, and from minute to minute, since the
//! machine does. So each process measures itself before there is dedup as well, and all the time a control area beside the
//! memory under test; policies take turns, in one order and then in the other, and what is compared are ratios of one round.

mod guests;
mod process;
mod report;
mod subject;
mod summary;

use super::host;
use clap::Args;
use report::{Measured, Report};
use serde::Deserialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use subject::Subject;
use vmm_dedup::{Breaks, Config, DedupService, ServiceStats, UseSource};
use vmm_dedup_host::Failure;
use vmm_dedup_host::children::{self, Process};

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
    /// Only these policies; without dedup ("none") is always measured. POLICY@US samples use for so many microseconds
    /// (100 to 100000): shorter samples find less memory in use. All policies, and ingens with several, unless given.
    #[arg(long, value_delimiter = ',', value_name = "POLICY[@US]")]
    policies: Vec<Subject>,
    /// What tells which memory is used: take-and-wait, damon, page-idle or writes.
    #[arg(long, default_value_t = UseSource::default())]
    use_source: UseSource,
    /// Measure plain memory only, no guests.
    #[arg(long)]
    no_guests: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One policy in a process of its own (internal).
#[derive(Args, Debug)]
pub(crate) struct MixedWorkerArgs {
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
    use_source: UseSource,
    /// Guests, not plain memory.
    #[arg(long)]
    guests: bool,
}

/// Runs the comparison.
pub(crate) fn mixed(args: &MixedArgs) -> Result<(), Failure> {
    host::need_memory(u64::from(args.mib) << 21)?;
    let cleanup = || drop(std::fs::remove_dir_all(vmm_dedup_host::children::folder("mixed")));
    let report = vmm_dedup_host::termination::on_termination(cleanup, || compare(args))?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(Failure::from_error)?;
        println!("{text}");
    } else {
        report.print();
    }
    Ok(())
}

fn compare(args: &MixedArgs) -> Result<Report, Failure> {
    let subjects = if args.policies.is_empty() {
        Subject::usual()
    } else {
        args.policies.clone()
    };
    let guests = !args.no_guests && can_run_guests();
    let mut report = Report::new(args.mib, args.seconds, args.interval_ms);
    for round in 1..=args.rounds {
        let mut turns: Vec<Option<Subject>> = std::iter::once(None)
            .chain(subjects.iter().copied().map(Some))
            .collect();
        if round % 2 == 0 {
            turns.reverse();
        }
        for subject in turns {
            let name = subject::name(subject);
            eprintln!("round {round} of {}: {name}", args.rounds);
            let process = measure(args, subject, false)?;
            let guests = guests.then(|| measure(args, subject, true)).transpose()?;
            report.add(Measured {
                policy: name,
                round,
                process,
                guests,
            });
        }
    }
    Ok(report)
}

fn can_run_guests() -> bool {
    match vmm_dedup_host::kvm::need() {
        Ok(()) => true,
        Err(failure) => {
            eprintln!("no guests: {failure}");
            false
        }
    }
}

/// Measures in a process of its own: what one did to its address space is not to be another's trouble.
fn measure<T: for<'a> Deserialize<'a>>(
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
    ] {
        command.args([name, &value.to_string()]);
    }
    command.args(["--use-source", args.use_source.name()]);
    if guests {
        command.arg("--guests");
    }
    let store = subject
        .map(|_| vmm_dedup_host::store::OwnStore::start("mixed", None))
        .transpose()?;
    if let (Some(subject), Some(store)) = (subject, &store) {
        let store_pid = store.pid().to_string();
        command.args(["--subject", &subject.to_string(), "--store-pid", &store_pid]);
        command.arg("--store").arg(store.socket());
    }
    let process = Process::start(command.stdin(Stdio::null()).stdout(Stdio::piped()));
    let process = process.map_err(|e| Failure::new(format!("cannot start a measurement: {e}")))?;
    let mut answer = Vec::new();
    if let Some(mut output) = process.output() {
        output.read_to_end(&mut answer).map_err(Failure::from_error)?;
    }
    let status = process.wait().map_err(Failure::from_error)?;
    if !status.success() {
        let name = subject::name(subject);
        return Err(Failure::new(format!(
            "the measurement of {name} failed ({status})"
        )));
    }
    serde_json::from_slice(&answer).map_err(|e| Failure::new(format!("unreadable measurement: {e}")))
}

/// The process behind [`measure`].
pub(crate) fn worker(args: &MixedWorkerArgs) -> Result<(), Failure> {
    let setup = Setup {
        subject: args.subject,
        use_source: args.use_source,
        store: args.store.as_deref(),
        store_pid: args.store_pid,
        seconds: Duration::from_secs(args.seconds.into()),
        interval_ms: args.interval_ms.into(),
    };
    let measured = if args.guests {
        serde_json::to_string(&guests::measure(&setup)?)
    } else {
        serde_json::to_string(&process::measure(&setup, args.mib)?)
    };
    println!("{}", measured.map_err(Failure::from_error)?);
    Ok(())
}

/// Longest time to wait until a policy has settled.
const PATIENCE: Duration = Duration::from_secs(45);
/// Intervals that a policy has at least: it may need some to see what is used.
const MIN_INTERVALS: u32 = 10;
/// Intervals without merging after which it has settled: unchanged huge pages are looked at ever less often.
const QUIET_INTERVALS: u32 = 8;

/// What a measurement works with.
struct Setup<'a> {
    /// `None`: no dedup.
    subject: Option<Subject>,
    use_source: UseSource,
    store: Option<&'a Path>,
    store_pid: u32,
    seconds: Duration,
    interval_ms: u64,
}

impl Setup<'_> {
    fn config(&self, name: &str, subject: Subject) -> Config {
        let defaults = Config::default();
        Config {
            name: name.into(),
            pass_period_ms: (self.interval_ms / 4).max(10),
            // Costs are measured; what a budget would put off is not to be.
            cpu_percent: 100,
            huge_policy: subject.policy,
            use_source: self.use_source,
            monitor_interval_ms: self.interval_ms,
            monitor_window_us: subject.window_us.unwrap_or(defaults.monitor_window_us),
            // What the kernel copies may be pinned and could not be built again.
            breaks: Breaks::Managed {
                reserve_pages: 4096,
                floor_bytes: 256 << 20,
            },
            ..defaults
        }
    }

    /// Waits for [`MIN_INTERVALS`], then until nothing has been merged for [`QUIET_INTERVALS`], at most [`PATIENCE`]: what is
    /// written all the time is merged and broken again for ever.
    fn settle(&self, services: &[DedupService]) {
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(self.interval_ms) * MIN_INTERVALS);
        let mut last = (0, Instant::now());
        while start.elapsed() < PATIENCE {
            let sum = services.iter().map(DedupService::stats).fold(0, |sum, s| {
                sum + s.merges_total + s.zero_merges_total + s.huge_rebuilt_total + s.huge_splits_total
            });
            if sum != last.0 {
                last = (sum, Instant::now());
            } else if last.1.elapsed() > Duration::from_millis(self.interval_ms) * QUIET_INTERVALS {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Pages saved: mapped, beyond the first of each content, and zero.
    fn saved_pages(&self, services: &[DedupService]) -> Result<u64, Failure> {
        let Some(store) = self.store else { return Ok(0) };
        let mapped: u64 = services
            .iter()
            .map(DedupService::stats)
            .map(|s| s.pages_mapped + s.pages_zero)
            .sum();
        Ok(mapped.saturating_sub(vmm_dedup_host::account::of_store(store)?.0.pages_shared))
    }

    /// CPU time so far: `(monitors, all else of dedup with the store)`, seconds.
    fn cpu(&self, services: &[DedupService]) -> Result<(f64, f64), Failure> {
        let stats: Vec<ServiceStats> = services.iter().map(DedupService::stats).collect();
        let monitor: u64 = stats.iter().map(|s| s.cpu_ns.monitor).sum();
        let threads: u64 = stats.iter().map(|s| s.cpu_ns.total()).sum();
        let store = self.store.map_or(Ok(0), |_| host::cpu_ns(self.store_pid, ""))?;
        let seconds = super::ksm::seconds;
        Ok((seconds(monitor), seconds(threads - monitor + store)))
    }
}
