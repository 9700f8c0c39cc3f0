//! Why bytes are refused.

use crate::limits::MOST_PAYLOAD;

/// Why bytes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// There is less than was announced.
    #[error("the message ends early")]
    Short,
    /// There is more than was announced.
    #[error("there are bytes behind the end of the message")]
    Trailing,
    /// A payload beyond [`MOST_PAYLOAD`].
    #[error("a payload of {0} bytes, where {most} are allowed", most = MOST_PAYLOAD)]
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
