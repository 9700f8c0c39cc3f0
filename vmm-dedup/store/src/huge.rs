//! Huge pages of the store.
//!
//! The pages of a guest's huge page that are published together get slots that lie as those of one
//! ([`Wish::HugePage`](vmm_dedup_protocol::message::Wish)), if all of them are new: else much of what is allocated would be
//! for nothing. When others share all of it, the kernel is asked to gather its memory in a huge page (MADV_COLLAPSE):
//! guests then map it as one, with its reach in the TLB, also those that had small pages of it mapped. Before, nobody would
//! gain from that. It takes the kernel a millisecond or so, and holds up everyone who waits for the store, so it is done now
//! and then, for a part of the time.

use crate::epochs::MemberId;
use crate::segments::Run;
use crate::slots;
use crate::state::State;
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::Staged;
use vmm_dedup_protocol::{HUGE_PAGES, Slot};

/// Time for collapsing in a second, after which what is left waits for the next.
const TIME_IN_A_SECOND: Duration = Duration::from_millis(50);
/// How long the kernel is not asked after it had none.
const PAUSE: Duration = Duration::from_secs(60);
/// Most that wait: more are shared as small pages.
const MOST_WAITING: usize = 1 << 16;

/// Huge pages that are to become such in memory.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// The last slot of each. Some may not be shared any more, or be there twice.
    last: VecDeque<Slot>,
    /// The kernel had none: when it is asked again.
    not_before: Option<Instant>,
}

impl State {
    /// Publishes the pages of a huge page to slots that lie as those of one. `None`, and nothing has happened, unless all of
    /// them are new and have the announced line keys, and there is room.
    pub(crate) fn publish_huge_page(
        &mut self,
        id: MemberId,
        pages: &[Staged],
        staging: &Mapping,
    ) -> Option<Vec<u32>> {
        let mut lines = HashSet::with_capacity(pages.len());
        let known = |line| self.catalog.reader().line(line).is_some();
        if !pages
            .iter()
            .all(|page| !page.key.is_full() && !known(page.key) && lines.insert(page.key))
        {
            return None;
        }
        // Without memory or descriptors for a segment the ordinary way may still find room, or says so.
        let (run, new) = self.segments.allocate_huge_page().ok().flatten()?;
        self.announce_segment(new);
        self.segments.populate(&run);
        let slots: Vec<Slot> = slots_of(&run).collect();
        if !self.fill_all(&slots, pages, staging) {
            self.give_back(slots);
            return None;
        }
        for (slot, page) in slots.iter().zip(pages) {
            self.note_answered(id, page.key);
            self.lifetime.publish(id, *slot);
            self.enter(page.key, *slot);
            self.counters.published += 1;
        }
        Some(slots.into_iter().map(Slot::number).collect())
    }

    /// Copies pages into slots; whether all are what they were announced as, and can be entered.
    fn fill_all(&mut self, slots: &[Slot], pages: &[Staged], staging: &Mapping) -> bool {
        slots.iter().zip(pages).enumerate().all(|(at, (slot, page))| {
            self.segments.fill(*slot, staging, at);
            let right = self.segments.line_key(*slot, self.salt) == page.key;
            right
                && self
                    .catalog
                    .admits(page.key, || self.segments.hash(*slot, self.salt))
        })
    }

    /// A slot is referenced once more. If it is the last one of a huge page, that may be shared as a whole now: services tell
    /// references in the order of their pages.
    pub(crate) fn note_shared(&mut self, slot: Slot) {
        if self.segments.small_huge_page(slot).is_some() && self.waiting.last.len() < MOST_WAITING {
            self.waiting.last.push_back(slot);
        }
    }

    /// Makes huge pages of what is shared as such. To be called once a second.
    pub(crate) fn collapse_shared(&mut self, now: Instant) {
        if self.waiting.not_before.is_some_and(|at| now < at) {
            return;
        }
        while now.elapsed() < TIME_IN_A_SECOND
            && let Some(last) = self.waiting.last.pop_front()
        {
            let Some(run) = self.segments.small_huge_page(last) else {
                continue;
            };
            if !self.is_shared(&run) {
                continue;
            }
            match self.segments.collapse(&run) {
                Ok(()) => self.counters.huge_pages += 1,
                // For this one: somebody holds a page of it just now. The next who shares it brings it here again.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => {
                    log::info!("huge pages that guests share are small ones for now: {error}");
                    self.waiting.last.push_front(last);
                    self.waiting.not_before = Some(now + PAUSE);
                    return;
                }
            }
        }
    }

    /// Whether all pages of a huge page are used, and more than by one. (A guest that had to bring some home again, or has
    /// written some, counts for the rest.)
    fn is_shared(&self, run: &Run) -> bool {
        let references = |slot| match self.lifetime.slots().state(slot) {
            slots::State::Live(references) => Some(references),
            _ => None,
        };
        let sum: Option<u64> = slots_of(run).map(references).sum();
        sum.is_some_and(|sum| sum * 2 >= HUGE_PAGES as u64 * 3)
    }
}

fn slots_of(run: &Run) -> impl Iterator<Item = Slot> {
    let first = run.first;
    (0..run.len).filter_map(move |n| first.checked_add_in_segment(n))
}
