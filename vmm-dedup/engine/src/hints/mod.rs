//! What the guest's agent tells: a thread that listens ([`listen`]), and what it has heard ([`line`]), of which the
//! scanning thread takes over a part after the other ([`heard`]), and the use of memory when it is asked ([`agent_use`]).
//!
//! For guests without an agent, the VMM may say what it has read into guest memory ([`reads`]).
//!
//! # Trust
//!
//! The guest is hostile. What comes from it goes through the receiver's crate alone, which bounds memory by the size of the guest
//! and time by a credit. What it says changes which pages are looked at, and when: no page is merged or published by its word,
//! and what it says is about its own pages only.
//!
//! [`agent_use`]: mod@crate::hints::agent_use
//! [`heard`]: mod@crate::hints::heard
//! [`line`]: mod@crate::hints::line
//! [`listen`]: mod@crate::hints::listen
//! [`reads`]: mod@crate::hints::reads

#[cfg(feature = "agent")]
pub(crate) mod agent_use;
#[cfg(feature = "agent")]
pub(crate) mod heard;
#[cfg(feature = "agent")]
pub(crate) mod line;
#[cfg(feature = "agent")]
pub(crate) mod listen;
#[cfg(not(feature = "agent"))]
mod nobody;
pub(crate) mod reads;
#[cfg(not(feature = "agent"))]
pub(crate) use nobody::{agent_use, heard, line, listen};
