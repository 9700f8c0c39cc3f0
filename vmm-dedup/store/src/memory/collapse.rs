//! Ranges of slots that become huge pages in memory.
//!
//! When other guests share all of a guest's huge page, the store asks the kernel to gather its memory in a huge page
//! (MADV_COLLAPSE). Guests then map it as one, with its reach in the TLB, also those that had mapped small pages of it.
//! Before that nobody would gain from it. Gathering takes the kernel about a millisecond, and everyone who waits for the
//! store waits as long, so it is done once a second, for a part of the time.

use crate::ledger::allocator::Run;
use crate::ledger::lifetime::Lifetime;
use crate::ledger::slots::SlotState;
use crate::memory::segments::Segments;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::{HUGE_PAGES, Slot};

/// Time for collapsing in a second, after which what is left waits for the next.
const TIME_IN_A_SECOND: Duration = Duration::from_millis(50);
/// How long the kernel is not asked after it had no huge page.
const PAUSE: Duration = Duration::from_secs(60);
/// Most ranges that wait: those beyond stay small pages.
const MOST_WAITING: usize = 1 << 16;

/// Ranges of slots that are to become huge pages in memory.
#[derive(Debug, Default)]
pub(crate) struct CollapseQueue {
    /// The last slot of each. Some may not be shared any more, or be there twice.
    last: VecDeque<Slot>,
    /// The kernel had no huge page: when it is asked again.
    not_before: Option<Instant>,
    /// Ranges that became huge pages.
    pub(super) collapsed: u64,
}

impl CollapseQueue {
    /// A slot is referenced once more. If it is the last one of a huge page, that may be shared as a whole now: services
    /// report references in the order of their pages.
    pub(super) fn note_shared(&mut self, slot: Slot, segments: &Segments) {
        if segments.small_huge_page(slot).is_some() && self.last.len() < MOST_WAITING {
            self.last.push_back(slot);
        }
    }

    /// Makes huge pages of what is shared as such.
    pub(super) fn collapse(&mut self, segments: &mut Segments, lifetime: &Lifetime, now: Instant) {
        if self.not_before.is_some_and(|at| now < at) {
            return;
        }
        while now.elapsed() < TIME_IN_A_SECOND
            && let Some(last) = self.last.pop_front()
        {
            let Some(run) = segments.small_huge_page(last) else {
                continue;
            };
            if !is_shared(&run, lifetime) {
                continue;
            }
            match segments.collapse(&run) {
                Ok(()) => self.collapsed += 1,
                // For this one: somebody holds a page of it just now. The next who shares it brings it here again.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => {
                    log::info!("huge pages that guests share are small ones for now: {error}");
                    self.last.push_front(last);
                    self.not_before = Some(now + PAUSE);
                    return;
                }
            }
        }
    }
}

/// Whether all pages of a huge page are used, and more than by one guest. (A guest that had to bring some home again, or
/// has written some, counts for the rest.)
fn is_shared(run: &Run, lifetime: &Lifetime) -> bool {
    let references = |slot| match lifetime.slots().state(slot) {
        SlotState::Live(references) => Some(references),
        _ => None,
    };
    let sum: Option<u64> = run.slots().map(references).sum();
    sum.is_some_and(|sum| sum * 2 >= HUGE_PAGES as u64 * 3)
}
