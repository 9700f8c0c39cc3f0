//! Leaving no trace in caches, and reading memory of others.
#![allow(unsafe_code)] // reads memory that is named by its address

use crate::sys::page_size::PAGE_SIZE;
use vmm_dedup_protocol::raw;

const LINE: usize = 64;

/// Throws the lines of a page of this process out of all caches. What is mapped at an address must be readable.
pub(crate) fn flush_page(address: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (address..address + PAGE_SIZE).step_by(LINE) {
        // SAFETY: the callers' pages are mapped; the instruction changes no content.
        unsafe { std::arch::x86_64::_mm_clflush(line as *const u8) };
    }
    #[cfg(not(target_arch = "x86_64"))] // no service starts there
    let _ = (address, LINE);
}

/// Has the kernel map a page of this process.
pub(crate) fn touch(address: usize) {
    // SAFETY: the callers' pages are readable.
    std::hint::black_box(unsafe { std::ptr::read_volatile(address as *const u8) });
}

/// Whether two pages that nobody writes have the same bytes.
pub(crate) fn are_equal(a: usize, b: usize) -> bool {
    let copy = |from: usize| {
        let mut words = [0u64; PAGE_SIZE / 8];
        // SAFETY: a page of the callers', which is readable, and a buffer of its size.
        unsafe { raw::copy_page(from, words.as_mut_ptr() as usize) };
        flush_page(from);
        words
    };
    copy(a) == copy(b)
}
