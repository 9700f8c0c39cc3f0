//! Pins that end by themselves: with what holds them, or when nobody sees them any more.

use crate::supervisor::lifecycle::{Event, RETRY};
use crate::supervisor::shared::{Letter, Shared, Still};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Guest memory is pinned for as long as this lives, which may be longer than the VM
/// ([`Supervisor::pinned`](crate::supervisor::Supervisor::pinned)).
#[derive(Debug)]
#[must_use = "the pin ends where this is dropped"]
pub struct Pinned(pub(super) Arc<Shared>);

impl Drop for Pinned {
    fn drop(&mut self) {
        // A supervisor that has ended merges nothing any more.
        let _ = self.0.letters.post(Letter::Event(Event::Unpin));
    }
}

/// Pins of which nobody will tell the end, each with the time of the next look.
#[derive(Default)]
pub(super) struct Watched(Vec<(Still, Instant)>);

impl Watched {
    pub(super) fn add(&mut self, still: Still, now: Instant) {
        self.0.push((still, now + RETRY));
    }

    /// When the next one is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.iter().map(|(_, due)| *due).min()
    }

    /// Looks at those that are due, and forgets those that have ended; how many have.
    pub(super) fn end(&mut self, now: Instant) -> usize {
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
