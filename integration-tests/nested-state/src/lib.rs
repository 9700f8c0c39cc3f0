//! Lets Cloud Hypervisor take snapshots on a KVM without KVM_CAP_NESTED_STATE: the state of a nested guest that there
//! cannot be is empty. Only where the kernel refuses the two ioctls; behind the library under test, which thereby
//! proves that it goes well with other preloaded ones.
#![allow(unsafe_code, unreachable_pub)] // a C function, found by name

use libc::{c_int, c_ulong, c_void};

const KVM_GET_NESTED_STATE: u32 = 0xc080_aebe;
const KVM_SET_NESTED_STATE: u32 = 0x4080_aebf;

/// # Safety
/// ioctl's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's call.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) };
    #[allow(clippy::cast_possible_truncation)] // the kernel takes 32 bits
    let number = request as u32;
    match number {
        KVM_GET_NESTED_STATE | KVM_SET_NESTED_STATE if result < 0 => 0,
        _ => c_int::try_from(result).unwrap_or(-1),
    }
}
