//! The VMM's own filter, for its main thread and the vCPUs that this starts: what the VMM itself does, and nothing that only dedup
//! needs.

use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule};

/// What the VMM itself does, but ioctl.
const CALLS: [libc::c_long; 41] = [
    // Files, pipes and devices.
    libc::SYS_openat,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fcntl,
    libc::SYS_eventfd2,
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
    libc::SYS_brk,
    // Threads, their signals and their end.
    libc::SYS_clone3,
    libc::SYS_clone,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_prctl,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_tgkill,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
/// The type of KVM's ioctls, and where a request has its type.
const KVMIO: u64 = 0xae << 8;
const TYPE: u64 = 0xff << 8;

/// Whoever does anything else is killed.
pub(crate) fn restrict_this_thread() -> Result<(), Box<dyn std::error::Error>> {
    let request_of_kvm = SeccompCondition::new(1, Dword, MaskedEq(TYPE), KVMIO)?;
    let mut rules: std::collections::BTreeMap<_, _> =
        CALLS.into_iter().map(|call| (call, Vec::new())).collect();
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(vec![request_of_kvm])?]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Trap,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
