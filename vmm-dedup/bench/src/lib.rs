//! What `vmm-dedup bench` measures.
//!
//! - `ksm`: the same content, first under the kernel's KSM, then under our engine ([`ksm`]);
//! - `engines`: the engines that compare pages, side by side ([`engines`]);
//! - `dsa`: the CPU and Intel DSA, one page an offload and in batches ([`dsa`]);
//! - `mixed`: the policies for huge pages ([`mixed`]);
//! - `churn`: whether sharing lasts while content is replaced, under KSM and under our engine ([`churn`]);
//! - `estimate`: how fast an estimate reads ([`estimate`]);
//! - `pack`: what packing of pages without a twin saves on images, and what it costs ([`pack`]).
//!
//! A measurement works on memory with known content ([`content`]), asks the host what it took ([`host`]; [`kernel`] for KSM),
//! and runs in a process of its own ([`worker`]): this program again, with an internal subcommand. So nothing of one
//! measurement is left for the next. Every bench checks at its end that no byte of the memory is wrong.
//!
//! The crate is no part of the product: the command line has it as its feature `bench`, and nothing else uses it.

#![deny(clippy::print_stdout, clippy::print_stderr)] // `vmm_dedup_host::output` is for that

mod churn;
mod content;
mod dsa;
mod engines;
mod estimate;
mod host;
mod kernel;
mod ksm;
mod mixed;
mod pack;
mod plots;
mod report;
mod service;
mod worker;

use clap::{Args, Subcommand};
use plots::Plots;
use std::path::PathBuf;
use vmm_dedup_host::Failure;

/// Measure.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// Write plots of the figures into this folder, as SVG files.
    #[arg(long, global = true, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand, Debug)]
enum Bench {
    Ksm(ksm::KsmArgs),
    Engines(engines::EnginesArgs),
    Dsa(dsa::DsaArgs),
    Mixed(mixed::MixedArgs),
    Churn(churn::ChurnArgs),
    Estimate(estimate::EstimateArgs),
    Pack(pack::PackArgs),
    #[command(hide = true)]
    Worker(ksm::WorkerArgs),
    #[command(hide = true)]
    MixedWorker(mixed::WorkerArgs),
    #[command(hide = true)]
    ChurnGuest(churn::GuestArgs),
}

/// Runs a bench.
///
/// # Errors
/// A [`Failure`] if it cannot be run here, or if memory did not hold what was written to it.
pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    let plots = &Plots::into(args.plot.as_deref())?;
    match &args.bench {
        Bench::Ksm(args) => ksm::run(args, plots),
        Bench::Engines(args) => engines::run(args, plots),
        Bench::Dsa(args) => dsa::run(args, plots),
        Bench::Mixed(args) => mixed::run(args, plots),
        Bench::Churn(args) => churn::run(args, plots),
        Bench::Estimate(args) => estimate::run(args, plots),
        Bench::Pack(args) => pack::run(args, plots),
        Bench::Worker(args) => ksm::work(args),
        Bench::MixedWorker(args) => mixed::work(args),
        Bench::ChurnGuest(args) => churn::work(args),
    }
}
