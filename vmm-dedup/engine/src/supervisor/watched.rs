//! Pins of which nobody tells the end: whoever may know is asked.

use crate::supervisor::lifecycle::RETRY;
use crate::supervisor::theirs;
use std::fmt;
use std::time::Instant;

/// Says whether memory may be pinned still.
pub(crate) type Still = Box<dyn FnMut() -> bool + Send>;

/// Pins of which nobody will tell the end, each with the time of the next look. Of one whose closure has panicked nobody can say that it has
/// ended: it lasts, and is not looked for any more.
#[derive(Default)]
pub(crate) struct Watched(Vec<(Option<Still>, Instant)>);

impl Watched {
    pub(crate) fn add(&mut self, still: Still, now: Instant) {
        self.0.push((Some(still), now + RETRY));
    }

    /// When the next one is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.0
            .iter()
            .filter(|(still, _)| still.is_some())
            .map(|(_, due)| *due)
            .min()
    }

    /// Looks at those that are due, and forgets those that have ended; how many have.
    pub(crate) fn end(&mut self, now: Instant) -> usize {
        let before = self.0.len();
        self.0.retain_mut(|(still, due)| {
            if *due > now {
                return true;
            }
            *due = now + RETRY;
            let lasts = still.as_mut().and_then(theirs::run);
            if lasts != Some(true) {
                // It may also panic where it is dropped.
                let _ = theirs::run(|| *still = None);
            }
            lasts != Some(false)
        });
        before - self.0.len()
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.0.len()).finish()
    }
}
