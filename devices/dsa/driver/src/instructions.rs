//! The instructions that DSA is driven by, and whether this CPU has them (Intel SDM, volume 2; `CPUID` leaf 7).
//!
//! They are written as bytes, since the compiler would want the whole program to be built for such a CPU.
#![allow(unsafe_code)] // instructions

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

/// What this CPU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// MOVDIR64B: 64 bytes are written at once, for dedicated queues.
    pub movdir64b: bool,
    /// ENQCMD: the same, and the device answers, for shared queues.
    pub enqcmd: bool,
    /// UMONITOR, UMWAIT: wait for a line to be written.
    pub waitpkg: bool,
}

impl Instructions {
    /// Those of this CPU.
    #[must_use]
    pub fn of_this_cpu() -> Self {
        static OURS: OnceLock<Instructions> = OnceLock::new();
        *OURS.get_or_init(Self::detect)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Self {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const LEAF: u32 = 7;
        #[allow(unused_unsafe)] // CPUID is safe to call since Rust 1.94
        // SAFETY: every x86-64 CPU has CPUID.
        let (most, features) = unsafe { (__cpuid(0).eax, __cpuid_count(LEAF, 0).ecx) };
        let has = |bit: u32| most >= LEAF && features >> bit & 1 != 0;
        Self {
            movdir64b: has(28),
            enqcmd: has(29),
            waitpkg: has(5),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Self {
        Self::default()
    }
}

/// Writes 64 bytes to a portal at once.
///
/// # Safety
/// The CPU must have MOVDIR64B. `portal` must be aligned to 64 bytes, in a mapping of a portal, and `from` to 16.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn movdir64b(portal: *mut u8, from: &vmm_dedup_dsa_abi::Descriptor) {
    // SAFETY: movdir64b rax, [rdx]: reads 64 bytes at rdx, which `from` has, and writes them to rax, as promised by the
    // caller. The fence before it makes what the descriptor names visible to the device first: the instruction is not
    // ordered behind stores.
    unsafe {
        std::arch::asm!(
            "sfence",
            ".byte 0x66, 0x0f, 0x38, 0xf8, 0x02",
            in("rax") portal,
            in("rdx") std::ptr::from_ref(from),
            options(nostack, preserves_flags)
        );
    }
}

/// Writes 64 bytes to a portal at once, and tells whether the queue has taken them.
///
/// # Safety
/// As for [`movdir64b`], of ENQCMD; and the process must have a PASID, which Linux gives it when it opens the queue.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn enqcmd(portal: *mut u8, from: &vmm_dedup_dsa_abi::Descriptor) -> bool {
    let retry: u8;
    // SAFETY: enqcmd rax, [rdx], as above; ZF is set if the queue did not take it.
    unsafe {
        std::arch::asm!(
            "sfence",
            ".byte 0xf2, 0x0f, 0x38, 0xf8, 0x02",
            "setz {retry}",
            retry = out(reg_byte) retry,
            in("rax") portal,
            in("rdx") std::ptr::from_ref(from),
            options(nostack)
        );
    }
    retry == 0
}

/// Has the CPU bring a page's first line into its caches. Nothing waits for that.
pub(crate) fn fetch(page: &[AtomicU64]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has the instruction, which is a hint: it neither reads nor faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(page.as_ptr().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = page;
}

/// Waits until the line of a word may have been written, or for some hundred nanoseconds to microseconds.
pub(crate) fn wait_for_line(word: &AtomicU64, is_written: impl Fn() -> bool) {
    #[cfg(target_arch = "x86_64")]
    if Instructions::of_this_cpu().waitpkg {
        const CYCLES: u64 = 20_000;
        // SAFETY: the CPU has the instructions. umonitor rax: watches the line of a word that lives. umwait ecx: with 0 in
        // ecx it may sleep as deeply as the kernel allows, until the line is written or the time stamp in edx:eax comes.
        // The line is looked at in between, so that a write before the umonitor is not slept through.
        unsafe {
            std::arch::asm!(
                ".byte 0xf3, 0x0f, 0xae, 0xf0",
                in("rax") std::ptr::from_ref(word),
                options(nostack, preserves_flags)
            );
            if !is_written() {
                let until = std::arch::x86_64::_rdtsc().wrapping_add(CYCLES);
                std::arch::asm!(
                    ".byte 0xf2, 0x0f, 0xae, 0xf1",
                    in("ecx") 0u32,
                    in("eax") (until & 0xffff_ffff) as u32,
                    in("edx") (until >> 32) as u32,
                    options(nostack)
                );
            }
        }
        return;
    }
    let _ = (word, is_written);
    std::hint::spin_loop();
}
