//! The model of Intel DSA behind a socket that speaks vfio-user: any VMM with a vfio-user client can give it to a guest,
//! whose own driver then finds a DSA on PCI.
//!
//! ```text
//!  client ---- configuration space: identity, MSI-X, PASID, ATS, PRI ----.
//!    |   ----- BAR 0: registers -----------------------------------------+--> model <-- device thread (wall clock)
//!    |   ----- BAR 2: portals, descriptors put together from pieces -----'      |
//!    '-------- memory that the client has mapped <---- address spaces ----------'
//! ```
//!
//! Each client has a device of its own. Registers are answered at once; what takes time, and all that accesses memory, is
//! done by the device's thread. A client is hostile: what stands between it and the server is in [`vmm_dedup_vfio_user`].
//!
//! # Address spaces
//!
//! The protocol knows no PASIDs: an access with one needs somebody who translates ([`Translate`]), as an IOMMU would. Without,
//! such an access is a page fault.
//!
//! # Known holes
//!
//! A write to a portal is posted: there are no deferrable writes (ENQCMD) over vfio-user, so shared queues take nothing.

mod device;
mod pci;
mod pieces;
mod session;
mod spaces;

pub use device::Device;
pub use spaces::Translate;
pub use vmm_dedup_vfio_user::{DEFAULT_CLIENTS, ServerError};

use session::Session;
use std::path::Path;

/// A socket with devices behind it. The socket's file goes when this is dropped.
#[derive(Debug)]
pub struct Server {
    socket: vmm_dedup_vfio_user::Server,
    device: Device,
}

impl Server {
    /// Listens at a path where nothing is yet. The socket is for its owner only. More clients at a time than `max_clients`
    /// are hung up on.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn bind(path: &Path, device: Device, max_clients: usize) -> Result<Self, ServerError> {
        let socket = vmm_dedup_vfio_user::Server::bind(path, max_clients)?;
        Ok(Self { socket, device })
    }

    /// Serves clients, each with a device of its own, for ever.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn run(&self) -> Result<(), ServerError> {
        let device = self.device.clone();
        self.socket.run(move || Session::new(&device))
    }
}
