//! The VMM's own filter, for its main thread and the vCPUs that this starts: without what only dedup needs.

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// What the VMM itself never does. (A real VMM lists what it does instead.)
const NEVER: [libc::c_long; 8] = [
    libc::SYS_userfaultfd,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_mremap,
    libc::SYS_sched_setscheduler,
    libc::SYS_getdents64,
];

/// Whoever does one of these is killed.
pub(crate) fn restrict_this_thread() -> Result<(), Box<dyn std::error::Error>> {
    let filter = SeccompFilter::new(
        NEVER.into_iter().map(|call| (call, Vec::new())).collect(),
        SeccompAction::Allow,
        SeccompAction::Trap,
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
