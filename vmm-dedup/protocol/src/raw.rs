//! Copying pages that somebody may be writing.
#![allow(unsafe_code)] // raw pointers, and an instruction for what the compiler must not look into

use crate::sizes::PAGE_SIZE;

/// Copies a page; the copy is torn if somebody writes `from` meanwhile.
///
/// # Safety
/// A page must be readable at `from` and writable at `to`, and nobody may hold a reference into what is written.
pub unsafe fn copy_page(from: usize, to: usize) {
    // To the compiler the instruction is opaque, so a concurrent writer tears the copy and does nothing else.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") PAGE_SIZE => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for offset in (0..PAGE_SIZE).step_by(8) {
        // SAFETY: as promised by the caller.
        unsafe {
            ((to + offset) as *mut u64).write_volatile(((from + offset) as *const u64).read_volatile())
        };
    }
}
