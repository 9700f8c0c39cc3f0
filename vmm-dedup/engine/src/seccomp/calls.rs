//! The tables of system calls.

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
}

const fn call(name: &'static str, number: c_long) -> Call {
    Call {
        name,
        number,
        request: None,
    }
}

const fn ioctl(name: &'static str, request: u32) -> Call {
    Call {
        name,
        number: SYS_ioctl,
        request: Some(request),
    }
}

/// What every run does.
pub const CALLS: &[Call] = &[
    call("clock_gettime", libc::SYS_clock_gettime),
    call("clone3", libc::SYS_clone3),
    call("close", libc::SYS_close),
    call("connect", libc::SYS_connect),
    call("eventfd2", libc::SYS_eventfd2),
    call("exit", libc::SYS_exit),
    call("fallocate", libc::SYS_fallocate),
    call("fcntl", libc::SYS_fcntl),
    call("fstat", libc::SYS_fstat),
    call("fstatfs", libc::SYS_fstatfs),
    call("futex", libc::SYS_futex),
    call("getdents64", libc::SYS_getdents64),
    call("getrandom", libc::SYS_getrandom),
    call("getrusage", libc::SYS_getrusage),
    call("getsockopt", libc::SYS_getsockopt),
    call("gettid", libc::SYS_gettid),
    call("lseek", libc::SYS_lseek),
    call("madvise", libc::SYS_madvise),
    call("mmap", libc::SYS_mmap),
    call("mprotect", libc::SYS_mprotect),
    call("mremap", libc::SYS_mremap),
    call("munmap", libc::SYS_munmap),
    call("newfstatat", libc::SYS_newfstatat),
    call("open", libc::SYS_open),
    call("openat", libc::SYS_openat),
    call("ppoll", libc::SYS_ppoll),
    call("prctl", libc::SYS_prctl),
    call("read", libc::SYS_read),
    call("readlink", libc::SYS_readlink),
    call("recvmsg", libc::SYS_recvmsg),
    call("rseq", libc::SYS_rseq),
    call("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    call("sched_getaffinity", libc::SYS_sched_getaffinity),
    call("sched_setscheduler", libc::SYS_sched_setscheduler),
    call("sendmsg", libc::SYS_sendmsg),
    call("set_robust_list", libc::SYS_set_robust_list),
    call("setsockopt", libc::SYS_setsockopt),
    call("sigaltstack", libc::SYS_sigaltstack),
    call("socket", libc::SYS_socket),
    call("statx", libc::SYS_statx),
    call("uname", libc::SYS_uname),
    call("write", libc::SYS_write),
    ioctl("USERFAULTFD_IOC_NEW", 0xaa00),
    ioctl("UFFDIO_UNREGISTER", 0x8010_aa01),
    ioctl("UFFDIO_WAKE", 0x8010_aa02),
    ioctl("UFFDIO_WRITEPROTECT", 0xc018_aa06),
    ioctl("UFFDIO_API", 0xc018_aa3f),
    ioctl("UFFDIO_REGISTER", 0xc020_aa00),
    ioctl("UFFDIO_ZEROPAGE", 0xc020_aa04),
    ioctl("UFFDIO_MOVE", 0xc028_aa05),
    ioctl("PAGEMAP_SCAN", 0xc060_6610),
];

/// What only some runs do, or only some hosts need; each says when. No test demands these.
pub const RARE: &[Call] = &[
    // Private pages between shared ones, which lie in one mapping with these; a page that cannot be moved back.
    ioctl("UFFDIO_COPY", 0xc028_aa03),
    // Another try a moment later: a page that is busy, memory that is short, /proc that changes while it is read.
    call("clock_nanosleep", libc::SYS_clock_nanosleep),
    call("nanosleep", libc::SYS_nanosleep),
    // Threads that were stopped in the middle of a wait (a debugger, a snapshot of the host).
    call("restart_syscall", libc::SYS_restart_syscall),
    // Threads on C libraries and kernels before clone3.
    call("clone", libc::SYS_clone),
    // Threads that spin for a lock of the standard library.
    call("sched_yield", libc::SYS_sched_yield),
    // Whether a page that is away is anywhere, when a call of the kernel has failed in the middle of a window.
    call("mincore", libc::SYS_mincore),
    // A page whose content was lost by the kernel: whoever touches it gets SIGBUS instead of wrong bytes.
    ioctl("UFFDIO_POISON", 0xc020_aa08),
    // A host without /dev/userfaultfd.
    call("userfaultfd", libc::SYS_userfaultfd),
    // More of the allocator's memory, and heaps that shrink. Nothing at all, while pages are healed: it waits for a lock.
    call("brk", libc::SYS_brk),
    // A bitmap of idle pages, on kernels that have it.
    call("pread64", libc::SYS_pread64),
    // The layers of overlayfs.
    call("statfs", libc::SYS_statfs),
];

/// What a thread of the VMM does that calls a [`Supervisor`](crate::supervisor::Supervisor) or a
/// [`Discarder`](crate::unmerge::discard::Discarder), whose memory the allocator has already.
pub const CALLERS: &[Call] = &[
    call("futex", libc::SYS_futex),
    call("madvise", libc::SYS_madvise),
    call("mmap", libc::SYS_mmap),
];
