//! The signal that gets a vCPU out of the guest.

use vmm_sys_util::signal::SIGRTMIN;

/// What kicks a vCPU thread out of the guest: its handler does nothing, but KVM_RUN returns.
pub(crate) fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}
