//! A page and its lines.

use vmm_dedup_protocol::PAGE_SIZE;

/// The bytes of a page that nobody writes meanwhile: taken from its guest, or copied.
pub type Page = [u8; PAGE_SIZE];

/// Bytes of a line: a cache line, the paper's unit of overlays.
pub const LINE_BYTES: usize = 64;
/// Lines of a page, and bits of an overlay's bit vector.
pub const LINES: usize = PAGE_SIZE / LINE_BYTES;
const _: () = assert!(LINES == u64::BITS as usize);

/// The page of zeros, a base that costs nothing.
pub static ZERO_PAGE: Page = [0; PAGE_SIZE];

/// The lines in which two pages differ: bit `i` for line `i`, as in the paper's OBitVector.
#[must_use]
#[inline]
pub fn differing_lines(a: &Page, b: &Page) -> u64 {
    let lines = a.chunks_exact(LINE_BYTES).zip(b.chunks_exact(LINE_BYTES));
    lines.enumerate().fold(0, |vector, (i, (a, b))| {
        let differing = a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b));
        vector | u64::from(differing != 0) << i
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_that_differs_has_its_bit() {
        let mut page = ZERO_PAGE;
        assert_eq!(differing_lines(&page, &ZERO_PAGE), 0);
        page[0] = 1;
        page[63] = 1;
        page[64 * 9 + 5] = 1;
        page[4095] = 0x80;
        assert_eq!(differing_lines(&page, &ZERO_PAGE), 1 | 1 << 9 | 1 << 63);
    }
}
