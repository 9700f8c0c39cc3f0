//! Not being preempted while guest pages are away.
#![allow(unsafe_code)] // sched_setscheduler

use crate::sys::inject::{self, Call};
use crate::sys::late_log;
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set when the kernel did not permit it once: no further tries.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// While this lives the calling thread runs before all normal threads (SCHED_FIFO, lowest priority), so that a busy
/// vCPU does not push it aside for milliseconds in the middle of a merge window. The windows are short and the CPU
/// budget counts them. Without the right to do so (CAP_SYS_NICE) nothing changes.
#[derive(Debug)]
pub(crate) struct Urgent(bool);

impl Urgent {
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn begin() -> Self {
        if REFUSED.load(Ordering::Relaxed) {
            return Self(false);
        }
        // Without SCHED_RESET_ON_FORK, which only CAP_SYS_NICE may clear again: a limit (RLIMIT_RTPRIO) allows the way in as well.
        let Err(error) = set(libc::SCHED_FIFO, 1) else {
            return Self(true);
        };
        let forbidden = error.raw_os_error() == Some(libc::EPERM);
        if !(forbidden && REFUSED.swap(true, Ordering::Relaxed)) {
            let then = "windows may be preempted; give the VMM CAP_SYS_NICE to keep vCPU stops short";
            late_log::note("asking for a higher priority", &error, then);
        }
        Self(false)
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if !self.0 {
            return;
        }
        // Whoever may raise a priority may lower it. Should the kernel refuse all the same, the end of the next one asks again.
        if let Err(error) = set(libc::SCHED_OTHER, 0) {
            let then = "it is tried again; until then the thread runs before others";
            late_log::note("going back to the usual priority", &error, then);
        }
    }
}

#[cfg_attr(any(test, feature = "inject"), track_caller)]
fn set(policy: i32, priority: i32) -> io::Result<()> {
    inject::before(Call::Schedule)?;
    // musl's function of this name does nothing: to the kernel it is of a thread, where POSIX has it of a process.
    // SAFETY: the calling thread (0), and the kernel's parameter block, which is the priority.
    if unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

thread_local! {
    static SERVICE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is a service's own. For libraries that interpose system calls: those of a service are
/// not the VMM's.
#[must_use]
pub fn in_service_thread() -> bool {
    SERVICE.get()
}

/// What every thread of a service calls first.
pub(crate) fn enter_service_thread() {
    SERVICE.set(true);
    block_signals();
}

/// Does something, e.g. start a thread, which then has no signal from the first, with all signals blocked.
pub(crate) fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: a valid, exclusive signal set, filled in by the kernel.
    let before = unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &mut before);
        before
    };
    block_signals();
    let done = work();
    // SAFETY: the calling thread's mask is put back.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    done
}

/// Whether the calling thread's system calls are filtered; if nothing tells, they are.
pub(crate) fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    // A kernel without seccomp has no such line.
    status.is_empty() || mode.is_some_and(|mode| mode.trim() != "0")
}

/// Keeps the VMM's signals away from the calling thread: they are for others, and would interrupt system calls here.
fn block_signals() {
    // SAFETY: a valid, exclusive signal set; only the calling thread's mask changes.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::inject::{Injection, Times};

    fn policy() -> i32 {
        // SAFETY: no arguments but the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn urgency_ends() {
        let before = policy();
        drop(Urgent::begin());
        assert_eq!(policy(), before);
    }

    #[test]
    fn urgency_that_cannot_be_had_or_ended_is_told_and_asked_for_again_unless_it_is_forbidden() {
        let before = policy();
        let failures = late_log::count();
        // Neither the beginning nor, if there was one, the end.
        for times in [Times::First(1), Times::Every(2)] {
            let injection = Injection::begin(Call::Schedule, libc::EINVAL, times);
            drop(Urgent::begin());
            drop(Urgent::begin());
            assert!(injection.failed() > 0 && late_log::count() > failures);
            drop(injection);
            drop(Urgent::begin());
            assert_eq!(policy(), before);
        }
        let injection = Injection::begin(Call::Schedule, libc::EPERM, Times::Always);
        (0..3).for_each(|_| drop(Urgent::begin()));
        assert_eq!(injection.failed(), 1, "what is forbidden is asked for once");
        drop(injection);
        REFUSED.store(false, Ordering::Relaxed);
    }
}
