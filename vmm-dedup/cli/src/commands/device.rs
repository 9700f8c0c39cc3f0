//! `device`: models of hardware that compares pages, behind sockets.

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use vmm_dedup_dsa_abi::registers::{DEVICE_GNR, DEVICE_SPR};
use vmm_dedup_dsa_model::{Shape, Timing};
use vmm_dedup_dsa_server::{Device, Server as DsaServer};
use vmm_dedup_host::{Failure, note};
use vmm_dedup_pageforge::server::{DEFAULT_CLIENTS, Server, ServerConfig};

/// The longest latency: ten seconds. Nobody waits longer for a device, and what has not ended takes memory.
const MOST_LATENCY_NS: u64 = 10_000_000_000;

/// Run a model of a page-comparing device, for VMMs and for the dedup service to attach.
#[derive(Subcommand, Debug)]
pub(crate) enum DeviceCommand {
    Pageforge(PageforgeArgs),
    Dsa(DsaArgs),
}

/// PageForge (MICRO'17) as a PCI device over vfio-user.
///
/// Give it to a guest: `cloud-hypervisor --memory size=512M,shared=on --user-device socket=PATH`, or QEMU 10.1 or later
/// with `-device vfio-user-pci` and shared memory. Or measure it: `vmm-dedup bench engines`. Each client has a
/// device of its own. Runs until SIGINT, SIGTERM or SIGHUP, and takes the socket away then.
#[derive(Args, Debug)]
pub(crate) struct PageforgeArgs {
    /// Unix socket to listen on; nothing may be there yet. It is for this user only.
    #[arg(long)]
    socket: PathBuf,
    /// PageForge modules of each device, which work at the same time in the account of cycles.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    modules: u16,
    /// Clients at a time; more are hung up on.
    #[arg(long, default_value_t = DEFAULT_CLIENTS, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    max_clients: usize,
}

/// Intel DSA as a PCI device over vfio-user, for the guest's own driver (Linux: idxd).
///
/// Give it to a guest with QEMU 10.1 or later: `-device vfio-user-pci` and shared memory. Each client has a device of its
/// own, whose time is that of a clock: transfers take as long as bandwidth and latency say, or as this machine needs.
/// Runs until SIGINT, SIGTERM or SIGHUP, and takes the socket away then.
#[derive(Args, Debug)]
pub(crate) struct DsaArgs {
    /// Unix socket to listen on; nothing may be there yet. It is for this user only.
    #[arg(long)]
    socket: PathBuf,
    /// Clients at a time; more are hung up on.
    #[arg(long, default_value_t = DEFAULT_CLIENTS, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    max_clients: usize,
    /// From a descriptor to its completion record, besides the transfer, ns.
    #[arg(long, default_value_t = Timing::PUBLISHED.latency_ns, value_parser = clap::value_parser!(u64).range(..=MOST_LATENCY_NS))]
    latency_ns: u64,
    /// Megabytes that a device reads in a second.
    #[arg(long, default_value_t = Timing::PUBLISHED.bytes_per_us, value_parser = clap::value_parser!(u64).range(1..))]
    megabytes_per_s: u64,
    /// The number that it has on PCI.
    #[arg(long, value_enum, default_value_t = Generation::SapphireRapids)]
    generation: Generation,
}

/// The processors that a DSA can say it is of. Linux keeps the first ones from guests' user space, as their DSA had a flaw
/// (vfio-pci, denylist).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Generation {
    /// 8086:0b25.
    SapphireRapids,
    /// 8086:11fb.
    GraniteRapids,
}

impl DsaArgs {
    fn device(&self) -> Device {
        let shape = Shape::sapphire_rapids();
        Device {
            shape: Shape {
                device: match self.generation {
                    Generation::SapphireRapids => DEVICE_SPR,
                    Generation::GraniteRapids => DEVICE_GNR,
                },
                ..shape
            },
            timing: Timing {
                latency_ns: self.latency_ns,
                bytes_per_us: self.megabytes_per_s,
                ..Timing::PUBLISHED
            },
            ..Device::default()
        }
    }
}

/// Runs a device.
pub(crate) fn run(command: &DeviceCommand) -> Result<(), Failure> {
    match command {
        DeviceCommand::Pageforge(args) => {
            let config = ServerConfig {
                modules: args.modules,
                max_clients: args.max_clients,
            };
            serve(
                &args.socket,
                &format!("PageForge, {} modules for each client", args.modules),
                || Server::bind(&args.socket, config.clone()).map_err(Failure::from_error),
                |server| server.run().map_err(Failure::from_error),
            )
        }
        DeviceCommand::Dsa(args) => serve(
            &args.socket,
            "a DSA for each client",
            || DsaServer::bind(&args.socket, args.device(), args.max_clients).map_err(Failure::from_error),
            |server| server.run().map_err(Failure::from_error),
        ),
    }
}

/// Binds a socket and serves it until a signal comes, and takes it away then.
fn serve<S>(
    socket: &Path,
    what: &str,
    bind: impl FnOnce() -> Result<S, Failure>,
    run: impl FnOnce(&S) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // Bound inside, so that a signal that comes at once finds somebody who takes the socket away; and only a socket
    // of ours is taken away.
    let ours = Arc::new(Mutex::new(None));
    let taken = Arc::clone(&ours);
    let cleanup = move || {
        if let Some(socket) = taken.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = std::fs::remove_file::<PathBuf>(socket);
        }
    };
    vmm_dedup_host::termination::on_termination(cleanup, || {
        let mut place = ours.lock().unwrap_or_else(PoisonError::into_inner);
        let server = bind()?;
        *place = Some(socket.to_owned());
        drop(place);
        note!("{what}, on {}", socket.display());
        run(&server)
    })
}
