//! What a page holds, as pure functions: the original content of generated pages, and the marks that writes
//! leave. Everything can be computed again at any time, so a page can be checked word by word.

/// 64-bit words in a page.
pub const WORDS: usize = 512;

/// The words of one page.
pub type Page = [u64; WORDS];

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64: a bijection that spreads every bit.
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Fills `page` with the pseudo-random content number `index` of `seed`.
pub fn fill_random(page: &mut Page, seed: u64, index: u64) {
    let key = mix(seed.wrapping_mul(GOLDEN) ^ mix(index));
    let mut position = key;
    for word in page {
        position = position.wrapping_add(GOLDEN);
        *word = mix(position);
    }
}

/// A checksum of a page.
pub fn checksum(page: &Page) -> u64 {
    let mut lanes = [1u64, 2, 3, 4];
    for words in page.chunks_exact(lanes.len()) {
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = (lane.rotate_left(23) ^ word).wrapping_mul(GOLDEN);
        }
    }
    lanes.iter().fold(0, |sum, lane| mix(sum ^ lane))
}

/// Marks besides the counter that a write leaves in a page.
pub const MARKS: usize = 3;

/// Where the writes to page number `page` go: its counter, and the marks, each in a cache line of its own.
pub fn places(page: u64) -> (usize, [usize; MARKS]) {
    const STRIDE: usize = 131;
    let counter = (mix(page) % WORDS as u64) as usize;
    (
        counter,
        core::array::from_fn(|mark| (counter + STRIDE * (mark + 1)) % WORDS),
    )
}

/// The value of a mark after write number `writes` to page number `page`.
pub fn mark(seed: u64, page: u64, writes: u64, mark: usize) -> u64 {
    mix(seed ^ mix(page ^ (writes << 32)) ^ ((mark as u64) << 60))
}

/// Turns the original content of page number `page` into its content after write number `writes`.
pub fn apply_writes(content: &mut Page, seed: u64, page: u64, writes: u64) {
    let (counter, marks) = places(page);
    content[counter] = content[counter].wrapping_add(writes);
    for (number, place) in marks.into_iter().enumerate() {
        content[place] = mark(seed, page, writes, number);
    }
}

/// The guest's own random numbers (SplitMix64).
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Random(mix(seed))
    }

    /// A number below `bound`, which is not 0. Slightly uneven, which does not matter here.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        ((u128::from(mix(self.0)) * u128::from(bound)) >> 64) as u64
    }
}
