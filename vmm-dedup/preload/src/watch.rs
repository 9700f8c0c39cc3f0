//! What the hooks remember of the VMM's calls.

use crate::mappings::Mappings;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that the VMM has registered with a userfaultfd of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lent {
    pub(crate) range: Range<usize>,
    pub(crate) uffd: RawFd,
    pub(crate) mode: u64,
}

/// A file by which devices got guest memory that is pinned since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFile {
    pub(crate) fd: RawFd,
    /// How often they did.
    pub(crate) times: u64,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) mappings: Mappings,
    /// Bytes of guest memory that no known mapping holds.
    pub(crate) unknown: usize,
    /// The latest registrations come last.
    pub(crate) lent: Vec<Lent>,
    pub(crate) devices: Vec<DeviceFile>,
}

/// Shared by all threads of the process.
static WATCH: Mutex<Inner> = Mutex::new(Inner {
    mappings: Mappings::new(),
    unknown: 0,
    lent: Vec::new(),
    devices: Vec::new(),
});

pub(crate) fn watch() -> MutexGuard<'static, Inner> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}
