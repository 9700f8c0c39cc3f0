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
pub mod frame;
pub mod message;
pub mod said;
pub mod stream;

/// The version of the messages.
pub const VERSION: u8 = 1;
/// The port that agents connect to by default; behind vhost-vsock the guest's CID is added to it.
pub const PORT: u32 = 9755;

/// Why bytes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// There is less than was announced.
    #[error("the message ends early")]
    Short,
    /// There is more than was announced.
    #[error("there are bytes behind the end of the message")]
    Trailing,
    /// A payload beyond [`message::MOST_PAYLOAD`].
    #[error("a payload of {0} bytes, where {most} are allowed", most = message::MOST_PAYLOAD)]
    Long(usize),
    /// Another version.
    #[error("a message of version {0}, where another was agreed on")]
    Version(u8),
    /// No such kind of message.
    #[error("there is no message {0}")]
    Message(u8),
    /// A field has a value that nobody sends.
    #[error("field \"{field}\" cannot be {value:#x}")]
    Field {
        /// Its name.
        field: &'static str,
        /// What it held.
        value: u64,
    },
    /// Frames beyond 52 bits of address, or none.
    #[error(
        "{count} frames from {first:#x} on: there must be at least one, and none beyond 52 bits of address"
    )]
    Frames {
        /// First frame number.
        first: u64,
        /// How many.
        count: u64,
    },
    /// A block that is not in its one form.
    #[error("a block is coded as no encoder does it")]
    Block,
}
