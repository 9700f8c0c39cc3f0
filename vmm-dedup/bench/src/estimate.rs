//! `bench estimate`: an estimate's reading speed beside that of reading alone, in turn, in one run.

use crate::plots::{Plot, Plots};
use clap::Args;
use serde_json::json;
use std::time::Instant;
use vmm_dedup_estimate::{Inputs, Memory, Reading, Sample, estimate, read_plainly};
use vmm_dedup_host::{Failure, say};

/// Compare the speed of an exact estimate with that of reading the same data and nothing else.
///
/// Both read in turn, with the same threads, after one reading that warms up the page cache; the fastest of each
/// is reported.
#[derive(Args, Debug)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    inputs: Inputs,
    /// Repetitions of each.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the comparison.
pub(crate) fn run(args: &EstimateArgs, plots: &Plots) -> Result<(), Failure> {
    let memories = args.inputs.open().map_err(Failure::from_error)?;
    let bytes = memories.iter().map(Memory::pages).sum::<u64>() as f64 * 4096.0;
    let reading = Reading {
        threads: args.inputs.threads(),
        progress: &|_, _| (),
    };
    let plain = || read_plainly(&memories, &reading).map(std::hint::black_box);
    plain().map_err(Failure::from_error)?;
    let (mut plain_s, mut estimate_s) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..args.repetitions {
        let start = Instant::now();
        plain().map_err(Failure::from_error)?;
        plain_s = plain_s.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        std::hint::black_box(estimate(&memories, Sample::ALL, &reading)).map_err(Failure::from_error)?;
        estimate_s = estimate_s.min(start.elapsed().as_secs_f64());
    }
    let (plain, estimate) = (bytes / plain_s, bytes / estimate_s);
    if args.json {
        let report = json!({
            "bytes": bytes,
            "threads": reading.threads,
            "plain_bytes_per_second": plain,
            "estimate_bytes_per_second": estimate,
            "ratio": estimate / plain,
        });
        say!("{report:#}");
    } else {
        say!(
            "{:.0} MiB, {} threads: reading {:.2} GB/s, estimating {:.2} GB/s, ratio {:.2}",
            bytes / f64::from(1 << 20),
            reading.threads,
            plain / 1e9,
            estimate / 1e9,
            estimate / plain
        );
    }
    plots.write(|| {
        let speeds = [("reading", plain), ("estimating", estimate)];
        let speeds = speeds.map(|(what, speed)| (what.to_owned(), "speed".to_owned(), speed / 1e9));
        vec![Plot::bars("estimate", "Reading memory", "GB/s", speeds)]
    })
}
