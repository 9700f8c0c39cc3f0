//! The system calls of the VMM itself, without ioctl. A test sees each of [`CALLS`] made.

/// What it does in every life.
pub(crate) const CALLS: &[libc::c_long] = &[
    // Files, pipes and devices.
    libc::SYS_openat,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_fcntl,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_enter,
    // Memory.
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mlock,
    // Threads, their signals and their end.
    libc::SYS_clone3,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_prctl,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_tgkill,
    libc::SYS_futex,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// What is a matter of chance, or of the host: the allocator's heap, kernels before clone3, a lock that somebody holds, a wait that was
/// stopped in the middle, and what the kernel's vDSO does for the process where it can.
pub(crate) const RARE: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clone,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
];
