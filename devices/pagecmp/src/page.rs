//! A page, and how it lies across a rank's chips.

/// 64-bit words of a page.
pub const PAGE_WORDS: usize = 512;
/// Chips of a rank, and so words of a 64-byte line.
pub const CHIPS: usize = 8;
/// Words of a page in one chip: one of each line.
pub const ROUNDS: usize = PAGE_WORDS / CHIPS;

/// A page's words in memory order, each as the CPU loads it.
pub type Page = [u64; PAGE_WORDS];
