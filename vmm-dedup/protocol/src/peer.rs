//! Who is at the other end of a connected socket, as the kernel noted it down when the connection was made.
#![allow(unsafe_code)] // getsockopt: rustix lacks SO_PEERPIDFD, and takes the process number 0 for an error.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// `SO_PEERPIDFD`, Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// The user number that the kernel gives for users that the reader's user namespace does not have, unless it was set otherwise.
const OVERFLOW_USER: u32 = 65_534;

/// What a pidfd is of where its number names the process (`PID_FS_MAGIC`, Linux 6.9); before, all pidfds had the same number.
const PIDFS: i64 = 0x5049_4446;

/// Numbers of processes are below it in each PID namespace.
const ABROAD: u64 = 1 << 32;

/// What SO_PEERCRED says: of who connected, or of who listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process; `None` if our PID namespace does not have it.
    pub pid: Option<u32>,
    /// The user, as our user namespace has it; see [`overflow_user`].
    pub uid: u32,
}

/// The process and user at the other end of a connected socket.
pub fn credentials(socket: impl AsFd) -> io::Result<Credentials> {
    let mut ucred = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    option(socket, libc::SO_PEERCRED, &mut ucred)?;
    Ok(Credentials {
        pid: u32::try_from(ucred.pid).ok().filter(|pid| *pid != 0),
        uid: ucred.uid,
    })
}

/// The process at the other end of a connected socket, as a descriptor that becomes readable when it ends. Whichever PID namespace
/// the process is in; ESRCH if it has ended, ENOPROTOOPT before Linux 6.5.
pub fn pidfd(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    option(socket, SO_PEERPIDFD, &mut fd)?;
    // SAFETY: on success the kernel has made a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number by which stores name a process that their PID namespace does not have: it is the same in all namespaces, and no other
/// process has it until the host restarts. `None` if this kernel has no such numbers (before Linux 6.9).
pub fn number_abroad(pidfd: impl AsFd) -> io::Result<Option<u64>> {
    if rustix::fs::fstatfs(&pidfd)?.f_type != PIDFS {
        return Ok(None);
    }
    Ok(rustix::fs::fstat(&pidfd)?.st_ino.checked_add(ABROAD))
}

/// Whether a number is one of [`number_abroad`].
#[must_use]
pub fn is_abroad(number: u64) -> bool {
    number >= ABROAD
}

/// The user number that all users have which our user namespace does not have: it is nobody's in particular.
#[must_use]
pub fn overflow_user() -> u32 {
    let told = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    let number = told.ok().and_then(|text| text.trim().parse().ok());
    number.unwrap_or(OVERFLOW_USER)
}

/// Reads an option of a socket, which is a number or a structure of such.
fn option<T: Copy>(socket: impl AsFd, name: libc::c_int, value: &mut T) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size_of::<T>()).expect("it is small");
    let mut len = size;
    // SAFETY: the descriptor is open for the call; value and len are valid for writes, and len holds the size of what value refers
    // to, so the kernel writes no more than that. All bits that it may write are a value of what it is called with.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            ptr::from_mut(value).cast(),
            &raw mut len,
        )
    };
    match result {
        0 if len == size => Ok(()),
        0 => Err(io::ErrorKind::InvalidData.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_peer_of_our_own_socket_is_this_process() {
        let flags = SocketFlags::CLOEXEC;
        let (a, _b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let peer = credentials(&a).unwrap();
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.uid, std::fs::metadata("/proc/self").unwrap().uid());
        match pidfd(&a) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOPROTOOPT)),
        }
    }
}
