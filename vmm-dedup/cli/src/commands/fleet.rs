//! `fleet`: many VMs from one file.

use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;
use vmm_dedup_host::Failure;

/// Run many VMs from one TOML file, with dedup inside each VMM.
///
/// `up` starts the stores that do not run yet, then the VMs: under cloud-hypervisor (on PATH, or CLOUD_HYPERVISOR), the
/// reference VMM or QEMU. VMs go on in the background; `status` shows them, `down` ends them. The file is described in
/// docs/fleet.md; the smallest is:
///
///   [[vm]]
///   name = "web"
///   count = 8
///   kernel = "vmlinux"
#[derive(Subcommand, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) enum FleetCommand {
    /// Start all VMs of a file; if one cannot start, none is left running.
    ///
    /// For a fleet that is up: starts stores that have gone again.
    Up(UpArgs),
    /// Show VMs, stores and savings. Exit code 1 if a VM does not run or a store is gone.
    Status(StatusArgs),
    /// End all VMs of a file and the stores that `up` started, and remove their files. May be repeated.
    Down(DownArgs),
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    at: At,
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
    /// Seconds that guests get to shut down by themselves once their power button is pressed (0: not pressed). The
    /// reference VMM has none.
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    grace: u64,
}

/// Which fleet.
#[derive(Args, Debug)]
struct At {
    /// The fleet file (TOML).
    file: PathBuf,
    /// Directory of state, logs and sockets [default: fleet-NAME in /run/vmm-dedup, or in $XDG_RUNTIME_DIR/vmm-dedup]
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
        FleetCommand::Up(args) => vmm_dedup_fleet::up(&args.at.fleet()),
        FleetCommand::Status(args) => vmm_dedup_fleet::status(&args.at.fleet(), args.json),
        FleetCommand::Down(args) => vmm_dedup_fleet::down(&args.at.fleet(), Duration::from_secs(args.grace)),
    }
}
