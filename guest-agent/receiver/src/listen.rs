//! The sockets on which agents come.
//!
//! Two kinds of vsock are behind them. Cloud Hypervisor and Firecracker end a guest's vsock in the VMM: a guest that connects to
//! the host's port P comes to the Unix socket `<socket>_P`, and whoever connects to `<socket>` and writes `CONNECT P` comes to
//! the guest's port P. QEMU hands vsock to the host's kernel (vhost-vsock), where every VM shares one space of ports.
//!
//! All are without blocking; a service polls them.

use rustix::fs::{Mode, lstat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::ffi::OsString;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use vmm_dedup_agent_wire::PORT;
use vsock::{VMADDR_CID_ANY, VsockListener, VsockStream};

/// Connections of other VMs that are turned away before somebody else gets a turn.
const FOREIGN_AT_ONCE: usize = 64;

/// Longest answer to `CONNECT`: "OK " and a number.
const MOST_ANSWER: usize = 32;

/// Why nobody can listen, or no guest be reached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A Unix socket cannot be made.
    #[error("the agent's socket {path} cannot be made: {error}")]
    Bind {
        /// Where.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// Somebody listens there.
    #[error("somebody listens on {0} already: is there another service for this VM?")]
    Taken(PathBuf),
    /// No vsock.
    #[error("vsock port {port} cannot be had: {error} (is the module vhost_vsock loaded?)")]
    Vsock {
        /// The port.
        port: u32,
        /// What the kernel says.
        error: io::Error,
    },
    /// The VMM's socket does not answer.
    #[error("the VMM's vsock socket {path} does not let us in: {error}")]
    Dial {
        /// The VMM's socket.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// Nobody in the guest listens.
    #[error("the VMM answered \"{0}\" to CONNECT: no agent listens in the guest")]
    Answer(String),
}

/// Where a guest's agent comes to.
#[derive(Debug)]
pub struct Listener(Kind);

#[derive(Debug)]
enum Kind {
    Hybrid {
        listener: UnixListener,
        socket: OwnSocket,
    },
    Vsock {
        listener: VsockListener,
        cid: u32,
    },
}

/// A Unix socket that goes when this does, if it is still ours.
#[derive(Debug)]
struct OwnSocket {
    path: PathBuf,
    inode: u64,
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if lstat(&self.path).is_ok_and(|stat| stat.st_ino == self.inode) {
            // It was there; if it is not any more, all the better.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The Unix socket to which a guest's connections to `port` come, beside the VMM's.
#[must_use]
pub fn hybrid_path(socket: &Path, port: u32) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(format!("_{port}"));
    path.into()
}

/// The port of the guest with this CID behind vhost-vsock.
#[must_use]
pub fn vhost_port(cid: u32) -> u32 {
    PORT.wrapping_add(cid)
}

impl Listener {
    /// For a VM of Cloud Hypervisor or Firecracker whose vsock has this socket. Only its owner may connect.
    ///
    /// # Errors
    /// [`Error`].
    pub fn hybrid(socket: &Path, port: u32) -> Result<Self, Error> {
        let path = hybrid_path(socket, port);
        let failed = |error| Error::Bind {
            path: path.clone(),
            error,
        };
        let listener = match UnixListener::bind(&path) {
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                remove_left_over(&path)?;
                UnixListener::bind(&path)
            }
            other => other,
        };
        let listener = listener.map_err(failed)?;
        let stat = lstat(&path).map_err(|e| failed(e.into()))?;
        let socket = OwnSocket {
            path: path.clone(),
            inode: stat.st_ino,
        };
        let mode = (Mode::RUSR | Mode::WUSR).bits();
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&path, permissions).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self(Kind::Hybrid { listener, socket }))
    }

    /// For a VM behind vhost-vsock with this CID. Others are turned away.
    ///
    /// # Errors
    /// [`Error::Vsock`].
    pub fn vhost(cid: u32) -> Result<Self, Error> {
        let port = vhost_port(cid);
        let failed = |error| Error::Vsock { port, error };
        let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self(Kind::Vsock { listener, cid }))
    }

    /// The next agent that has come; `None` if there is none.
    ///
    /// # Errors
    /// What the kernel says; a listener that has failed once may go on. [`ErrorKind::ResourceBusy`]: other VMs crowd the port, which
    /// all VMs behind vhost-vsock can reach; whoever polls rests a moment.
    pub fn accept(&self) -> io::Result<Option<Connection>> {
        for _ in 0..FOREIGN_AT_ONCE {
            let accepted = match &self.0 {
                Kind::Hybrid { listener, .. } => listener.accept().and_then(|(stream, _)| {
                    stream.set_nonblocking(true)?;
                    Ok(Some(Connection::Hybrid(stream)))
                }),
                Kind::Vsock { listener, cid } => listener.accept().and_then(|(stream, peer)| {
                    stream.set_nonblocking(true)?;
                    Ok((peer.cid() == *cid).then_some(Connection::Vsock(stream)))
                }),
            };
            match accepted {
                Ok(Some(connection)) => return Ok(Some(connection)),
                // Another VM: dropped, and the next one looked at.
                Ok(None) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {
                    return Ok(None);
                }
                Err(e) => return Err(e),
            }
        }
        Err(ErrorKind::ResourceBusy.into())
    }
}

/// Removes a socket that nobody listens on. Who listens and does not accept is not waited for.
fn remove_left_over(path: &Path) -> Result<(), Error> {
    let failed = |error: io::Error| Error::Bind {
        path: path.to_owned(),
        error,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(|e| failed(e.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|e| failed(e.into()))?;
    match connect(&socket, &address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(failed),
        _ => Err(Error::Taken(path.to_owned())),
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Kind::Hybrid { listener, .. } => listener.as_fd(),
            Kind::Vsock { listener, .. } => listener.as_fd(),
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Hybrid { socket, .. } => write!(f, "{}", socket.path.display()),
            Kind::Vsock { cid, .. } => write!(f, "vsock port {} for CID {cid}", vhost_port(*cid)),
        }
    }
}

/// A connection to an agent, without blocking.
#[derive(Debug)]
pub enum Connection {
    /// By way of the VMM.
    Hybrid(UnixStream),
    /// By way of the kernel.
    Vsock(VsockStream),
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Hybrid(stream) => stream.read(buffer),
            Self::Vsock(stream) => stream.read(buffer),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Hybrid(stream) => stream.write(bytes),
            Self::Vsock(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Hybrid(stream) => stream.as_fd(),
            Self::Vsock(stream) => stream.as_fd(),
        }
    }
}

/// Connects to a port in a guest of Cloud Hypervisor or Firecracker, by the VMM's socket.
///
/// # Errors
/// [`Error::Dial`] and [`Error::Answer`]; a VMM that does not answer within `patience` is an error, too.
pub fn dial_hybrid(socket: &Path, port: u32, patience: Duration) -> Result<Connection, Error> {
    let failed = |error| Error::Dial {
        path: socket.to_owned(),
        error,
    };
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    stream.set_read_timeout(Some(patience)).map_err(failed)?;
    stream.set_write_timeout(Some(patience)).map_err(failed)?;
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .map_err(failed)?;
    // Byte by byte: what follows the line is the agent's.
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') && answer.len() < MOST_ANSWER {
        let mut byte = [0];
        match stream.read(&mut byte).map_err(failed)? {
            0 => break,
            _ => answer.push(byte[0]),
        }
    }
    if !answer.starts_with(b"OK ") || answer.last() != Some(&b'\n') {
        return Err(Error::Answer(answer.trim_ascii().escape_ascii().to_string()));
    }
    stream.set_nonblocking(true).map_err(failed)?;
    Ok(Connection::Hybrid(stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_guest_of_a_hybrid_socket_comes_in_and_nobody_is_waited_for() {
        let folder = folder();
        let socket = folder.path().join("vm.vsock");
        let listener = Listener::hybrid(&socket, PORT).unwrap();
        let path = hybrid_path(&socket, PORT);
        assert_eq!(listener.to_string(), path.display().to_string());
        assert!(path.to_str().unwrap().ends_with("vm.vsock_9755"));
        assert!(listener.accept().unwrap().is_none());
        // What the VMM does when the guest connects.
        let mut vmm = UnixStream::connect(&path).unwrap();
        let mut agent = listener.accept().unwrap().unwrap();
        let mut buffer = [0; 8];
        assert_eq!(agent.read(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        vmm.write_all(b"hello").unwrap();
        assert_eq!(agent.read(&mut buffer).unwrap(), 5);
        agent.write_all(b"there").unwrap();
        assert_eq!(vmm.read(&mut buffer).unwrap(), 5);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_was_left_over_is_replaced_and_a_living_one_is_not() {
        let folder = folder();
        let socket = folder.path().join("s");
        drop(UnixListener::bind(hybrid_path(&socket, 1)).unwrap());
        let first = Listener::hybrid(&socket, 1).unwrap();
        assert!(matches!(Listener::hybrid(&socket, 1), Err(Error::Taken(_))));
        drop(first);
        assert!(Listener::hybrid(&socket, 1).is_ok());
    }

    /// Answers `CONNECT` like a VMM.
    fn vmm_that_answers(
        answer: &'static [u8],
    ) -> (tempfile::TempDir, PathBuf, std::thread::JoinHandle<Vec<u8>>) {
        let folder = folder();
        let path = folder.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = vec![0; "CONNECT 9755\n".len()];
            stream.read_exact(&mut asked).unwrap();
            stream.write_all(answer).unwrap();
            asked
        });
        (folder, path, thread)
    }

    #[test]
    fn a_port_in_the_guest_is_reached_by_the_vmms_socket() {
        let (_folder, path, vmm) = vmm_that_answers(b"OK 1073741824\nfirst bytes");
        let mut agent = dial_hybrid(&path, PORT, Duration::from_secs(5)).unwrap();
        assert_eq!(vmm.join().unwrap(), b"CONNECT 9755\n");
        let mut buffer = [0; 32];
        let read = agent.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..read], b"first bytes");
    }

    #[test]
    fn a_guest_without_an_agent_is_told_from_a_vmm_that_is_gone() {
        let (_folder, path, vmm) = vmm_that_answers(b"no such port\x1b[2J\n");
        let error = dial_hybrid(&path, PORT, Duration::from_secs(5)).unwrap_err();
        vmm.join().unwrap();
        assert!(
            matches!(&error, Error::Answer(text) if text.contains("\\x1b")),
            "{error}"
        );
        let error = dial_hybrid(Path::new("/nonexistent"), PORT, Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Dial { .. }));
    }
}
