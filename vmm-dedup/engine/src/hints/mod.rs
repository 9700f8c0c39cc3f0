//! What the guest's agent tells: a thread that listens ([`listen`]), and what it has heard, for the scanning thread ([`line`]).
//!
//! # Trust
//!
//! The guest is hostile. What comes from it goes through the receiver's crate alone, which bounds memory by the size of the guest
//! and time by a credit. What it says changes which pages are looked at, and when: no page is merged or published by its word,
//! and what it says is about its own pages only.
//!
//! [`line`]: mod@crate::hints::line
//! [`listen`]: mod@crate::hints::listen

pub(crate) mod line;
mod listen;
