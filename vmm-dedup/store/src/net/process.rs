//! The process at the other end of a socket, as a descriptor that tells when it has ended.
#![allow(unsafe_code)] // getsockopt(SO_PEERPIDFD), which rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `SO_PEERPIDFD`, Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// The process of a peer.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    pub(crate) pid: u32,
    /// The user, as the store's user namespace has it.
    pub(crate) uid: u32,
    /// Readable once the process has ended; `None` if it had ended when it was asked for.
    pub(crate) pidfd: Option<OwnedFd>,
}

impl PeerProcess {
    /// The process that connected this socket.
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(&socket)?;
        let pid = credentials.pid;
        let number = u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0);
        let pidfd = match peer_pidfd(&socket) {
            Ok(pidfd) => Some(pidfd),
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => None,
            // Older kernels: by number, which is exact as long as the process has not ended in between.
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
                    Ok(pidfd) => Some(pidfd),
                    Err(rustix::io::Errno::SRCH) => None,
                    Err(e) => return Err(e.into()),
                }
            }
            Err(e) => return Err(e),
        };
        let uid = credentials.uid.as_raw();
        Ok(Self {
            pid: number,
            uid,
            pidfd,
        })
    }
}

fn peer_pidfd(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut len = libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("four");
    // SAFETY: the descriptor is open for the call; fd and len are valid for writes of an int and a socklen_t, and
    // len holds the size of fd, so the kernel writes no more than that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: on success the kernel has made a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    #[test]
    fn the_peer_of_our_own_socket_is_this_process_and_alive() {
        let flags = SocketFlags::CLOEXEC;
        let (a, _b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let peer = PeerProcess::of(&a).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        let pidfd = peer.pidfd.unwrap();
        let mut poll = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut poll, Some(&now)).unwrap(), 0);
    }
}
