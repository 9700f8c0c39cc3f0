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

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::sys::vma::Anonymous;

    /// Cycles that it takes to read a page, a line after the other.
    fn cycles(address: usize) -> u64 {
        // SAFETY: they change nothing.
        let now = || unsafe {
            std::arch::x86_64::_mm_mfence();
            std::arch::x86_64::_rdtsc()
        };
        let begin = now();
        // Each read waits for the one before it.
        // SAFETY: the test's page, which is zeros.
        let read = |at: usize| unsafe { std::ptr::read_volatile(at as *const u8) };
        let end = (0..PAGE_SIZE / LINE).fold(0usize, |sum, n| {
            sum | usize::from(read(address + (n * 37 % 64) * LINE + sum))
        });
        std::hint::black_box(end);
        now() - begin
    }

    #[test]
    fn what_was_flushed_has_to_be_fetched_again() {
        let area = Anonymous::new(1).unwrap();
        area.populate().unwrap();
        let page = area.base();
        let median = |prepare: fn(usize)| {
            let mut times: Vec<u64> = (0..101)
                .map(|_| {
                    cycles(page);
                    prepare(page);
                    cycles(page)
                })
                .collect();
            times.sort_unstable();
            times[50]
        };
        let (cached, flushed) = (median(|_| ()), median(flush_page));
        assert!(
            flushed > 2 * cached,
            "{flushed} cycles after it, {cached} without"
        );
    }
}
