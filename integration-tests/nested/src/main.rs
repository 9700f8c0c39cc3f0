//! The `vmm-dedup-nested` command: plays scenarios with real Linux guests, and makes images of their memory.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use vmm_dedup_nested::host::{Accelerator, Stage};
use vmm_dedup_nested::{Failure, Scenario, corpus, inside};

/// The preload library, beside this program.
const PRELOAD: &str = "libvmm_dedup_preload.so";

/// Real Linux guests with dedup on, in a real Linux host (L1), in QEMU, on any machine.
///
/// Kernel and userland come from this machine's Debian mirror, by apt, once. The first run fetches some 90 MB.
#[derive(Parser, Debug)]
#[command(version, about, long_about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the scenarios.
    List,
    /// Play scenarios, one after the other; exit code 1 if one fails, 2 if something is missing.
    Run(RunArgs),
    /// Make images of guests' memory, at three points in time, for `bench ksm --images` and `estimate`.
    Corpus(CorpusArgs),
    /// Play a scenario, inside L1.
    #[command(hide = true)]
    Inside {
        #[arg(value_enum)]
        scenario: Scenario,
    },
    /// Run a command whose memory KSM may merge.
    #[command(hide = true)]
    Mergeable {
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

#[derive(Args, Debug)]
struct RunArgs {
    /// Scenarios [default: all].
    #[arg(value_enum)]
    scenarios: Vec<Scenario>,
    /// Where packages are kept [default: beside this program].
    #[arg(long)]
    cache: Option<PathBuf>,
    /// The vmm-dedup command [default: beside this program].
    #[arg(long)]
    vmm_dedup: Option<PathBuf>,
    /// The folder of the guest agent and its examples, linked statically [default: that of the profile `agent` for musl, in this target
    /// directory].
    #[arg(long)]
    guest_programs: Option<PathBuf>,
    /// What runs L1 [default: kvm where that runs stock kernels, else tcg].
    #[arg(long, value_enum)]
    accel: Option<Accelerator>,
    /// Keep logs and metrics in this folder, one folder for each scenario.
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct CorpusArgs {
    /// Where the images go.
    #[arg(long)]
    out: PathBuf,
    /// Where packages are kept [default: beside this program].
    #[arg(long)]
    cache: Option<PathBuf>,
    /// Memory of each guest, MiB: with less than 192 their system does not fit, half of it being for files.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(192..=4096))]
    memory_mib: u64,
    /// Guests that do the same; without it, one of each kind.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=16))]
    same: Option<u8>,
    /// What runs the guests [default: kvm where that runs stock kernels, else tcg].
    #[arg(long, value_enum)]
    accel: Option<Accelerator>,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::List => list(),
        Command::Run(args) => run(&args),
        Command::Corpus(args) => make_corpus(&args),
        Command::Inside { scenario } => inside::play(scenario),
        Command::Mergeable { command } => inside::run_mergeable(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("vmm-dedup-nested: {failure}");
            ExitCode::from(if failure.is_missing() { 2 } else { 1 })
        }
    }
}

#[allow(clippy::unnecessary_wraps)] // as the other commands
fn list() -> Result<(), Failure> {
    for scenario in Scenario::all() {
        let help = scenario
            .to_possible_value()
            .and_then(|value| value.get_help().cloned());
        println!("{:<12} {}", scenario.to_string(), help.unwrap_or_default());
    }
    Ok(())
}

fn run(args: &RunArgs) -> Result<(), Failure> {
    let own = own_path()?;
    let beside = |name: &str| own.with_file_name(name);
    let vmm_dedup = args.vmm_dedup.clone().unwrap_or_else(|| beside("vmm-dedup"));
    if !vmm_dedup.is_file() {
        let path = vmm_dedup.display();
        return Err(Failure::new(format!(
            "{path} is missing: cargo build -p vmm-dedup-cli, or --vmm-dedup"
        )));
    }
    let scenarios = match args.scenarios.as_slice() {
        [] => Scenario::all().collect(),
        some => some.to_vec(),
    };
    for scenario in scenarios {
        let stage = Stage {
            cache: args.cache.clone().unwrap_or_else(|| beside("nested")),
            vmm_dedup: vmm_dedup.clone(),
            preload: beside(PRELOAD),
            guest_programs: args
                .guest_programs
                .clone()
                .unwrap_or_else(|| guest_programs(&own)),
            own: own.clone(),
            accelerator: args.accel.unwrap_or_else(Accelerator::best),
            out: args.out.as_ref().map(|out| out.join(scenario.to_string())),
        };
        let measured = stage.play(scenario, &mut |text| eprintln!("{scenario}: {text}"))?;
        println!(
            "{}",
            serde_json::json!({ "scenario": scenario.to_string(), "measured": measured })
        );
    }
    Ok(())
}

fn make_corpus(args: &CorpusArgs) -> Result<(), Failure> {
    let cache = match &args.cache {
        Some(cache) => cache.clone(),
        None => own_path()?.with_file_name("nested"),
    };
    let plan = corpus::Plan {
        memory_mib: args.memory_mib,
        same: args.same,
        accelerator: args.accel.unwrap_or_else(Accelerator::best),
    };
    let images = corpus::make(&plan, &cache, &args.out, &mut |text| eprintln!("{text}"))?;
    images
        .iter()
        .for_each(|image: &PathBuf| println!("{}", image.display()));
    Ok(())
}

/// Where cargo puts the guest agent, beside the folder of this program's profile.
fn guest_programs(own: &Path) -> PathBuf {
    let target = own.ancestors().nth(2).unwrap_or(Path::new("target"));
    target.join("x86_64-unknown-linux-musl/agent")
}

fn own_path() -> Result<PathBuf, Failure> {
    let path = std::env::current_exe().map_err(|e| Failure::new(format!("cannot find this program: {e}")))?;
    Ok(Path::new(&path).to_owned())
}
