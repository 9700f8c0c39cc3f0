//! The files that this process has open, one by one.
#![allow(unsafe_code)] // descriptors that others own

use crate::error::Error;
use rustix::fs::{AtFlags, Mode, OFlags, RawDir, Statx, StatxFlags, statx};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, io};

/// /proc/self/fd. One place to read it at: for one thread at a time.
#[derive(Debug)]
pub(super) struct Descriptors(OwnedFd);

impl Descriptors {
    pub(super) fn open() -> Result<Self, Error> {
        let path = "/proc/self/fd";
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Error::Proc(path, e.into()))?;
        Ok(Self(folder))
    }

    /// Judges all descriptors, and ends with the first that is enough. None is missed that is open all the time, whatever is opened
    /// and closed meanwhile: the kernel lists them by their numbers. It lists those of the main thread: one that a thread with a
    /// table of its own has opened is not seen (unshare(2), CLONE_FILES).
    pub(super) fn each<E: From<Error>>(&self, judge: impl FnMut(RawFd) -> Result<(), E>) -> Result<(), E> {
        self.list()?.into_iter().try_for_each(judge)
    }

    fn list(&self) -> Result<Vec<RawFd>, Error> {
        let failed = |e: rustix::io::Errno| Error::Proc("/proc/self/fd", e.into());
        rustix::fs::seek(&self.0, rustix::fs::SeekFrom::Start(0)).map_err(failed)?;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&self.0, &mut buffer);
        let mut found = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(failed)?;
            found.extend(
                entry
                    .file_name()
                    .to_str()
                    .ok()
                    .and_then(|name| name.parse::<RawFd>().ok()),
            );
        }
        // Where the main thread has ended the kernel lists none.
        if !found.contains(&self.0.as_raw_fd()) {
            let why =
                io::Error::other("the open files are not listed: the process's main thread may have ended");
            return Err(Error::Proc("/proc/self/fd", why));
        }
        Ok(found)
    }
}

/// What the kernel answered when it was asked of a descriptor; `None`: that is not open. Any other failure tells nothing.
fn answered<T>(result: libc::c_int, answer: T) -> io::Result<Option<T>> {
    if result >= 0 {
        return Ok(Some(answer));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EBADF) => Ok(None),
        error => Err(error),
    }
}

/// The flags of a descriptor (F_GETFL); `None` if it is not open.
pub(super) fn flags(fd: RawFd) -> io::Result<Option<i32>> {
    // SAFETY: asking for flags has no effect; the descriptor may be closed meanwhile, which the kernel tells.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    answered(flags, flags)
}

/// What kind of file a descriptor is, and which. Most file systems ask no server for that. `None`: it is not open.
pub(super) fn identify(fd: RawFd) -> io::Result<Option<Statx>> {
    // SAFETY: used for one call only; the descriptor may be closed meanwhile, which the kernel tells.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    match statx(fd, "", flags, StatxFlags::TYPE | StatxFlags::INO) {
        Ok(stat) => Ok(Some(stat)),
        Err(rustix::io::Errno::BADF) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The number of the file system that a file is on; `None` if it is not open.
pub(super) fn file_system(fd: RawFd) -> io::Result<Option<i64>> {
    // SAFETY: all-zero is a valid statfs, which the kernel fills.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as in stat().
    let stat = answered(unsafe { libc::fstatfs(fd, &mut stat) }, stat)?;
    #[allow(clippy::unnecessary_cast, clippy::cast_possible_wrap)] // musl's has no sign
    Ok(stat.map(|stat| stat.f_type as i64))
}

/// Where a descriptor leads to; `None` if it is not open.
pub(super) fn link(fd: RawFd) -> io::Result<Option<PathBuf>> {
    match fs::read_link(format!("/proc/self/fd/{fd}")) {
        Ok(path) => Ok(Some(path)),
        Err(error) => match flags(fd)? {
            None => Ok(None),
            Some(_) => Err(error),
        },
    }
}

/// What the kernel tells of it.
pub(super) fn info(fd: RawFd) -> Option<String> {
    fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()
}

/// Whether it is an io_uring.
pub(super) fn is_ring(fd: RawFd) -> io::Result<bool> {
    Ok(link(fd)?.is_some_and(|link| link.as_os_str() == "anon_inode:[io_uring]"))
}

/// How many files and buffers are registered with an io_uring. The kernel does not tell while somebody submits to it: it is asked
/// for so long. `None` if it has not told.
pub(super) fn registered(fd: RawFd, patience: Duration) -> Option<(u64, u64)> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        match info(fd).as_deref().and_then(parse_registered) {
            None => std::thread::yield_now(),
            told => return told,
        }
    }
    None
}

/// Source: Linux, io_uring/fdinfo.c.
fn parse_registered(info: &str) -> Option<(u64, u64)> {
    let number = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    Some((number("UserFiles:")?, number("UserBufs:")?))
}

/// A socket's domain; `None` if it is not open.
pub(super) fn domain(fd: RawFd) -> io::Result<Option<i32>> {
    let mut domain: i32 = 0;
    let mut len: libc::socklen_t = 4;
    // SAFETY: four bytes that are ours alone; the descriptor may be closed meanwhile, which the kernel tells.
    let asked = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut len,
        )
    };
    answered(asked, domain)
}

/// Whether the kernel decrypts what a socket receives: straight into the pages of whoever receives it. Only TCP's can.
pub(super) fn has_tls(fd: RawFd) -> io::Result<bool> {
    if !matches!(domain(fd)?, Some(libc::AF_INET | libc::AF_INET6)) {
        return Ok(false);
    }
    let mut name = [0u8; 16];
    let mut len: libc::socklen_t = 16;
    // SAFETY: so many bytes that are ours alone; the descriptor may be closed meanwhile, which the kernel tells.
    let asked = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_TCP,
            libc::TCP_ULP,
            name.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    match answered(asked, name.starts_with(b"tls")) {
        Ok(tls) => Ok(tls == Some(true)),
        // No TCP.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP)) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd};

    #[test]
    fn what_is_open_all_the_time_is_judged_whatever_is_opened_below_it_meanwhile() {
        let descriptors = Descriptors::open().unwrap();
        let low = rustix::io::dup(&descriptors.0).unwrap();
        // SAFETY: a fresh descriptor that nobody else owns.
        let high = unsafe {
            let fd = libc::fcntl(low.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 900);
            OwnedFd::from_raw_fd(fd)
        };
        let (mut seen, mut opened) = (false, vec![low]);
        let judged: Result<(), Error> = descriptors.each(|fd| {
            opened.push(rustix::io::dup(descriptors.0.as_fd()).unwrap());
            seen |= fd == high.as_raw_fd();
            Ok(())
        });
        judged.unwrap();
        assert!(seen);
    }

    #[test]
    fn a_ring_tells_what_is_registered() {
        let info = "pos:\t0\nSqMask:\t0x3\nUserFiles:\t0\nUserBufs:\t2\n    0: 0x7f/4096\nPollList:\n";
        assert_eq!(parse_registered(info), Some((0, 2)));
        assert_eq!(parse_registered("pos:\t0\n"), None);
    }

    #[test]
    fn only_what_is_not_open_counts_as_closed() {
        assert_eq!(flags(1_000_000).unwrap(), None);
        assert_eq!(file_system(1_000_000).unwrap(), None);
        assert_eq!(link(1_000_000).unwrap(), None);
        assert_eq!(domain(1_000_000).unwrap(), None);
        assert!(!has_tls(1_000_000).unwrap());
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for fd in [one.as_raw_fd(), udp.as_raw_fd(), tcp.as_raw_fd()] {
            assert!(!has_tls(fd).unwrap());
        }
        let no_socket = Descriptors::open().unwrap();
        assert!(has_tls(no_socket.0.as_raw_fd()).is_err());
    }
}
