//! The `vmm-dedup` command: runs stores, the demo and the reference VMM, shows statistics, and measures.
//!
//! Each subcommand is a module of [`commands`], or a crate behind one: `vmm-dedup-fleet` and `vmm-dedup-bench`. What they ask
//! of the host, and the failure that they end with, is in `vmm-dedup-host`. This file only parses, and turns failures into
//! exit codes: 0 success, 1 failure, 2 something that the command needs is missing (or wrong usage, from clap), 141 the
//! reader of the output has gone.

#![deny(clippy::print_stdout, clippy::print_stderr)] // `vmm_dedup_host::output` is for that

mod commands;
mod which_store;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
#[cfg(feature = "demo")]
use commands::demo;
use commands::{device, doctor, estimate, explain, fleet, manual, run, set, stat, store, top};
use std::process::ExitCode;
use vmm_dedup_host::units::printable;
use vmm_dedup_host::{Failure, note, output, table};

/// Memory deduplication for fleets of VMs: safe, cheap, visible.
///
#[cfg_attr(
    feature = "demo",
    doc = "Start with `vmm-dedup demo`, which runs four guests on this machine and shows what they share."
)]
/// For real use start a store (`vmm-dedup store`), then VMs on it (`vmm-dedup run`, or any VMM with the engine built in),
/// and watch them with `vmm-dedup top`, `vmm-dedup stat` or Prometheus. `vmm-dedup set` changes a running VM's settings,
/// `vmm-dedup explain` tells what became of its pages, and `vmm-dedup doctor` what is wrong on this host.
#[derive(Parser, Debug)]
#[command(name = "vmm-dedup", version, about, long_about, propagate_version = true)]
struct Cli {
    /// End when this process, which started this one, ends (for children of other commands).
    #[arg(long, value_name = "PID", global = true, hide = true)]
    die_with_parent: Option<i32>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    #[cfg(feature = "demo")]
    Demo(demo::DemoArgs),
    Store(store::StoreArgs),
    Run(Box<run::RunArgs>),
    Stat(stat::StatArgs),
    Top(top::TopArgs),
    Set(set::SetArgs),
    Explain(explain::ExplainArgs),
    Doctor(doctor::DoctorArgs),
    #[command(subcommand)]
    Fleet(fleet::FleetCommand),
    #[command(subcommand)]
    Device(device::DeviceCommand),
    Estimate(estimate::EstimateArgs),
    #[cfg(feature = "bench")]
    Bench(vmm_dedup_bench::BenchArgs),
    Completions(manual::CompletionsArgs),
    #[command(hide = true)]
    PackageFiles(manual::FilesArgs),
}

fn main() -> ExitCode {
    // Help fits its terminal; elsewhere its lines are as long as they are.
    let mut command = with_negative_numbers(Cli::command()).term_width(table::width().unwrap_or(0));
    let parsed = command.try_get_matches_from_mut(std::env::args_os());
    let parsed =
        parsed.and_then(|matches| Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command)));
    let done = parsed.map_or_else(|said| said_by_clap(&said), |cli| run(&cli));
    match done.and_then(|()| output::outcome()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                note!("vmm-dedup: {}", shown(&failure));
            }
            failure.exit_code()
        }
    }
}

/// A number that cannot be negative is told of by its option, not taken for an option that there is not.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let taken = |arg: clap::Arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(taken).mut_subcommands(with_negative_numbers)
}

/// A failure for a terminal: paths in it are such as others chose. It may have lines.
fn shown(failure: &Failure) -> String {
    let text = failure.to_string();
    let lines: Vec<String> = text.split('\n').map(printable).collect();
    lines.join("\n")
}

/// Help and version go to standard output; what is wrong with the arguments to standard error.
fn said_by_clap(said: &clap::Error) -> Result<(), Failure> {
    let printed = said.print();
    if said.use_stderr() {
        return Err(Failure::usage(""));
    }
    printed.err().into_iter().for_each(output::failed);
    Ok(())
}

fn run(cli: &Cli) -> Result<(), Failure> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    if let Some(parent) = cli.die_with_parent {
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        // It may have ended before: then no signal comes.
        if rustix::process::getppid().map(rustix::process::Pid::as_raw_pid) != Some(parent) {
            return Err(Failure::new(""));
        }
    }
    match &cli.command {
        #[cfg(feature = "demo")]
        Command::Demo(args) => demo::run(args),
        Command::Store(args) => store::run(args, cli.die_with_parent.is_none()),
        Command::Run(args) => run::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Top(args) => top::run(args),
        Command::Set(args) => set::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Fleet(command) => fleet::run(command),
        Command::Device(command) => device::run(command),
        Command::Estimate(args) => estimate::run(args),
        #[cfg(feature = "bench")]
        Command::Bench(args) => vmm_dedup_bench::run(args),
        Command::Completions(args) => manual::completions(args, Cli::command()),
        Command::PackageFiles(args) => manual::files(args, Cli::command()),
    }
}
