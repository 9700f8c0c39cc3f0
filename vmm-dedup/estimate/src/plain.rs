//! Reading and nothing else: what the speed of an estimate is held against.

use crate::error::Error;
use crate::memory::Memory;
use crate::scan::{Reading, scan};

/// Reads all memories in the way that [`crate::estimate`] reads them, and adds up their words so that every byte
/// reaches a register. Returns the sum.
///
/// # Errors
/// As [`crate::estimate`].
pub fn read_plainly(memories: &[Memory], reading: &Reading<'_>) -> Result<u64, Error> {
    let sums = scan(
        memories,
        reading,
        || 0u64,
        |sum, _, page| {
            for word in page.chunks_exact(8) {
                *sum = sum.wrapping_add(word.try_into().map_or(0, u64::from_ne_bytes));
            }
        },
    )?;
    Ok(sums.into_iter().fold(0, u64::wrapping_add))
}
