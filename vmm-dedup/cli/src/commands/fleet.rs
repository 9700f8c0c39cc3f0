//! `fleet`: many VMs from one file.

use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;
use vmm_dedup_fleet::Which;
use vmm_dedup_host::{Failure, output};

/// Run many VMs from one TOML file, with dedup inside each VMM
///
/// `up` makes the fleet what its file says (`up --plan` only tells what it would
/// do): under cloud-hypervisor (on PATH, or CLOUD_HYPERVISOR), the reference VMM
/// or QEMU. VMs go on in the background; `status` shows them, `down` ends them.
/// Names of VMs may be patterns with * and ?. The file is described in
/// docs/fleet.md; the smallest is:
///
///   [[vm]]
///   name = "web"
///   count = 8
///   kernel = "vmlinux"
#[derive(Subcommand, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) enum FleetCommand {
    /// Start what does not run: the first time all of it, or nothing; later what is missing, crashed or has ended. With --plan:
    /// only tell what that is.
    ///
    /// Running services take over settings of dedup that can change live (cpu_percent, mode, pass_period_ms,
    /// stop_target_us, reserve_pages), also where `set` has changed them since; what `set` has switched off stays off. What
    /// else is not as the file says is told, in lines that begin with an exclamation mark.
    ///
    /// Exit code 0: the fleet is as its file says. 3: it is up, and something could not be done or is left to you. 1, 2:
    /// nothing was started.
    Up(UpArgs),
    /// Show VMs, stores and savings, and where the fleet runs otherwise than its file says.
    ///
    /// Exit code 1 if a VM does not run, or not with its dedup, a store is gone or full, or nobody keeps logs short.
    Status(StatusArgs),
    /// End VMs: all of a file and the stores that `up` started, or those that are named. May be repeated.
    ///
    /// VMs that are named stay down until `up` or `restart` starts them.
    Down(DownArgs),
    /// End VMs and start them as the file says now, one after the other.
    Restart(RestartArgs),
    /// Let an entry have another number of VMs than the file says, until the fleet is down.
    Scale(ScaleArgs),
    /// Show the fleets of this host. Exit code 1 if not all is well with one of them, as `status` tells it.
    Ls(LsArgs),
    /// Show what VMMs wrote, or guests, or stores.
    Logs(LogsArgs),
    /// Ask a VM's VMM something by its own API, and print the answer.
    ///
    /// Cloud Hypervisor: a method, a call and, if it takes one, a body: `GET vm.info`, `PUT vm.resize '{"desired_vcpus":2}'`.
    /// QEMU: a command of its monitor and its arguments: `query-status`.
    Api(ApiArgs),
    /// Keep the logs in a fleet's directory short, until that has gone. `up` starts this.
    #[command(hide = true)]
    KeepLogs {
        /// The directory.
        directory: PathBuf,
    },
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    at: At,
    /// Say what would be done, what would keep it from being done, and what is left to you; do nothing. Ends with the code that `up` would.
    #[arg(long)]
    plan: bool,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    at: At,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DownArgs {
    #[command(flatten)]
    at: At,
    /// Only these VMs; the fleet stays up, and the next `up` starts them again.
    vms: Vec<String>,
    #[command(flatten)]
    grace: Grace,
}

#[derive(Args, Debug)]
pub(crate) struct RestartArgs {
    #[command(flatten)]
    at: At,
    /// Only these VMs.
    vms: Vec<String>,
    /// VMs that are away at a time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    parallel: u16,
    #[command(flatten)]
    grace: Grace,
}

#[derive(Args, Debug)]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    at: At,
    /// The name of a [[vm]] with a count, and how many there are to be, e.g. web=30.
    #[arg(value_name = "NAME=VMS", value_parser = parse_scale)]
    scale: (String, u32),
    #[command(flatten)]
    grace: Grace,
}

fn parse_scale(text: &str) -> Result<(String, u32), String> {
    let (name, vms) = text.split_once('=').ok_or("expected NAME=VMS, e.g. web=30")?;
    let vms = vms.parse();
    vms.map_or(Err("expected NAME=VMS, e.g. web=30".into()), |vms| {
        Ok((name.to_owned(), vms))
    })
}

#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    at: At,
    /// Only of these VMs.
    vms: Vec<String>,
    /// What guests wrote to their serial ports, instead of what VMMs wrote.
    #[arg(long)]
    serial: bool,
    /// What stores wrote, too.
    #[arg(long)]
    stores: bool,
    /// Lines from the end of each.
    #[arg(long, short = 'n', default_value_t = 20)]
    lines: usize,
    /// Go on with what is written, until ^C.
    #[arg(long, short)]
    follow: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ApiArgs {
    #[command(flatten)]
    at: At,
    /// The VM.
    vm: String,
    /// What to ask.
    #[arg(required = true, num_args = 1..=3, value_name = "CALL")]
    words: Vec<String>,
}

/// How long guests get.
#[derive(Args, Debug)]
struct Grace {
    /// Seconds that guests get to shut down by themselves once their power button is pressed (0: not pressed). The
    /// reference VMM has none.
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    grace: u64,
}

impl Grace {
    fn time(&self) -> Duration {
        Duration::from_secs(self.grace)
    }
}

/// Which fleet.
#[derive(Args, Debug)]
struct At {
    /// The fleet file (TOML).
    file: PathBuf,
    /// Directory of state, logs and sockets [default: fleet-NAME in the runtime folder, see VMM_DEDUP_RUNTIME_DIR]
    #[arg(long, value_name = "DIRECTORY")]
    runtime_dir: Option<PathBuf>,
}

impl At {
    fn fleet(&self) -> vmm_dedup_fleet::At {
        vmm_dedup_fleet::At {
            file: self.file.clone(),
            runtime_dir: self.runtime_dir.clone(),
        }
    }
}

/// Runs the command.
pub(crate) fn run(command: &FleetCommand) -> Result<(), Failure> {
    match command {
        FleetCommand::Up(args) if args.plan => vmm_dedup_fleet::up(&args.at.fleet(), true),
        // With 1 it would say that nothing was started.
        FleetCommand::Up(args) => vmm_dedup_fleet::up(&args.at.fleet(), false).and_then(|()| {
            output::outcome().map_err(|failure| match failure.is_silent() {
                true => failure,
                false => Failure::in_part(failure.to_string()),
            })
        }),
        FleetCommand::Status(args) => vmm_dedup_fleet::status(&args.at.fleet(), args.json),
        FleetCommand::Down(args) if args.vms.is_empty() => {
            vmm_dedup_fleet::down(&args.at.fleet(), args.grace.time())
        }
        FleetCommand::Down(args) => vmm_dedup_fleet::down_vms(&args.at.fleet(), &args.vms, args.grace.time()),
        FleetCommand::Restart(args) => {
            let parallel = usize::from(args.parallel);
            vmm_dedup_fleet::restart(&args.at.fleet(), &args.vms, args.grace.time(), parallel)
        }
        FleetCommand::Scale(args) => {
            let (entry, vms) = &args.scale;
            vmm_dedup_fleet::scale(&args.at.fleet(), entry, *vms, args.grace.time())
        }
        FleetCommand::Ls(args) => vmm_dedup_fleet::list(args.json),
        FleetCommand::Logs(args) => {
            let which = Which {
                serial: args.serial,
                stores: args.stores,
                lines: args.lines,
                follow: args.follow,
            };
            vmm_dedup_fleet::logs(&args.at.fleet(), &args.vms, which)
        }
        FleetCommand::KeepLogs { directory } => vmm_dedup_fleet::keep_logs(directory),
        FleetCommand::Api(args) => vmm_dedup_fleet::api(&args.at.fleet(), &args.vm, &args.words),
    }
}
