//! What the guest agent and the dedup service of its VM agree on.
//!
//! - [`frame`]: guest frames, stretches of them, blocks of 512;
//! - [`said`]: what is said of a frame, in a byte;
//! - [`block`]: what is said of a block, coded in at most [`block::MOST_BYTES`];
//! - [`message`]: messages, and the bytes of each;
//! - [`stream`]: messages out of a stream of bytes.
//!
//! # Trust
//!
//! Every decoder here takes hostile bytes. It refuses what the encoder would not have written, so that each value has one
//! form; it allocates nothing that grows with a number in the bytes.
//!
//! # Compatibility
//!
//! `Hello` and `Refuse` have the same layout in every version, and both sides ignore bytes behind what they know of `Hello`.
//! All else is as in the version that `Welcome` names.

mod bits;
pub mod block;
mod fields;
pub mod frame;
mod limits;
mod lists;
mod malformed;
pub mod message;
pub mod said;
pub mod stream;

pub use malformed::Malformed;
pub use message::VERSION;

/// The port that agents connect to by default; behind vhost-vsock the guest's CID is added to it.
pub const PORT: u32 = 9755;
