//! A socket with devices behind it.

use crate::gate::{Gate, GateError};
use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_NUM_REGIONS, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info,
};
use vfio_user::{IrqInfo, ServerBackend, ServerRegion};

/// Most clients at a time, unless configured.
pub const DEFAULT_CLIENTS: usize = 16;

/// A client's device, as the protocol sees it. Dropping it ends the device.
///
/// Accesses inside a region never fail, however wrong they are: nothing on a PCI bus could tell a guest of an error, and the
/// protocol crate's client does not understand one there.
pub trait Session: ServerBackend + Send {
    /// The regions, one for each of VFIO's numbers.
    fn regions(&self) -> Vec<ServerRegion>;

    /// The interrupts, one for each of VFIO's numbers.
    fn irqs(&self) -> Vec<IrqInfo>;
}

/// A region of so many bytes without a file: each access is a message. One of 0 bytes is not there.
#[must_use]
pub fn plain_region(index: u32, bytes: u64) -> ServerRegion {
    let access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    ServerRegion {
        region_info: vfio_region_info {
            argsz: 32,
            flags: if bytes == 0 { 0 } else { access },
            index,
            size: bytes,
            ..Default::default()
        },
        sparse_areas: Vec::new(),
        mmap_fd: None,
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
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
    max_clients: usize,
    clients: Arc<AtomicUsize>,
}

impl Server {
    /// Listens at a path where nothing is yet. The socket is for its owner only. More clients at a time than `max_clients`
    /// are hung up on.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn bind(path: &Path, max_clients: usize) -> Result<Self, ServerError> {
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
            max_clients,
            clients: Arc::default(),
        };
        let owner_only = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(path, owner_only).map_err(failed)?;
        Ok(server)
    }

    /// Serves clients, each with a session that `make` makes and threads of its own (named `vu-`), for ever.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn run<S, M>(&self, make: M) -> Result<(), ServerError>
    where
        S: Session,
        M: Fn() -> io::Result<S> + Send + Sync + 'static,
    {
        let make = Arc::new(make);
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
            let Some(place) = Place::take(&self.clients, self.max_clients) else {
                log::warn!("a client was hung up on: there are {} already", self.max_clients);
                continue;
            };
            let make = Arc::clone(&make);
            let client = std::thread::Builder::new().name("vu-client".into());
            let started = client.spawn(move || {
                match make()
                    .map_err(GateError::from)
                    .and_then(|session| serve(&stream, session))
                {
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
fn serve(client: &UnixStream, mut session: impl Session) -> Result<(), GateError> {
    let (listener, inner) = private_pair()?;
    let (irqs, regions) = (session.irqs(), session.regions());
    let server = vfio_user::Server::from_owned_fd(listener, true, irqs, regions);
    std::thread::scope(|threads| {
        let crate_side = std::thread::Builder::new().name("vu-server".into());
        crate_side.spawn_scoped(threads, move || {
            if let Err(error) = server.run(&mut session) {
                log::debug!("the vfio-user server ended: {error}");
            }
        })?;
        let passed = Gate::new(VFIO_PCI_NUM_REGIONS).run(client, &inner);
        // Both sides learn that it is over: the crate's server ends, and the client gets no answer any more.
        let _ = inner.shutdown(std::net::Shutdown::Both);
        let _ = client.shutdown(std::net::Shutdown::Both);
        passed
    })
}

/// A listening socket, which the crate wants, and the only connection that there will ever be to it.
fn private_pair() -> io::Result<(OwnedFd, UnixStream)> {
    let folder = tempfile::Builder::new()
        .prefix("vmm-dedup-device")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()?;
    let path = folder.path().join("inner");
    let listener = UnixListener::bind(&path)?;
    let inner = UnixStream::connect(&path)?;
    Ok((listener.into(), inner))
}
