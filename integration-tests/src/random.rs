//! Numbers that are random enough (Knuth's MMIX constants), and the same in every run.

/// 31 bits at a time, from a seed on.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    #[allow(clippy::should_implement_trait)] // it never ends
    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}
