//! How long messages may be.

/// Most bytes of a payload.
pub const MOST_PAYLOAD: usize = 16 << 10;
