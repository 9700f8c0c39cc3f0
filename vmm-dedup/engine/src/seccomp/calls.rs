//! The table of system calls. It was recorded on x86-64 with glibc 2.36; what musl was seen to do besides is in it. What only x86-64 has (open,
//! poll and the like) is missing elsewhere, where the C library makes the newer call of the same purpose (openat, ppoll): a table
//! elsewhere is to be recorded first.

use crate::seccomp::Part::{
    self, Agent, Announce, Call as Caller, Count, Damon, Fault, Pack, Refused, Scan, Start, Supervisor,
};
use crate::seccomp::Why::{
    self, Again, Allocator, IdleBitmap, KernelDamon, Locks, NoDevice, OpenFiles, OtherLibrary, Panic,
    Threads, Trouble,
};
use crate::seccomp::request;
use libc::{SYS_ioctl, c_long};

/// A system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Call {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub number: c_long,
    /// Of ioctl: what is asked for.
    pub request: Option<u32>,
    /// Who makes it in every run.
    pub parts: &'static [Part],
    /// Who else makes it in some runs, or on some hosts, and when.
    pub rare: &'static [(Why, &'static [Part])],
}

impl Call {
    /// Whether a part makes it, rarely or in every run.
    #[must_use]
    pub fn is_of(&self, part: Part) -> bool {
        self.parts.contains(&part) || self.rare.iter().any(|(_, parts)| parts.contains(&part))
    }
}

const fn call(
    name: &'static str,
    number: c_long,
    parts: &'static [Part],
    rare: &'static [(Why, &'static [Part])],
) -> Call {
    Call {
        name,
        number,
        request: None,
        parts,
        rare,
    }
}

const fn ioctl(
    name: &'static str,
    request: u32,
    parts: &'static [Part],
    rare: &'static [(Why, &'static [Part])],
) -> Call {
    Call {
        request: Some(request),
        ..call(name, SYS_ioctl, parts, rare)
    }
}

/// The threads of the engine, and those that start them.
const ANY: &[Part] = &[
    Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent, Start, Announce,
];

/// Whoever works on guest memory.
const WORKS: &[Part] = &[Supervisor, Scan, Fault, Start];

/// All that a filter must allow to a part: what it does, and what the threads need that it starts.
pub fn allowed(part: Part) -> impl Iterator<Item = &'static Call> {
    let does = |part: Part| CALLS.iter().filter(move |call| call.is_of(part));
    let started = part
        .starts()
        .iter()
        .flat_map(|started| started.starts().iter().chain([started]));
    std::iter::once(part).chain(started.copied()).flat_map(does)
}

/// Each call once.
pub const CALLS: &[Call] = &[
    call("accept4", libc::SYS_accept4, &[Agent], &[]),
    call("bind", libc::SYS_bind, &[Agent], &[]),
    call("brk", libc::SYS_brk, &[], &[(Allocator, ANY)]),
    #[cfg(target_arch = "x86_64")]
    call("chmod", libc::SYS_chmod, &[Agent], &[]),
    call(
        "clock_gettime",
        libc::SYS_clock_gettime,
        &[Supervisor, Scan, Fault, Pack, Damon, Agent, Start],
        &[(Again, &[Count, Refused, Announce])],
    ),
    call(
        "clock_nanosleep",
        libc::SYS_clock_nanosleep,
        &[],
        &[(Again, &[Supervisor, Scan, Fault, Pack, Count, Damon, Start])],
    ),
    call(
        "clone",
        libc::SYS_clone,
        &[],
        &[(Threads, &[Supervisor, Scan, Start, Announce])],
    ),
    call(
        "clone3",
        libc::SYS_clone3,
        &[Supervisor, Scan, Start, Announce],
        &[],
    ),
    call(
        "close",
        libc::SYS_close,
        &[Supervisor, Scan, Fault, Count, Refused, Agent, Start, Announce],
        &[(KernelDamon, &[Damon]), (Panic, &[Pack])],
    ),
    call(
        "connect",
        libc::SYS_connect,
        &[Supervisor, Refused, Agent, Start],
        &[(Trouble, &[Scan])],
    ),
    call(
        "eventfd2",
        libc::SYS_eventfd2,
        &[Supervisor, Start, Announce],
        &[],
    ),
    call(
        "exit",
        libc::SYS_exit,
        &[Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent],
        &[],
    ),
    call("fallocate", libc::SYS_fallocate, &[Scan], &[]),
    call(
        "fcntl",
        libc::SYS_fcntl,
        &[Supervisor, Scan, Fault, Count, Refused, Agent, Start, Announce],
        &[(OtherLibrary, &[Pack, Damon])],
    ),
    call(
        "fstat",
        libc::SYS_fstat,
        &[Supervisor, Scan, Start],
        &[(OtherLibrary, &[Fault, Pack, Count, Refused, Damon, Agent])],
    ),
    call(
        "fstatfs",
        libc::SYS_fstatfs,
        &[Scan, Count],
        &[(Trouble, &[Supervisor, Start])],
    ),
    call(
        "futex",
        libc::SYS_futex,
        &[
            Supervisor, Scan, Fault, Pack, Count, Damon, Start, Announce, Caller,
        ],
        &[(Locks, &[Refused, Agent])],
    ),
    call(
        "getcwd",
        libc::SYS_getcwd,
        &[],
        &[(
            Panic,
            &[Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent],
        )],
    ),
    call(
        "getdents64",
        libc::SYS_getdents64,
        &[Supervisor, Scan, Count, Start],
        &[(KernelDamon, &[Damon])],
    ),
    call(
        "getpid",
        libc::SYS_getpid,
        &[],
        &[(KernelDamon, &[Supervisor, Start])],
    ),
    call(
        "getrandom",
        libc::SYS_getrandom,
        &[Supervisor, Scan, Count, Start],
        &[],
    ),
    call("getrusage", libc::SYS_getrusage, &[Scan], &[]),
    call(
        "getsockopt",
        libc::SYS_getsockopt,
        &[Supervisor, Scan, Count, Start],
        &[],
    ),
    call(
        "gettid",
        libc::SYS_gettid,
        &[Scan, Fault, Pack, Count, Refused, Damon, Agent],
        &[(Panic, &[Supervisor])],
    ),
    call("listen", libc::SYS_listen, &[Agent], &[]),
    call(
        "lseek",
        libc::SYS_lseek,
        &[Supervisor, Scan, Count, Start],
        &[(Panic, &[Fault, Pack, Refused, Damon, Agent])],
    ),
    #[cfg(target_arch = "x86_64")]
    call(
        "lstat",
        libc::SYS_lstat,
        &[],
        &[(OtherLibrary, &[Supervisor, Scan, Start])],
    ),
    call(
        "madvise",
        libc::SYS_madvise,
        &[
            Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent, Start, Caller,
        ],
        &[(Allocator, &[Announce])],
    ),
    call(
        "mincore",
        libc::SYS_mincore,
        &[],
        &[(Trouble, &[Scan, Fault, Pack])],
    ),
    call(
        "mmap",
        libc::SYS_mmap,
        &[
            Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent, Start, Announce, Caller,
        ],
        &[],
    ),
    call("mprotect", libc::SYS_mprotect, ANY, &[]),
    call(
        "mremap",
        libc::SYS_mremap,
        &[Scan, Fault],
        &[(
            Allocator,
            &[Supervisor, Pack, Count, Refused, Damon, Agent, Start, Announce],
        )],
    ),
    call("munmap", libc::SYS_munmap, ANY, &[]),
    call(
        "nanosleep",
        libc::SYS_nanosleep,
        &[],
        &[(
            OtherLibrary,
            &[Supervisor, Scan, Fault, Pack, Count, Damon, Start],
        )],
    ),
    call(
        "newfstatat",
        libc::SYS_newfstatat,
        &[Supervisor, Agent, Start],
        &[(KernelDamon, &[Damon])],
    ),
    #[cfg(target_arch = "x86_64")]
    call(
        "open",
        libc::SYS_open,
        &[Supervisor, Start],
        &[(OtherLibrary, &[Scan, Fault, Pack, Count, Refused, Damon, Agent])],
    ),
    call(
        "openat",
        libc::SYS_openat,
        WORKS,
        &[
            (KernelDamon, &[Damon]),
            (OpenFiles, &[Count]),
            (Panic, &[Pack, Refused, Agent]),
        ],
    ),
    call(
        "ppoll",
        libc::SYS_ppoll,
        &[Scan, Fault, Pack, Refused, Agent],
        &[],
    ),
    call("prctl", libc::SYS_prctl, ANY, &[]),
    call(
        "pread64",
        libc::SYS_pread64,
        &[Count],
        &[(IdleBitmap, &[Supervisor, Scan, Start])],
    ),
    call("pwrite64", libc::SYS_pwrite64, &[], &[(IdleBitmap, &[Scan])]),
    call(
        "read",
        libc::SYS_read,
        &[Supervisor, Scan, Fault, Pack, Refused, Damon, Agent, Start],
        &[(Panic, &[Count])],
    ),
    #[cfg(target_arch = "x86_64")]
    call(
        "readlink",
        libc::SYS_readlink,
        &[Supervisor, Scan, Count, Start],
        &[(Panic, &[Fault, Pack, Refused, Damon, Agent])],
    ),
    call("recvfrom", libc::SYS_recvfrom, &[Agent], &[]),
    call(
        "recvmsg",
        libc::SYS_recvmsg,
        &[Supervisor, Scan, Refused, Start],
        &[],
    ),
    call("restart_syscall", libc::SYS_restart_syscall, &[], &[(Again, ANY)]),
    call("rseq", libc::SYS_rseq, &[Supervisor, Scan, Start, Announce], &[]),
    call("rt_sigprocmask", libc::SYS_rt_sigprocmask, ANY, &[]),
    call(
        "sched_getaffinity",
        libc::SYS_sched_getaffinity,
        &[Scan, Fault, Pack, Count, Refused, Damon, Agent],
        &[],
    ),
    call(
        "sched_setscheduler",
        libc::SYS_sched_setscheduler,
        &[Scan, Fault, Pack, Count],
        &[],
    ),
    call("sched_yield", libc::SYS_sched_yield, &[], &[(Locks, ANY)]),
    call(
        "seccomp",
        libc::SYS_seccomp,
        &[Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent],
        &[],
    ),
    call(
        "sendmsg",
        libc::SYS_sendmsg,
        &[Supervisor, Scan, Refused, Start],
        &[],
    ),
    call("sendto", libc::SYS_sendto, &[Agent], &[]),
    call(
        "set_robust_list",
        libc::SYS_set_robust_list,
        &[Supervisor, Scan, Start, Announce],
        &[],
    ),
    call(
        "setsockopt",
        libc::SYS_setsockopt,
        &[Supervisor, Refused, Start],
        &[(Trouble, &[Scan])],
    ),
    call(
        "sigaltstack",
        libc::SYS_sigaltstack,
        &[Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent],
        &[],
    ),
    call(
        "socket",
        libc::SYS_socket,
        &[Supervisor, Refused, Agent, Start],
        &[(Trouble, &[Scan])],
    ),
    call(
        "statfs",
        libc::SYS_statfs,
        &[],
        &[(OpenFiles, &[Supervisor, Scan, Count, Start])],
    ),
    #[cfg(target_arch = "x86_64")]
    call(
        "stat",
        libc::SYS_stat,
        &[],
        &[(
            OtherLibrary,
            &[Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent, Start],
        )],
    ),
    call(
        "statx",
        libc::SYS_statx,
        &[Supervisor, Scan, Fault, Count, Start],
        &[(KernelDamon, &[Damon]), (Panic, &[Pack, Refused, Agent])],
    ),
    call("uname", libc::SYS_uname, &[Supervisor, Start], &[]),
    #[cfg(target_arch = "x86_64")]
    call("unlink", libc::SYS_unlink, &[Agent], &[]),
    call(
        "userfaultfd",
        libc::SYS_userfaultfd,
        &[],
        &[(NoDevice, &[Supervisor, Start])],
    ),
    call(
        "write",
        libc::SYS_write,
        &[Supervisor, Damon, Start, Announce],
        &[(Panic, &[Scan, Fault, Pack, Count, Refused, Agent])],
    ),
    ioctl("FIONBIO", request::FIONBIO, &[Agent], &[]),
    ioctl(
        "PAGEMAP_SCAN",
        request::PAGEMAP_SCAN,
        &[Supervisor, Scan, Fault, Pack, Start],
        &[],
    ),
    ioctl("UFFDIO_API", request::UFFDIO_API, &[Supervisor, Start], &[]),
    ioctl("UFFDIO_COPY", request::UFFDIO_COPY, &[Scan, Pack], &[]),
    ioctl("UFFDIO_MOVE", request::UFFDIO_MOVE, &[Scan], &[]),
    ioctl(
        "UFFDIO_POISON",
        request::UFFDIO_POISON,
        &[],
        &[(Trouble, &[Supervisor, Scan, Pack])],
    ),
    ioctl(
        "UFFDIO_REGISTER",
        request::UFFDIO_REGISTER,
        WORKS,
        &[(Trouble, &[Pack])],
    ),
    ioctl(
        "UFFDIO_UNREGISTER",
        request::UFFDIO_UNREGISTER,
        &[Scan],
        &[(Trouble, &[Supervisor, Fault, Pack, Start])],
    ),
    ioctl(
        "UFFDIO_WAKE",
        request::UFFDIO_WAKE,
        &[Scan, Fault, Pack],
        &[(Trouble, &[Supervisor, Start])],
    ),
    ioctl(
        "UFFDIO_WRITEPROTECT",
        request::UFFDIO_WRITEPROTECT,
        &[Scan],
        &[(Trouble, &[Supervisor, Fault, Start])],
    ),
    ioctl(
        "UFFDIO_ZEROPAGE",
        request::UFFDIO_ZEROPAGE,
        &[Supervisor, Scan, Pack, Start],
        &[],
    ),
    ioctl(
        "USERFAULTFD_IOC_NEW",
        request::USERFAULTFD_IOC_NEW,
        &[Supervisor, Start],
        &[],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_stands_once_and_has_each_part_once() {
        for (nth, call) in CALLS.iter().enumerate() {
            let same = |other: &&Call| (other.number, other.request) == (call.number, call.request);
            assert_eq!(
                CALLS.iter().position(|other| same(&other)),
                Some(nth),
                "{}",
                call.name
            );
            let rare = call.rare.iter().flat_map(|(_, parts)| *parts);
            let mut parts: Vec<Part> = call.parts.iter().chain(rare).copied().collect();
            let all = parts.len();
            parts.sort();
            parts.dedup();
            assert_eq!((parts.len(), parts.is_empty()), (all, false), "{}", call.name);
        }
    }
}
