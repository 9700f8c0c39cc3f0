//! Sizes that services and stores agree on.

/// Bytes of a small page, the unit of sharing.
pub const PAGE_SIZE: usize = 4096;

/// Slots in one segment: 4,096 pages = 16 MiB.
pub const SLOTS_PER_SEGMENT: u32 = 1 << 12;

/// Bytes of the pages of one segment.
pub const SEGMENT_BYTES: usize = SLOTS_PER_SEGMENT as usize * PAGE_SIZE;

/// Bytes of one segment's file: the slots' pages, and behind them a word for each that tells where its page has moved
/// ([`crate::forward`]).
pub const SEGMENT_FILE_BYTES: usize = SEGMENT_BYTES + SLOTS_PER_SEGMENT as usize * 8;

/// What a segment's file is called, as /proc/PID/maps shows it.
pub const SEGMENT_NAME: &str = "vmm-dedup-segment";

/// Highest number of slots of a store: 2^26 slots = 256 GiB of distinct shared content.
pub const MAX_SLOTS: u32 = 1 << 26;

/// Slots of a series: consecutive ones that hold the same page, so that neighbours with this content in a guest can be
/// one mapping. For content that fills long stretches, such as memory that a kernel has poisoned. A stretch of `n` pages
/// then needs `n / SERIES` mappings of some 265 bytes instead of `n`, for `SERIES - 1` pages more in the store.
pub const SERIES: u32 = 32;

/// Keys that the ring of news in the index holds.
pub const NEWS_RING: usize = 1 << 16;

/// 64-bit words of the index file's header: a page.
pub(crate) const INDEX_HEADER_WORDS: usize = PAGE_SIZE / 8;

/// Small pages in a huge page of 2 MiB.
pub const HUGE_PAGES: usize = 512;

/// Pages of the staging buffer through which a service hands pages to the store: a huge page can go as one.
pub const STAGING_PAGES: usize = HUGE_PAGES;
