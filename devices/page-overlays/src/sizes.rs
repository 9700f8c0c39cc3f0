//! Sizes that the whole model shares.

/// Bytes of a cache line.
pub const LINE_BYTES: usize = 64;
/// Lines of a page.
pub const LINES: usize = 64;
/// Bytes of a page.
pub const PAGE_BYTES: usize = LINE_BYTES * LINES;

/// The bytes of a cache line.
pub type LineBytes = [u8; LINE_BYTES];

const _: () = assert!(PAGE_BYTES == 4096 && LINES == u64::BITS as usize);

/// A number that counts something in memory, as an index.
pub(crate) fn index(number: u64) -> usize {
    usize::try_from(number).expect("usize has 64 bits")
}

/// A size or an index as a number.
pub(crate) fn number(index: usize) -> u64 {
    u64::try_from(index).expect("usize has at most 64 bits")
}
