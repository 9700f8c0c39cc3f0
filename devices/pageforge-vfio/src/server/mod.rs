//! The device behind a socket that speaks vfio-user: any VMM with a vfio-user client can give it to a guest, and the
//! dedup service's driver uses it the same way. What stands between a hostile client and the device is in
//! [`vmm_dedup_vfio_user`]; for the memory that both write, see [`window`](crate::window).

mod pci;
mod session;

pub use pci::{DEVICE, VENDOR};
pub use vmm_dedup_vfio_user::DEFAULT_CLIENTS;

use session::Session;
use std::path::Path;
use vmm_dedup_pageforge_registers::MAX_MODULES;

/// How the server is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Modules of each client's device, 1 to [`MAX_MODULES`].
    pub modules: u16,
    /// Clients at a time; more are hung up on.
    pub max_clients: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            modules: 4,
            max_clients: DEFAULT_CLIENTS,
        }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A figure is out of range.
    #[error("a device has 1 to {MAX_MODULES} modules, not {0}")]
    Modules(u16),
    /// The socket fails.
    #[error(transparent)]
    Socket(#[from] vmm_dedup_vfio_user::ServerError),
}

/// A socket with devices behind it. The socket's file goes when this is dropped.
#[derive(Debug)]
pub struct Server {
    socket: vmm_dedup_vfio_user::Server,
    modules: u16,
}

impl Server {
    /// Listens at a path where nothing is yet. The socket is for its owner only.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn bind(path: &Path, config: ServerConfig) -> Result<Self, ServerError> {
        let modules = config.modules;
        if modules == 0 || usize::from(modules) > MAX_MODULES {
            return Err(ServerError::Modules(modules));
        }
        let socket = vmm_dedup_vfio_user::Server::bind(path, config.max_clients)?;
        Ok(Self { socket, modules })
    }

    /// Serves clients, each with a device of its own, for ever.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn run(&self) -> Result<(), ServerError> {
        let modules = self.modules;
        Ok(self.socket.run(move || Session::new(modules))?)
    }
}
