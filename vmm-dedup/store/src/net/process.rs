//! The process at the other end of a socket, as a descriptor that tells when it has ended.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use vmm_dedup_protocol::peer;

/// The process of a peer.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    /// Its number in the store's PID namespace, or what names it in all of them: see [`peer::number_abroad`].
    pub(crate) pid: u64,
    /// The user, as the store's user namespace has it.
    pub(crate) uid: u32,
    /// Readable once the process has ended; `None` if it had ended when it was asked for.
    pub(crate) pidfd: Option<OwnedFd>,
}

impl PeerProcess {
    /// The process that connected this socket.
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Self> {
        let peer::Credentials { pid, uid } = peer::credentials(&socket)?;
        let pidfd = match (peer::pidfd(&socket), pid) {
            (Ok(pidfd), _) => Some(pidfd),
            (Err(e), _) if e.raw_os_error() == Some(libc::ESRCH) => None,
            // Older kernels: by number, which is exact as long as the process has not ended in between.
            (Err(e), Some(pid)) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => by_number(pid)?,
            (Err(e), None) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => None,
            (Err(e), _) => return Err(e),
        };
        let pid = match (pid, &pidfd) {
            (Some(pid), _) => pid.into(),
            (None, Some(pidfd)) => peer::number_abroad(pidfd)?.ok_or_else(outside)?,
            (None, None) => return Err(outside()),
        };
        Ok(Self { pid, uid, pidfd })
    }
}

/// Why a process cannot be told from others.
fn outside() -> io::Error {
    io::Error::other(
        "the process is outside of the store's PID namespace: run the store in one that has its VMs, or Linux 6.9",
    )
}

fn by_number(pid: u32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(None);
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(e) => Err(e.into()),
    }
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
        assert_eq!(peer.pid, u64::from(std::process::id()));
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
