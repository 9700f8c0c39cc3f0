//! PageCmp: comparing pages inside the memory's chips (Raoufi, Deng, Zhang, Yang, "PageCmp: Bandwidth Efficient Page
//! Deduplication through In-memory Page Comparison").
//!
//! A page lies across eight chips, 64 bits of each 64-byte line in each. The cell arrays compute `P xor Q`; a
//! comparator in each chip ([`chip`]) looks through its 64 words for the first that is not zero and sends 8 bits: `f1`,
//! `f2`, `ind`. The memory controller ([`controller`]) makes one result of the eight. So a comparison moves 8 bytes,
//! whatever the pages hold. *Hybrid* compares the first line on the CPU and asks the chips only if it is equal.
//!
//! # The reading that gives memcmp's order
//!
//! The paper's sections III.B and III.D contradict each other. B: `f1` is 1 when a chip's words are equal, and `ind` is
//! the round, counted up from 0. D: the pages are equal if all `f1` are *zero*; else the chip with the *highest* `ind`
//! decides. Read together they are wrong: equal pages would be told apart, and a later line would outvote an earlier
//! one. The reading used here, which a property test compares with the order of the pages' bytes:
//!
//! - `f1` and `ind` are those of B. The pages are equal if all `f1` are **one**.
//! - Otherwise, among the chips whose `f1` is zero the **lowest** `ind` decides, as the earliest line does in memcmp.
//!   (D's "highest" would fit a counter that counts down, as the index of the leftmost one in figure 2 does.)
//! - Several chips with that `ind` differ in the same line; the **lowest chip** holds its earliest bytes. The paper does
//!   not say; no field of the summary but the chip's number can tell.
//! - The "leftmost" bit of a word is the most significant bit of its **first byte in memory**. On a little-endian
//!   machine that is not the top bit of the word that the CPU loads: the chips must take bytes in address order.

mod chip;
mod controller;
mod cost;
mod engine;
mod page;

pub use chip::{Summary, summarize};
pub use controller::{aggregate, compare, compare_hybrid};
pub use cost::{Account, COPY_SHARE, Costs, MEMCMP_LINE_NJ};
pub use engine::PageCmpEngine;
pub use page::{CHIPS, PAGE_WORDS, Page, ROUNDS};
