//! What the hooks remember of the VMM's calls.

use crate::manager::Ours;
use crate::mappings::Mappings;
use std::ops::{Deref, DerefMut, Range};
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

/// The one there is, locked. Whoever has it may allocate: an allocator of the VMM's that asks for memory by mmap() is not watched
/// meanwhile, since that would wait for this very lock.
#[derive(Debug)]
pub(crate) struct Watching {
    inner: MutexGuard<'static, Inner>,
    _ours: Ours,
}

impl Deref for Watching {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Watching {
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

pub(crate) fn watch() -> Watching {
    let ours = Ours::begin();
    Watching {
        inner: WATCH.lock().unwrap_or_else(PoisonError::into_inner),
        _ours: ours,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager;

    #[test]
    fn what_is_done_with_the_lock_held_is_not_watched() {
        assert!(!manager::is_ours());
        let watching = watch();
        assert!(manager::is_ours());
        drop(watching);
        assert!(!manager::is_ours());
        manager::as_ours(|| {
            drop(watch());
            assert!(manager::is_ours());
        });
    }
}
