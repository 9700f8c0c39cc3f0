//! Descriptors that tokio watches.
#![allow(unsafe_code)] // AsyncFd::register_with_interest demands that the descriptor stays open.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that may have other owners and is open as long as this is.
#[derive(Debug)]
pub(crate) struct Watched(Arc<OwnedFd>);

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Registers a descriptor with the runtime. It should be non-blocking if it is to be read or written.
pub(crate) fn watch(fd: Arc<OwnedFd>, interest: Interest) -> io::Result<AsyncFd<Watched>> {
    // SAFETY: as_raw_fd returns the same descriptor every time; it is open at least as long as the Watched, which
    // the AsyncFd owns and gives out only behind a shared reference.
    Ok(unsafe { AsyncFd::register_with_interest(Watched(fd), interest) }?)
}
