//! How many touches of pages that lie in slots are borne: each keeps somebody waiting.

use std::time::Instant;

/// A leaky bucket. What is in it goes by how often the guest touches its own pages, and by nothing else.
#[derive(Debug)]
pub(super) struct Touches {
    /// In a second, from which on no further pages take part; as many are forgotten each second.
    most: f64,
    level: f64,
    at: Instant,
}

impl Touches {
    #[allow(clippy::cast_precision_loss)] // a million at most
    pub(super) fn new(per_second: u64) -> Self {
        Self {
            most: per_second as f64,
            level: 0.0,
            at: Instant::now(),
        }
    }

    /// So many pages came back, since the last call, because they were touched.
    pub(super) fn note(&mut self, touches: usize) {
        self.note_at(Instant::now(), touches);
    }

    #[allow(clippy::cast_precision_loss)] // pages of a guest
    fn note_at(&mut self, now: Instant, touches: usize) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.level = (self.level - passed * self.most).max(0.0) + touches as f64;
    }

    /// Whether no further pages are to take part for now.
    pub(super) fn are_too_many(&self) -> bool {
        self.level > self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn whoever_touches_much_is_left_alone_until_as_much_time_has_passed() {
        let mut touches = Touches::new(1000);
        let start = touches.at;
        let mut at = |ms, pages| {
            touches.note_at(start + Duration::from_millis(ms), pages);
            touches.are_too_many()
        };
        assert!(!at(0, 1000));
        assert!(at(0, 4000));
        assert!(at(3900, 0));
        assert!(!at(4100, 0));
    }
}
