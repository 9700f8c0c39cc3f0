//! Numbers that look like chance and are the same in every run.

/// A number below `limit` that depends on `n`.
#[allow(clippy::cast_possible_truncation)] // below limit
pub(crate) fn pick(n: usize, limit: usize) -> usize {
    (mix(n) % limit as u64) as usize
}

/// SplitMix64.
pub(crate) fn mix(n: usize) -> u64 {
    let mut z = (n as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
