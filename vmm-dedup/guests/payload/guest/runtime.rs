//! What the compiler expects to be there without a libc.

use core::arch::asm;

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
             options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= count {
        // SAFETY: copying forwards is right when the destination does not begin inside the source.
        return unsafe { memcpy(to, from, count) };
    }
    // SAFETY: the caller vouches for both ranges; backwards, as they overlap.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") count => _,
             inout("rdi") to.wrapping_add(count).wrapping_sub(1) => _,
             inout("rsi") from.wrapping_add(count).wrapping_sub(1) => _, options(nostack));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the range; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") value as u8,
             options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    for i in 0..count {
        // SAFETY: the caller vouches for both ranges; volatile, or the loop would become a call to memcmp.
        let (x, y) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(a, b, count) }
}

/// The precompiled core library refers to it; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// See [`rust_eh_personality`].
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    crate::machine::power_off()
}
