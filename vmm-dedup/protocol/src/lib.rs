//! The contract between the dedup service in a VMM and the page store of its host.
//!
//! Two actors share this crate: the *service* (one in every VMM, see `vmm-dedup`) and the *store* (one per
//! host and trust domain, see `vmm-dedup-store`). They meet in three places:
//!
//! - [`message`]: small, length-checked messages on a `SOCK_SEQPACKET` socket ([`socket`]), among them the questions
//!   of observers ([`control`]) and the announcements of VMs that are [refused](`refusal`);
//! - [`index`]: a table in shared memory, written by the store alone and read by every service without any
//!   message, that tells which key has which slot;
//! - *segments*: sealed memfds that hold the shared pages themselves, and tell where a page has moved ([`forward`]). A
//!   [`Slot`] names a page in one of them.
//!
//! A page is named by a [`key::Key`]: first by four of its 64 lines (cheap, not unique), and where those
//! collide by its whole content (128 bits, see [`key::PageHash`]).
//!
//! Nothing here trusts a peer: what arrives is parsed as hostile, and a key only ever *suggests* that two pages
//! are equal. Whoever maps a slot compares the bytes first.

pub mod control;
pub mod forward;
pub mod index;
pub mod key;
pub mod mapping;
pub mod message;
pub mod name;
pub mod observer;
pub mod raw;
pub mod refusal;
mod slot;
pub mod socket;
pub mod stats;
mod sync;
pub mod tree;

pub use slot::Slot;

/// Bytes of a small page, the unit of sharing.
pub const PAGE_SIZE: usize = 4096;

/// Slots in one segment: 4,096 pages = 16 MiB.
pub const SLOTS_PER_SEGMENT: u32 = 1 << 12;

/// Bytes of the pages of one segment.
pub const SEGMENT_BYTES: usize = SLOTS_PER_SEGMENT as usize * PAGE_SIZE;

/// Bytes of one segment's file: the slots' pages, and behind them a word for each that tells where its page has moved
/// ([`forward`]).
pub const SEGMENT_FILE_BYTES: usize = SEGMENT_BYTES + SLOTS_PER_SEGMENT as usize * 8;

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
