//! What the preload library costs a VM that it does not deduplicate: Cloud Hypervisor with and without it, in turn. A run
//! boots the payload, which fills its memory and then verifies every page of it.
//!
//! `cargo run --release -p vmm-dedup-integration-tests --bin overhead`
#![allow(unsafe_code)] // getrusage

use clap::Parser;
use serde_json::json;
use std::process::ExitCode;
use std::time::Instant;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::unmodified::{Options, Program, Vmm, assert_clean, library};
use vmm_dedup_payload::PayloadConfig;

/// Run Cloud Hypervisor with and without the preload library, dedup switched off, and compare.
///
/// Ends with 1 if the median ratio of boot or sweep times is above the limit, with 2 if there is no cloud-hypervisor on
/// the PATH or in the variable CLOUD_HYPERVISOR.
#[derive(Parser, Debug)]
struct Args {
    /// Pairs of runs.
    #[arg(long, default_value_t = 15)]
    pairs: u32,
    /// Guest memory that is swept, MiB.
    #[arg(long, default_value_t = 128)]
    mib: u64,
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
    /// From then to the end of the process.
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
        let run = |options: &Options| run(&program, options, args.mib);
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
    if args.json {
        println!(
            "{}",
            json!({ "pairs": args.pairs, "boot": boot, "sweep": sweep, "cpu": cpu })
        );
    } else {
        println!("with the library / without, medians of {} pairs:", args.pairs);
        println!("boot {boot:.4}, memory sweep {sweep:.4}, CPU time {cpu:.4}");
    }
    ExitCode::from(u8::from(boot > args.limit || sweep > args.limit))
}

fn run(program: &Program, options: &Options, mib: u64) -> Run {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let payload = PayloadConfig::default().private_mib(mib).zero_mib(0).seconds(0);
    let (start, cpu) = (Instant::now(), children_cpu());
    let vm = Vmm::start(program, folder.path(), payload, options);
    vm.wait_ready(1);
    let boot = start.elapsed().as_secs_f64();
    assert_clean(&vm.end(1));
    Run {
        boot,
        sweep: start.elapsed().as_secs_f64() - boot,
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
