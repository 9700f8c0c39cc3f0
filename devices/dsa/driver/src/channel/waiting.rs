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
                self.nap(until - WAKE);
                self.overslept = self.slots.has_ended(at);
            } else {
                self.queue.relax(self.slots.awaited_status(at));
            }
        }
    }

    /// Waits for all that is in flight, for about so long at most: for callers that can be late, and spare the CPU. It
    /// sleeps until the last one is likely to have ended, and when that takes longer again and again.
    pub(crate) fn wait_for_all(&mut self, most: Duration) {
        if let Some(last) = self.slots.busy().back() {
            self.wait_for(*last, most);
        }
    }

    /// Waits until there is room for much, for about so long at most, as [`Self::wait_for_all`]: looking at the records of
    /// all for each that ends would take longer than the device does for one. It is half of what is in flight, so that the
    /// device goes on meanwhile; or nearly all, if that can be slept for.
    pub(crate) fn wait_for_room(&mut self, most: Duration) {
        let busy = self.slots.busy();
        // The last one of so many.
        let part = |eighths: usize| busy.get((busy.len() * eighths / 8).max(1) - 1).copied();
        let (Some(half), Some(most_of)) = (part(4), part(7)) else {
            return;
        };
        let long = self.due(most_of).saturating_duration_since(Instant::now()) > SHORTEST_NAP;
        self.wait_for(if long { most_of } else { half }, most);
    }

    fn wait_for(&mut self, at: usize, most: Duration) {
        let start = Instant::now();
        loop {
            let (now, due) = (Instant::now(), self.due(at));
            if now - start >= most || self.slots.has_ended(at) {
                return;
            }
            let early = due.saturating_duration_since(now).min(most);
            let overdue = now.saturating_duration_since(due) > SHORTEST_NAP;
            if early > SHORTEST_NAP || overdue {
                self.nap(early.max(SHORTEST_NAP));
                // The first moment at which a model can work.
                self.queue.relax(self.slots.awaited_status(at));
                self.overslept = self.slots.has_ended(at);
            } else {
                self.queue.relax(self.slots.awaited_status(at));
            }
        }
    }

    fn nap(&mut self, most: Duration) {
        let start = Instant::now();
        self.queue.nap(most);
        self.napped += start.elapsed();
    }
}
