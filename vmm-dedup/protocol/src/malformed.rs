//! How a record can be wrong.

/// Version of everything in this crate. Peers of another version are refused.
pub const VERSION: u16 = 15;

/// A record that breaks the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Too short, too long, or its length field lies.
    #[error("a message of {got} bytes, which does not fit its kind and counts")]
    Length {
        /// Bytes received.
        got: usize,
    },
    /// Not our protocol at all.
    #[error("the peer does not speak this protocol (magic {0:#x}): is the socket that of a vmm-dedup store?")]
    Magic(u32),
    /// Another release.
    #[error(
        "the peer speaks protocol version {0}, this side version {VERSION}: use one release on both sides"
    )]
    Version(u16),
    /// Unknown kind.
    #[error("unknown message kind {0}")]
    Kind(u16),
    /// A field outside its range.
    #[error("{field} is {value}, out of range")]
    Value {
        /// Which field.
        field: &'static str,
        /// What it was.
        value: u64,
    },
}
