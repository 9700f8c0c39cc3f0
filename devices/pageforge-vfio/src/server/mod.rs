//! The device behind a socket that speaks vfio-user: any VMM with a vfio-user client can give it to a guest, and the
//! dedup service's driver uses it the same way.
//!
//! ```text
//!  client --- socket --- gate ---- socket --- vfio-user crate --- session --- device (thread)
//!    |                  checks                 speaks the          regions,     modules,
//!    |                  every message          protocol            DMA, MSI-X   ring
//!    `------- window (memory of both), client's memory (read only) ----------------'
//! ```
//!
//! Each client has a device, a session and threads of its own; clients do not share anything. A client is hostile: see
//! [`gate`] for its messages, [`dma`] for its memory, [`window`](crate::window) for the memory that both write.

mod dma;
mod gate;
mod pci;
mod session;
mod wire;

pub use gate::{Gate, GateError};
pub use pci::{DEVICE, VENDOR};

use crate::registers::MAX_MODULES;
use session::{REGIONS, Session};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most clients at a time, unless configured.
pub const DEFAULT_CLIENTS: usize = 16;

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
    /// Something is at that path.
    #[error("{0} exists: another server may be using it; remove it if not, or choose another --socket")]
    Exists(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {path}")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Accepting failed.
    #[error("no client can be accepted any more")]
    Accept(#[source] io::Error),
}

/// A socket with devices behind it. The socket's file goes when this is dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    config: ServerConfig,
    clients: Arc<AtomicUsize>,
}

impl Server {
    /// Listens at a path where nothing is yet. The socket is for its owner only.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn bind(path: &Path, config: ServerConfig) -> Result<Self, ServerError> {
        if config.modules == 0 || usize::from(config.modules) > MAX_MODULES {
            return Err(ServerError::Modules(config.modules));
        }
        let failed = |source| ServerError::Listen {
            path: path.to_owned(),
            source,
        };
        if path.symlink_metadata().is_ok() {
            return Err(ServerError::Exists(path.to_owned()));
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let server = Self {
            listener,
            path: path.to_owned(),
            config,
            clients: Arc::default(),
        };
        let owner_only = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(path, owner_only).map_err(failed)?;
        Ok(server)
    }

    /// Serves clients, each in threads of its own, for ever.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn run(&self) -> Result<(), ServerError> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // The client was gone again, or this process is out of descriptors until another one leaves.
                Err(error) if is_passing(&error) => {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                    continue;
                }
                Err(error) => return Err(ServerError::Accept(error)),
            };
            let Some(place) = Place::take(&self.clients, self.config.max_clients) else {
                log::warn!(
                    "a client was hung up on: there are {} already",
                    self.config.max_clients
                );
                continue;
            };
            let modules = self.config.modules;
            let client = std::thread::Builder::new().name("pf-client".into());
            let started = client.spawn(move || {
                match serve(&stream, modules) {
                    Ok(()) => log::info!("a client has left"),
                    Err(error) => log::warn!("a client was hung up on: {error}"),
                }
                drop(place);
            });
            if let Err(error) = started {
                log::warn!("a client was hung up on: no thread can be started: {error}");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn is_passing(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let passing = [
        Errno::INTR,
        Errno::CONNABORTED,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
    ];
    passing
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// One of the places for clients, free again when dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(clients: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let take = |now: usize| (now < most).then_some(now + 1);
        let taken = clients.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
        taken.ok().map(|_| Self(Arc::clone(clients)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Serves one client until it hangs up.
fn serve(client: &UnixStream, modules: u16) -> Result<(), GateError> {
    let mut session = Session::new(modules)?;
    let (listener, inner) = private_pair()?;
    let (irqs, regions) = (session.irqs(), session.regions());
    let server = vfio_user::Server::from_owned_fd(listener, true, irqs, regions);
    std::thread::scope(|threads| {
        let crate_side = std::thread::Builder::new().name("pf-vfio-user".into());
        crate_side.spawn_scoped(threads, move || {
            if let Err(error) = server.run(&mut session) {
                log::debug!("the vfio-user server ended: {error}");
            }
        })?;
        let passed = Gate::new(REGIONS).run(client, &inner);
        // Both sides learn that it is over: the crate's server ends, and the client gets no answer any more.
        let _ = inner.shutdown(std::net::Shutdown::Both);
        let _ = client.shutdown(std::net::Shutdown::Both);
        passed
    })
}

/// A listening socket, which the crate wants, and the only connection that there will ever be to it.
fn private_pair() -> io::Result<(OwnedFd, UnixStream)> {
    let folder = tempfile::Builder::new().prefix("vmm-dedup-pageforge").tempdir()?;
    let path = folder.path().join("inner");
    let listener = UnixListener::bind(&path)?;
    let inner = UnixStream::connect(&path)?;
    Ok((listener.into(), inner))
}
