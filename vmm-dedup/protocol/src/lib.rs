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

pub mod clock;
pub mod control;
pub mod forward;
pub mod index;
pub mod key;
mod malformed;
pub mod mapping;
pub mod message;
pub mod name;
pub mod observer;
pub mod peer;
pub mod raw;
pub mod refusal;
mod sizes;
mod slot;
pub mod socket;
pub mod stats;
mod sync;
pub mod tree;

pub use sizes::{
    HUGE_PAGES, MAX_SLOTS, NEWS_RING, PAGE_SIZE, SEGMENT_BYTES, SEGMENT_FILE_BYTES, SEGMENT_NAME, SERIES,
    SLOTS_PER_SEGMENT, STAGING_PAGES,
};
pub use slot::Slot;
