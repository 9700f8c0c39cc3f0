//! Pages for tests, the same for the same seed.

use crate::page::{LINE_BYTES, LINES, Page};
use vmm_dedup_protocol::PAGE_SIZE;

/// A stream of numbers (Steele et al.'s SplitMix64, OOPSLA'14).
fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// A page that cannot be compressed.
#[must_use]
pub fn random(seed: u64) -> Page {
    let mut next = numbers(seed);
    let mut page = [0; PAGE_SIZE];
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&next().to_le_bytes());
    }
    page
}

/// A page of words from a small vocabulary, which compressors halve or better.
#[must_use]
pub fn text(seed: u64) -> Page {
    const WORDS: [&[u8]; 12] = [
        b"the ", b"page ", b"of ", b"memory ", b"struct ", b"return ", b"0x", b"ffff", b"\n\t", b"if (",
        b") {\n", b"kernel_",
    ];
    let mut next = numbers(seed);
    let mut bytes = Vec::new();
    while bytes.len() < PAGE_SIZE {
        let number = next();
        bytes.extend_from_slice(WORDS[number.to_le_bytes()[0] as usize % WORDS.len()]);
        // Now and then an address, as kernel text and heaps have them.
        if number >> 61 == 0 {
            bytes.extend_from_slice(&number.to_le_bytes()[..6]);
        }
    }
    std::array::from_fn(|i| bytes[i])
}

/// A copy of a page of which `lines` lines, spread over it, are random.
#[must_use]
pub fn near_copy(page: &Page, lines: usize, seed: u64) -> Page {
    let (mut copy, other) = (*page, random(seed));
    for n in 0..lines.min(LINES) {
        // 27 has no divisor in common with 64, so that no line comes twice.
        let at = n * 27 % LINES * LINE_BYTES;
        copy[at..][..LINE_BYTES].copy_from_slice(&other[at..][..LINE_BYTES]);
    }
    copy
}
