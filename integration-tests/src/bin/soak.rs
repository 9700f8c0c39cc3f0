//! The soak: a fleet that churns for hours. `cargo run --release -p vmm-dedup-integration-tests --bin soak -- --minutes 240`

use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use vmm_dedup_integration_tests::soak::{fleet, pair};

/// A fleet that churns: payload guests that write what they share and come and go, and VMs with direct I/O. Progress goes to
/// standard error, an account in JSON to standard output. Ends with 0 if no word was wrong, sharing has not decayed, and neither
/// the store nor the mappings nor the memory of the processes have grown.
#[derive(Parser, Debug)]
struct Args {
    /// How long, in minutes.
    #[arg(long, default_value_t = 240, conflicts_with = "seconds")]
    minutes: u64,
    /// The same in seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// To be the process with direct I/O, on this store.
    #[arg(long, hide = true)]
    pair: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    if let Some(store) = args.pair {
        pair::run(&store);
        return ExitCode::SUCCESS;
    }
    let duration = Duration::from_secs(args.seconds.unwrap_or(args.minutes * 60));
    let program = std::env::current_exe().expect("this program has a path");
    let outcome = fleet::run(duration, &program);
    println!("{:#}", outcome.json());
    let problems = outcome.problems();
    problems.iter().for_each(|problem| eprintln!("soak: {problem}"));
    if problems.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
