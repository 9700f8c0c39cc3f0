//! Reading memory that a guest may be writing: volatile word loads, never a Rust reference.
#![allow(unsafe_code)] // raw pointers into guest memory

#[cfg(target_arch = "x86_64")]
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{KEY_WORDS, PAGE_WORDS, PageWords, line_offsets, line_words};
use vmm_dedup_protocol::raw;

/// Reads the four key lines of the page at `address`.
///
/// # Safety
/// A whole page must be mapped readable at `address`, page-aligned.
pub(crate) unsafe fn key_lines(address: usize) -> [u64; KEY_WORDS] {
    let page = address as *const u64;
    // SAFETY: offsets are below PAGE_WORDS, and the caller vouches for the page.
    line_words(|word| unsafe { page.add(word).read_volatile() })
}

/// Asks the CPU to fetch the key lines of a page that will be read soon.
pub(crate) fn prefetch_key_lines(address: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in line_offsets() {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch((address + offset) as *const i8, _MM_HINT_T0) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, line_offsets());
}

/// Asks the CPU to fetch a whole page that will be read soon.
pub(crate) fn prefetch_page(address: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..PAGE_SIZE).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch((address + offset) as *const i8, _MM_HINT_T0) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Reads a word of a page that will be read soon, so that it is there then.
///
/// # Safety
/// As for [`key_lines`].
pub(crate) unsafe fn touch(address: usize) {
    // SAFETY: as promised by the caller.
    unsafe { (address as *const u64).read_volatile() };
}

/// Copies a page out; torn if the guest writes it meanwhile.
///
/// # Safety
/// As for [`key_lines`].
pub(crate) unsafe fn copy_page(address: usize, out: &mut PageWords) {
    // SAFETY: the page is readable, as the caller vouches, and the buffer is a page long.
    unsafe { raw::copy_page(address, out.as_mut_ptr() as usize) };
}

/// Copies a page into memory of our own.
///
/// # Safety
/// `address` must be a writable page of our own that no Rust reference points into.
pub(crate) unsafe fn store_page(address: usize, page: &PageWords) {
    // SAFETY: as promised by the caller; the ranges cannot overlap, since `page` is a reference.
    unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), address as *mut u64, PAGE_WORDS) };
}

/// Compares a page that the guest may be writing with another one: a guess.
///
/// # Safety
/// As for [`key_lines`], for both.
pub(crate) unsafe fn seems_same_page(a: usize, b: usize) -> bool {
    let (a, b) = (a as *const u64, b as *const u64);
    // SAFETY: words of pages that the caller vouches for.
    (0..PAGE_WORDS).all(|word| unsafe { a.add(word).read_volatile() == b.add(word).read_volatile() })
}

/// Whether a page that nobody writes is all zeros.
///
/// # Safety
/// It must be mapped readable and not written by anyone during the call: a page that was taken.
pub(crate) unsafe fn is_zero_page(a: usize) -> bool {
    // SAFETY: as promised by the caller.
    let words = unsafe { std::slice::from_raw_parts(a as *const u64, PAGE_WORDS) };
    words
        .chunks_exact(8)
        .all(|line| line.iter().fold(0, |all, w| all | w) == 0)
}
