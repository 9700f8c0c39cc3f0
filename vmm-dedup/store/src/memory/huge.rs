//! Huge pages of guests.
//!
//! The pages of a guest's huge page that are published together get slots that lie as those of one
//! ([`Wish::HugePage`](vmm_dedup_protocol::message::Wish)), if all of them are new. If some were known, much of what is
//! allocated would be for nothing. The memory of such slots becomes one when it is shared as one, see
//! [`crate::memory::collapse`].

use crate::ledger::allocator::{HUGE_PAGE_SLOTS, Purpose};
use crate::ledger::epochs::MemberId;
use crate::memory::pool::Pool;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::Instant;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

impl Pool {
    /// Publishes the pages of a huge page to slots that lie as those of one. `None`, and nothing has happened, unless all
    /// of them are new and have the announced line keys, and there is room.
    pub(crate) fn publish_huge_page(
        &mut self,
        id: MemberId,
        lines: &[Key],
        staging: &OwnedFd,
    ) -> Option<Vec<Slot>> {
        let mut different = HashSet::with_capacity(lines.len());
        let is_new = |line: &Key| !line.is_full() && self.index().line(*line).is_none();
        if !lines.iter().all(|line| is_new(line) && different.insert(*line)) {
            return None;
        }
        if self.room_for(id) < HUGE_PAGE_SLOTS {
            return None;
        }
        // Without memory or descriptors for a segment the ordinary way may still find room, or says so.
        let (run, new) = self.segments.allocate_huge_page(Purpose::New).ok().flatten()?;
        self.announce_segment(new);
        self.segments.populate(&run);
        let slots: Vec<Slot> = run.slots().collect();
        if !self.fill_all(&slots, lines, staging) {
            self.give_back(slots);
            return None;
        }
        for (slot, line) in slots.iter().zip(lines) {
            self.lifetime.publish(id, *slot);
            self.enter(*line, *slot);
        }
        Some(slots)
    }

    /// Copies pages into slots; whether all have the announced line keys and can be entered.
    fn fill_all(&mut self, slots: &[Slot], lines: &[Key], staging: &OwnedFd) -> bool {
        slots.iter().zip(lines).enumerate().all(|(at, (slot, line))| {
            let filled = self.segments.fill(*slot, staging, at).is_ok();
            let right = filled && self.segments.line_key(*slot, self.salt) == *line;
            right && self.admits(*line, *slot)
        })
    }

    /// Makes huge pages of what is shared as such. To be called once a second.
    pub(crate) fn collapse_shared(&mut self, now: Instant) {
        self.collapse_queue
            .collapse(&mut self.segments, &self.lifetime, now);
    }

    /// Huge pages that guests share as a whole and that became one in memory.
    pub(crate) fn collapsed(&self) -> u64 {
        self.collapse_queue.collapsed
    }
}
