//! The tables of system calls. They were recorded on x86-64. What only that has (open, poll and the like) is missing elsewhere,
//! where the C library makes the newer call of the same purpose (openat, ppoll): a table elsewhere is to be recorded first.

use crate::seccomp::Part::{
    self, Agent, Announce, Call as Caller, Count, Damon, Fault, Refused, Scan, Start, Supervisor,
};
use libc::{SYS_ioctl, c_long};

/// A system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub number: c_long,
    /// Of ioctl: what is asked for.
    pub request: Option<u32>,
    /// Who makes it.
    pub parts: &'static [Part],
}

const fn call(name: &'static str, number: c_long, parts: &'static [Part]) -> Call {
    Call {
        name,
        number,
        request: None,
        parts,
    }
}

const fn ioctl(name: &'static str, request: u32, parts: &'static [Part]) -> Call {
    Call {
        name,
        number: SYS_ioctl,
        request: Some(request),
        parts,
    }
}

/// The threads of the engine, and those that start them.
const ANY: &[Part] = &[
    Supervisor, Scan, Fault, Count, Refused, Damon, Agent, Start, Announce,
];

/// Whoever works on guest memory. What one of them does in most runs another may have to do when something fails.
const WORKS: &[Part] = &[Supervisor, Scan, Fault, Start];

/// All that a filter must allow to a part: what it does, and what the threads need that it starts.
pub fn allowed(part: Part) -> impl Iterator<Item = &'static Call> {
    let does = |part: Part| {
        CALLS
            .iter()
            .chain(RARE)
            .filter(move |call| call.parts.contains(&part))
    };
    let started = part
        .starts()
        .iter()
        .flat_map(|started| started.starts().iter().chain([started]));
    std::iter::once(part).chain(started.copied()).flat_map(does)
}

/// What runs do.
pub const CALLS: &[Call] = &[
    call("accept4", libc::SYS_accept4, &[Agent]),
    call("bind", libc::SYS_bind, &[Agent]),
    #[cfg(target_arch = "x86_64")]
    call("chmod", libc::SYS_chmod, &[Agent]),
    call(
        "clock_gettime",
        libc::SYS_clock_gettime,
        &[Supervisor, Scan, Fault, Start],
    ),
    call("clone3", libc::SYS_clone3, &[Supervisor, Scan, Start, Announce]),
    call(
        "close",
        libc::SYS_close,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce, Agent],
    ),
    call("connect", libc::SYS_connect, &[Supervisor, Refused, Start, Agent]),
    call("eventfd2", libc::SYS_eventfd2, &[Supervisor, Start, Announce]),
    call("exit", libc::SYS_exit, &[Scan, Fault, Count, Refused]),
    call("fallocate", libc::SYS_fallocate, &[Scan]),
    call(
        "fcntl",
        libc::SYS_fcntl,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce, Agent],
    ),
    call("fstat", libc::SYS_fstat, &[Supervisor, Scan, Start]),
    call("fstatfs", libc::SYS_fstatfs, &[Count]),
    call(
        "futex",
        libc::SYS_futex,
        &[Supervisor, Scan, Fault, Count, Start, Announce, Caller],
    ),
    call(
        "getdents64",
        libc::SYS_getdents64,
        &[Supervisor, Scan, Count, Start],
    ),
    call(
        "getrandom",
        libc::SYS_getrandom,
        &[Supervisor, Scan, Count, Start],
    ),
    call("getrusage", libc::SYS_getrusage, &[Scan]),
    call("getsockopt", libc::SYS_getsockopt, &[Scan, Count]),
    call("gettid", libc::SYS_gettid, &[Scan, Fault, Count, Refused]),
    call("listen", libc::SYS_listen, &[Agent]),
    call("lseek", libc::SYS_lseek, &[Supervisor, Scan, Count, Start]),
    call(
        "madvise",
        libc::SYS_madvise,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Caller],
    ),
    call(
        "mmap",
        libc::SYS_mmap,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce, Caller],
    ),
    call(
        "mprotect",
        libc::SYS_mprotect,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce],
    ),
    call("mremap", libc::SYS_mremap, &[Scan, Fault]),
    call(
        "munmap",
        libc::SYS_munmap,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce],
    ),
    call(
        "newfstatat",
        libc::SYS_newfstatat,
        &[Supervisor, Scan, Start, Agent],
    ),
    #[cfg(target_arch = "x86_64")]
    call("open", libc::SYS_open, &[Supervisor, Start]),
    call("openat", libc::SYS_openat, &[Supervisor, Scan, Fault, Start]),
    call("ppoll", libc::SYS_ppoll, &[Scan, Fault, Refused, Agent]),
    call(
        "prctl",
        libc::SYS_prctl,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce],
    ),
    call("pread64", libc::SYS_pread64, &[Count]),
    call("read", libc::SYS_read, &[Supervisor, Scan, Fault, Refused, Start]),
    #[cfg(target_arch = "x86_64")]
    call("readlink", libc::SYS_readlink, &[Count]),
    call("recvfrom", libc::SYS_recvfrom, &[Agent]),
    call("recvmsg", libc::SYS_recvmsg, &[Supervisor, Scan, Refused, Start]),
    call("rseq", libc::SYS_rseq, &[Supervisor, Scan, Start, Announce]),
    call(
        "rt_sigprocmask",
        libc::SYS_rt_sigprocmask,
        &[Supervisor, Scan, Fault, Count, Refused, Start, Announce],
    ),
    call(
        "sched_getaffinity",
        libc::SYS_sched_getaffinity,
        &[Scan, Fault, Count, Refused],
    ),
    call(
        "sched_setscheduler",
        libc::SYS_sched_setscheduler,
        &[Scan, Fault, Count],
    ),
    call(
        "seccomp",
        libc::SYS_seccomp,
        &[Supervisor, Scan, Fault, Count, Refused],
    ),
    call("sendmsg", libc::SYS_sendmsg, &[Supervisor, Scan, Refused, Start]),
    call("sendto", libc::SYS_sendto, &[Agent]),
    call(
        "set_robust_list",
        libc::SYS_set_robust_list,
        &[Supervisor, Scan, Start, Announce],
    ),
    call("setsockopt", libc::SYS_setsockopt, &[Supervisor, Refused, Start]),
    call(
        "sigaltstack",
        libc::SYS_sigaltstack,
        &[Scan, Fault, Count, Refused],
    ),
    call("socket", libc::SYS_socket, &[Supervisor, Refused, Start, Agent]),
    call("statx", libc::SYS_statx, &[Supervisor, Scan, Fault, Count, Start]),
    call("uname", libc::SYS_uname, &[Supervisor, Start]),
    #[cfg(target_arch = "x86_64")]
    call("unlink", libc::SYS_unlink, &[Agent]),
    call("write", libc::SYS_write, &[Supervisor, Start, Announce]),
    ioctl("FIONBIO", 0x5421, &[Agent]),
    ioctl("USERFAULTFD_IOC_NEW", 0xaa00, &[Supervisor, Start]),
    ioctl("UFFDIO_UNREGISTER", 0x8010_aa01, &[Scan]),
    ioctl("UFFDIO_WAKE", 0x8010_aa02, &[Scan, Fault]),
    ioctl("UFFDIO_WRITEPROTECT", 0xc018_aa06, &[Scan]),
    ioctl("UFFDIO_API", 0xc018_aa3f, &[Supervisor, Start]),
    ioctl("UFFDIO_REGISTER", 0xc020_aa00, &[Supervisor, Scan, Fault, Start]),
    ioctl("UFFDIO_ZEROPAGE", 0xc020_aa04, &[Supervisor, Scan, Start]),
    ioctl("UFFDIO_MOVE", 0xc028_aa05, &[Scan]),
    ioctl("PAGEMAP_SCAN", 0xc060_6610, &[Supervisor, Scan, Fault, Start]),
];

/// What only some runs do, or only some hosts need; each says when. No test demands these, but for what DAMON and the bitmap of
/// idle pages need.
pub const RARE: &[Call] = &[
    // What fails in the middle is put back, tried again or given up by whoever works on guest memory, and a store may be lost.
    call("clone3", libc::SYS_clone3, WORKS),
    call("close", libc::SYS_close, WORKS),
    call("connect", libc::SYS_connect, WORKS),
    call("eventfd2", libc::SYS_eventfd2, WORKS),
    call("fallocate", libc::SYS_fallocate, WORKS),
    call("fcntl", libc::SYS_fcntl, WORKS),
    call("fstat", libc::SYS_fstat, WORKS),
    call("fstatfs", libc::SYS_fstatfs, WORKS),
    call("getdents64", libc::SYS_getdents64, WORKS),
    call("getrandom", libc::SYS_getrandom, WORKS),
    call("getrusage", libc::SYS_getrusage, WORKS),
    call("getsockopt", libc::SYS_getsockopt, WORKS),
    call("lseek", libc::SYS_lseek, WORKS),
    call("newfstatat", libc::SYS_newfstatat, WORKS),
    #[cfg(target_arch = "x86_64")]
    call("open", libc::SYS_open, WORKS),
    call("openat", libc::SYS_openat, WORKS),
    call("ppoll", libc::SYS_ppoll, WORKS),
    #[cfg(target_arch = "x86_64")]
    call("readlink", libc::SYS_readlink, WORKS),
    call("recvmsg", libc::SYS_recvmsg, WORKS),
    call("rseq", libc::SYS_rseq, WORKS),
    call("sched_setscheduler", libc::SYS_sched_setscheduler, WORKS),
    call("sendmsg", libc::SYS_sendmsg, WORKS),
    call("set_robust_list", libc::SYS_set_robust_list, WORKS),
    call("setsockopt", libc::SYS_setsockopt, WORKS),
    call("socket", libc::SYS_socket, WORKS),
    call("statx", libc::SYS_statx, WORKS),
    call("uname", libc::SYS_uname, WORKS),
    ioctl("USERFAULTFD_IOC_NEW", 0xaa00, WORKS),
    ioctl("UFFDIO_UNREGISTER", 0x8010_aa01, WORKS),
    ioctl("UFFDIO_WAKE", 0x8010_aa02, WORKS),
    ioctl("UFFDIO_WRITEPROTECT", 0xc018_aa06, WORKS),
    ioctl("UFFDIO_API", 0xc018_aa3f, WORKS),
    ioctl("UFFDIO_REGISTER", 0xc020_aa00, WORKS),
    ioctl("UFFDIO_ZEROPAGE", 0xc020_aa04, WORKS),
    ioctl("UFFDIO_MOVE", 0xc028_aa05, WORKS),
    ioctl("PAGEMAP_SCAN", 0xc060_6610, WORKS),
    // Private pages between shared ones, which lie in one mapping with these; a page that cannot be moved back.
    ioctl("UFFDIO_COPY", 0xc028_aa03, WORKS),
    // Whether a page that is away is anywhere, when a call of the kernel has failed in the middle of a window.
    call("mincore", libc::SYS_mincore, WORKS),
    // A page whose content was lost by the kernel: whoever touches it gets SIGBUS instead of wrong bytes.
    ioctl("UFFDIO_POISON", 0xc020_aa08, WORKS),
    // A host without /dev/userfaultfd.
    call("userfaultfd", libc::SYS_userfaultfd, WORKS),
    // A bitmap of idle pages, on kernels that have it, with CAP_SYS_ADMIN.
    call("pread64", libc::SYS_pread64, WORKS),
    call("pwrite64", libc::SYS_pwrite64, &[Scan]),
    // The layers of overlayfs, and what is registered with an io_uring.
    call("statfs", libc::SYS_statfs, WORKS),
    call("openat", libc::SYS_openat, &[Count]),
    call("statfs", libc::SYS_statfs, &[Count]),
    // DAMON, on kernels that have it, with CAP_SYS_ADMIN.
    call("getpid", libc::SYS_getpid, WORKS),
    call("close", libc::SYS_close, &[Damon]),
    call("getdents64", libc::SYS_getdents64, &[Damon]),
    call("newfstatat", libc::SYS_newfstatat, &[Damon]),
    call("openat", libc::SYS_openat, &[Damon]),
    call("statx", libc::SYS_statx, &[Damon]),
    // A guest's agent, on vsock or with other C libraries.
    call("getpeername", libc::SYS_getpeername, &[Agent]),
    #[cfg(target_arch = "x86_64")]
    call("poll", libc::SYS_poll, &[Agent]),
    call("statx", libc::SYS_statx, &[Agent]),
    // A thread's beginning and end.
    call("exit", libc::SYS_exit, ANY),
    call("gettid", libc::SYS_gettid, ANY),
    call("prctl", libc::SYS_prctl, ANY),
    call("rt_sigprocmask", libc::SYS_rt_sigprocmask, ANY),
    call("sched_getaffinity", libc::SYS_sched_getaffinity, ANY),
    call("seccomp", libc::SYS_seccomp, ANY),
    call("sigaltstack", libc::SYS_sigaltstack, ANY),
    // Threads on C libraries and kernels before clone3.
    call("clone", libc::SYS_clone, ANY),
    // Another try a moment later: a page that is busy, memory that is short, /proc that changes while it is read.
    call("clock_gettime", libc::SYS_clock_gettime, ANY),
    call("clock_nanosleep", libc::SYS_clock_nanosleep, ANY),
    call("nanosleep", libc::SYS_nanosleep, ANY),
    // Threads that were stopped in the middle of a wait (a debugger, a snapshot of the host).
    call("restart_syscall", libc::SYS_restart_syscall, ANY),
    // Locks that are contended.
    call("futex", libc::SYS_futex, ANY),
    call("sched_yield", libc::SYS_sched_yield, ANY),
    // More of the allocator's memory, and heaps that shrink. Nothing at all, while pages are healed: it waits for a lock.
    call("brk", libc::SYS_brk, ANY),
    call("madvise", libc::SYS_madvise, ANY),
    call("mmap", libc::SYS_mmap, ANY),
    call("mprotect", libc::SYS_mprotect, ANY),
    call("mremap", libc::SYS_mremap, ANY),
    call("munmap", libc::SYS_munmap, ANY),
    // The program's log, and bells.
    call("read", libc::SYS_read, ANY),
    call("write", libc::SYS_write, ANY),
];
