//! Waiting for a socket and for other threads at once.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Wakes a thread that waits for a socket. Ringing is remembered until the next wait.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn ring(&self) {
        // It fails only where 2^64 - 2 rings wait already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets that somebody rang.
    pub(crate) fn hush(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }

    /// Waits until somebody rings, or the socket has something, or the time is over; returns whether it is the socket.
    pub(crate) fn wait(&self, time: Duration, socket: Option<BorrowedFd<'_>>) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let mut fds: Vec<PollFd<'_>> = std::iter::once(PollFd::new(&self.0, PollFlags::IN))
            .chain(socket.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)))
            .collect();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return false; // interrupted: callers look at what they wait for anyway
        }
        self.hush();
        // An error or a hang-up is for the reader to find.
        fds.get(1).is_some_and(|socket| !socket.revents().is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_remembered_and_sockets_told_apart() {
        let bell = Bell::new().unwrap();
        bell.ring();
        let hour = Duration::from_secs(3600);
        assert!(!bell.wait(hour, None));
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(!bell.wait(Duration::ZERO, Some(ours.as_fd())));
        drop(theirs);
        assert!(bell.wait(hour, Some(ours.as_fd())));
    }
}
