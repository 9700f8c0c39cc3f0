//! `device`: models of hardware that compares pages, behind sockets.

use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use vmm_dedup_host::Failure;
use vmm_dedup_pageforge::server::{DEFAULT_CLIENTS, Server, ServerConfig};

/// Run a model of a page-comparing device, for VMMs and for the dedup service to attach.
#[derive(Subcommand, Debug)]
pub(crate) enum DeviceCommand {
    Pageforge(PageforgeArgs),
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
    #[arg(long, default_value_t = DEFAULT_CLIENTS)]
    max_clients: usize,
}

/// Runs a device.
pub(crate) fn run(command: &DeviceCommand) -> Result<(), Failure> {
    let DeviceCommand::Pageforge(args) = command;
    let config = ServerConfig {
        modules: args.modules,
        max_clients: args.max_clients,
    };
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
        let mut socket = ours.lock().unwrap_or_else(PoisonError::into_inner);
        let server = Server::bind(&args.socket, config).map_err(Failure::from_error)?;
        *socket = Some(args.socket.clone());
        drop(socket);
        eprintln!(
            "PageForge, {} modules for each client, on {}",
            args.modules,
            args.socket.display()
        );
        server.run().map_err(Failure::from_error)
    })
}
