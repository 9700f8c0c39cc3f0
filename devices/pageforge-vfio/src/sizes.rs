//! How large the device's tables and numbers are.

/// Entries for pages that the candidate is compared with.
pub const OTHER_PAGES: usize = 31;

/// Bits of a page number: addresses have 52.
pub const PPN_BITS: u32 = 40;

/// 64-byte lines in one KiB.
pub const LINES_PER_SECTION: u8 = 16;
