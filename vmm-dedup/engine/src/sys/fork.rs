//! A child that only exists: by forking it the kernel tells which pages are pinned.
//!
//! A fork shares anonymous pages with the child, but for those that are pinned: the kernel copies these for the child at once,
//! since a device must go on seeing the parent's page. So a page that two processes map after the fork was not pinned at that
//! time. Whoever writes it, or pins it, later gets a page of his own first. So for as long as the child lives, "mapped
//! by two" means: not pinned when it was forked, and not written or pinned since.
//!
//! - The child makes system calls and nothing else: it was forked from a process of many threads, whose locks it may hold.
//! - It shares the table of descriptors, so it keeps no file open, and ends with its parent (PR_SET_PDEATHSIG): a parent that died
//!   would leave it, with the guest's memory.
//! - It is no child for those who wait for children (its exit signal is none), and is ended and waited for by its pidfd: whoever
//!   reaps it all the same cannot make us end another process.
//! - With a filter of system calls (seccomp) it is not forked at all: the filter may end the process for that. Nor is it where the
//!   engine is built without the feature `forks`.
#![allow(unsafe_code)] // clone

use crate::sys::inject::{self, Call};
use crate::sys::sched;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PIDFD: libc::c_long = 0x1000; // CLONE_PIDFD

/// A child that waits for its end.
#[derive(Debug)]
pub(crate) struct Child(OwnedFd);

impl Child {
    /// Why none can be forked by the calling thread, if that is known without trying.
    pub(crate) fn refused() -> Option<&'static str> {
        match () {
            () if !cfg!(feature = "forks") => Some("forks are not built in"),
            () if sched::is_filtered() => Some("system calls are filtered"),
            () => None,
        }
    }

    /// Forks one. Memory that it is not to have must have been advised so (MADV_DONTFORK).
    ///
    /// # Errors
    /// Those of clone(2): no more processes are allowed (EAGAIN), no memory (ENOMEM); EPERM where system calls are filtered, or forks are not built in.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn fork() -> io::Result<Self> {
        if Self::refused().is_some() {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        inject::before(Call::Fork)?;
        let parent = std::process::id();
        let mut pidfd: libc::c_int = -1;
        let flags = libc::c_long::from(libc::CLONE_FILES | libc::CLONE_FS) | PIDFD;
        // SAFETY: a fork, for lack of CLONE_VM: the child has memory of its own, of which it uses nothing but its stack. pidfd
        // is ours alone.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) };
        if pid == 0 {
            wait_for_the_end(parent);
        }
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(pidfd) }))
    }

    /// Whether somebody ended it, so that it tells nothing any more. (Stopped, it does.)
    pub(crate) fn has_ended(&self) -> bool {
        let mut ended = [PollFd::new(&self.0, PollFlags::IN)];
        !matches!(poll(&mut ended, Some(&Timespec::default())), Ok(0))
    }
}

/// The child's life.
fn wait_for_the_end(parent: u32) -> ! {
    // SAFETY: system calls without memory arguments. The parent may have died before the first.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        while libc::syscall(libc::SYS_getppid) == libc::c_long::from(parent) {
            libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0);
        }
        loop {
            libc::syscall(libc::SYS_exit_group, 0);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: no memory is given.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                libc::SIGKILL,
                0,
                0,
            )
        };
        let id = libc::id_t::try_from(self.0.as_raw_fd()).unwrap_or(0);
        // Reaped by somebody else (ECHILD) is well as well.
        loop {
            // SAFETY: nothing is written where there is no place for it.
            let waited = unsafe {
                libc::waitid(
                    libc::P_PIDFD,
                    id,
                    std::ptr::null_mut(),
                    libc::WEXITED | libc::__WCLONE,
                )
            };
            if waited == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::{PAGE_SIZE, bytes};
    use crate::sys::pagemap::Pagemap;
    use crate::sys::vma::{self, Anonymous};
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn pages_are_shared_with_a_child_until_they_are_written_or_it_ends() {
        let area = Anonymous::new(8).unwrap();
        area.populate().unwrap();
        let range = area.base()..area.base() + bytes(8);
        let pagemap = Pagemap::open().unwrap();
        assert!(pagemap.shared_with_child(&range).unwrap().is_empty());
        let child = match Child::fork() {
            Ok(child) => child,
            Err(error) => return eprintln!("SKIPPED: no child: {error}"),
        };
        // SAFETY: mapped, aligned, and only ever used as this.
        let word = unsafe { &*((range.start + 3 * PAGE_SIZE) as *const AtomicU64) };
        word.store(1, Ordering::Relaxed);
        let at =
            |pages: std::ops::Range<usize>| range.start + bytes(pages.start)..range.start + bytes(pages.end);
        assert_eq!(pagemap.shared_with_child(&range).unwrap(), [at(0..3), at(4..8)]);
        drop(child);
        assert!(pagemap.shared_with_child(&range).unwrap().is_empty());
    }

    #[test]
    fn a_child_that_was_stopped_tells_all_the_same_and_a_killed_one_nothing() {
        let area = Anonymous::new(8).unwrap();
        area.populate().unwrap();
        let range = area.base()..area.base() + bytes(8);
        let pagemap = Pagemap::open().unwrap();
        let signal = |child: &Child, signal: libc::c_int| {
            // SAFETY: no memory is given.
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, child.0.as_raw_fd(), signal, 0, 0) }
        };
        let Ok(child) = Child::fork() else { return };
        assert_eq!(signal(&child, libc::SIGSTOP), 0);
        assert!(!child.has_ended());
        assert_eq!(
            pagemap.shared_with_child(&range).unwrap(),
            std::slice::from_ref(&range)
        );
        drop(child); // does not wait for ever
        let Ok(child) = Child::fork() else { return };
        assert_eq!(signal(&child, libc::SIGKILL), 0);
        while !child.has_ended() {
            std::thread::yield_now();
        }
        assert!(pagemap.shared_with_child(&range).unwrap().is_empty());
    }

    #[test]
    fn memory_that_is_kept_from_children_is_not_shared() {
        let area = Anonymous::new(8).unwrap();
        area.populate().unwrap();
        let range = area.base()..area.base() + bytes(8);
        vma::advise_again(&range, libc::MADV_DONTFORK);
        let Ok(_child) = Child::fork() else { return };
        assert!(
            Pagemap::open()
                .unwrap()
                .shared_with_child(&range)
                .unwrap()
                .is_empty()
        );
    }
}
