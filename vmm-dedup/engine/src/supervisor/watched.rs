//! Pins of which nobody tells the end: whoever may know is asked.

use crate::supervisor::lifecycle::RETRY;
use std::fmt;
use std::time::Instant;

/// Says whether memory may be pinned still.
pub(crate) type Still = Box<dyn FnMut() -> bool + Send>;

/// Pins of which nobody will tell the end, each with the time of the next look.
#[derive(Default)]
pub(crate) struct Watched(Vec<(Still, Instant)>);

impl Watched {
    pub(crate) fn add(&mut self, still: Still, now: Instant) {
        self.0.push((still, now + RETRY));
    }

    /// When the next one is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.0.iter().map(|(_, due)| *due).min()
    }

    /// Looks at those that are due, and forgets those that have ended; how many have.
    pub(crate) fn end(&mut self, now: Instant) -> usize {
        let before = self.0.len();
        self.0.retain_mut(|(still, due)| {
            if *due > now {
                return true;
            }
            *due = now + RETRY;
            still()
        });
        before - self.0.len()
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.0.len()).finish()
    }
}
