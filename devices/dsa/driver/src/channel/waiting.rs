//! Waiting for what is in flight.

use super::{Channel, SHORTEST_NAP};
use std::time::{Duration, Instant};

/// Shorter times are not slept.
const SHORTEST_SLEEP: Duration = Duration::from_micros(120);
/// So much earlier a sleep ends: the kernel wakes late.
const WAKE: Duration = Duration::from_micros(60);

impl Channel {
    /// Whether something has ended that [`Self::poll`] would tell of.
    pub(crate) fn has_ended(&self) -> bool {
        self.slots.busy().iter().any(|at| self.slots.has_ended(*at))
    }

    /// When a slot is likely to have ended. A model's work on this thread delays its device.
    fn due(&self, at: usize) -> Instant {
        let slot = self.slots.at(at);
        slot.due + Duration::from_nanos(self.queue.borrowed_cpu_ns() - slot.borrowed_ns)
    }

    /// Whoever waits has done something else for a while: nobody knows when what has ended by now did.
    pub(crate) fn was_away(&mut self) {
        if let Some(at) = self.slots.busy().back().copied() {
            // The first moment at which a model can work.
            self.queue.relax(self.slots.awaited_status(at));
        }
        self.overslept = self.has_ended();
    }

    /// Waits for something to end, at most so long.
    pub(crate) fn wait(&mut self, most: Duration) {
        let Some(at) = self.slots.busy().front().copied() else {
            return;
        };
        let start = Instant::now();
        loop {
            let (now, due) = (Instant::now(), self.due(at));
            let left = most.saturating_sub(now - start);
            if left.is_zero() || self.slots.has_ended(at) {
                return;
            }
            let until = due.saturating_duration_since(now).min(left);
            if until > SHORTEST_SLEEP {
                self.queue.nap(until - WAKE);
                self.overslept = self.slots.has_ended(at);
            } else {
                self.queue.relax(self.slots.awaited_status(at));
            }
        }
    }

    /// Waits for all that is in flight, for about so long at most: for callers that can be late, and spare the CPU. It
    /// sleeps until the last one is likely to have ended, and when that takes longer again and again.
    pub(crate) fn wait_for_all(&mut self, most: Duration) {
        let Some(at) = self.slots.busy().back().copied() else {
            return;
        };
        let start = Instant::now();
        loop {
            let (now, due) = (Instant::now(), self.due(at));
            if now - start >= most || self.slots.has_ended(at) {
                return;
            }
            let early = due.saturating_duration_since(now).min(most);
            let overdue = now.saturating_duration_since(due) > SHORTEST_NAP;
            if early > SHORTEST_NAP || overdue {
                self.queue.nap(early.max(SHORTEST_NAP));
                // The first moment at which a model can work.
                self.queue.relax(self.slots.awaited_status(at));
                self.overslept = self.slots.has_ended(at);
            } else {
                self.queue.relax(self.slots.awaited_status(at));
            }
        }
    }
}
