//! Limits that the device sets.

/// Longest delta: source sizes up to 512 KiB in 8-byte words have 16-bit indices (DML, validation.cpp).
pub const MAX_DELTA_SOURCE: u32 = 512 << 10;

/// Bytes of one entry of a delta record: a 16-bit index of an 8-byte word, and its new value.
pub const DELTA_ENTRY: u32 = 10;

/// Least space for a delta record, bytes (DML, validation.cpp).
pub const MIN_DELTA_SPACE: u32 = 80;

/// Fewest members of a batch.
pub const MIN_BATCH: u32 = 2;
