//! Numbers by chance, the same in every run: for the experiments' inputs and for tests.

/// A generator (SplitMix64: Steele, Lea, Flood, OOPSLA'14).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// A generator; the same seed gives the same numbers.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.any() % end
    }
}
