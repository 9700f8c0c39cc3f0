//! What the preload library costs a VM that it does not deduplicate: Cloud Hypervisor with and without it, in turn. A run
//! boots the payload, which fills its memory, writes and restores every page of it several times, and verifies it.
//!
//! `cargo run --release -p vmm-dedup-integration-tests --bin overhead`
#![allow(unsafe_code)] // getrusage

use clap::Parser;
use serde_json::json;
use std::hint::black_box;
use std::process::ExitCode;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::unmodified::{Options, Program, Vmm, assert_clean, library};
use vmm_dedup_payload::{PayloadConfig, Report, Rewrite, WorkingSet};

/// Run Cloud Hypervisor with and without the preload library, dedup switched off, and compare.
///
/// Ends with 1 if the median ratio of boot, sweep or their sum is above the limit, with 2 if there is no
/// cloud-hypervisor on the PATH or in the variable CLOUD_HYPERVISOR.
#[derive(Parser, Debug)]
struct Args {
    /// Pairs of runs.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Guest memory that is swept, MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=65536))]
    mib: u64,
    /// How often every page is written and restored.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=10000))]
    sweeps: u64,
    /// Greatest ratio of the medians that is accepted.
    #[arg(long, default_value_t = 1.02)]
    limit: f64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Seconds of one run.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// From the start of the process until the guest has filled its memory.
    boot: f64,
    /// From then until it has verified everything.
    sweep: f64,
    /// CPU time of the process.
    cpu: f64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let Some(program) = Program::cloud_hypervisor() else {
        eprintln!("no cloud-hypervisor: put it on the PATH, or name it in CLOUD_HYPERVISOR");
        return ExitCode::from(2);
    };
    let store = StoreThread::start();
    let with = Options {
        memory_mib: args.mib + 16,
        config: "enabled = false\n".into(),
        ..Options::new("vm", &store.socket())
    };
    let without = Options {
        store: None,
        ..with.clone()
    };
    // Built before the first measurement.
    let _ = library::path();
    let mut runs = Vec::new();
    for pair in 0..=args.pairs {
        // The order changes, since the first of two may find a warmer machine, or a colder one.
        let run = |options: &Options| run(&program, options, &args);
        let (a, b) = if pair % 2 == 0 {
            (run(&without), run(&with))
        } else {
            let b = run(&with);
            (run(&without), b)
        };
        // The first pair warms up.
        if pair > 0 {
            runs.push((a, b));
            eprintln!("pair {pair}: without {a:.3?}, with {b:.3?}");
        }
    }
    let ratio = |pick: fn(&Run) -> f64| median(runs.iter().map(|(a, b)| pick(b) / pick(a)).collect());
    let (boot, sweep, cpu) = (ratio(|r| r.boot), ratio(|r| r.sweep), ratio(|r| r.cpu));
    let both = ratio(|r| r.boot + r.sweep);
    if args.json {
        println!(
            "{}",
            json!({ "pairs": args.pairs, "boot": boot, "sweep": sweep, "both": both, "cpu": cpu })
        );
    } else {
        println!("with the library / without, medians of {} pairs:", args.pairs);
        println!("boot {boot:.4}, memory sweep {sweep:.4}, both {both:.4}, CPU time {cpu:.4}");
    }
    let most = boot.max(sweep).max(both);
    ExitCode::from(u8::from(most > args.limit))
}

/// On a host that is virtual itself, the first use of memory takes longer than any other: let it be ours.
fn warm_up(mib: u64) {
    let bytes = usize::try_from(mib << 20).expect("it fits");
    let mut memory = vec![0_u8; bytes];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    drop(black_box(memory));
}

fn run(program: &Program, options: &Options, args: &Args) -> Run {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let payload = PayloadConfig::default()
        .private_mib(args.mib)
        .zero_mib(0)
        .ws_area(WorkingSet::All)
        .ws_pages(u64::MAX)
        .rewrite(Rewrite::Restore)
        .rate(0)
        .seconds(3600)
        .report_ms(1000)
        .max_writes(args.sweeps * args.mib * 256);
    warm_up(2 * options.memory_mib);
    let cpu = children_cpu();
    let vm = Vmm::start(program, folder.path(), payload, options);
    vm.wait_ready(1);
    let boot = vm.started().elapsed();
    vm.wait("the end", 1, |r| matches!(r, Report::Done { .. }));
    let sweep = vm.started().elapsed() - boot;
    assert_clean(&vm.end(1));
    Run {
        boot: boot.as_secs_f64(),
        sweep: sweep.as_secs_f64(),
        cpu: children_cpu() - cpu,
    }
}

/// CPU seconds of all children that have ended.
#[allow(clippy::cast_precision_loss)] // seconds
fn children_cpu() -> f64 {
    // SAFETY: all-zero is a valid rusage, which the kernel then fills.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: usage is a valid, exclusive rusage.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}
