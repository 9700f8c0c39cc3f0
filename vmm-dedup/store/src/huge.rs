//! Huge pages of the store.
//!
//! The pages of a guest's huge page that are published together get slots that lie as those of one
//! ([`Wish::HugePage`](vmm_dedup_protocol::message::Wish)). As soon as others share all of it, the kernel is asked to gather
//! its memory in a huge page (MADV_COLLAPSE): guests then map it as one, with its reach in the TLB, also those that had
//! small pages of it mapped. Before, nobody would gain from that. It takes the kernel a millisecond or so; while it has no
//! huge page to give it is not asked.

use crate::slots;
use crate::state::State;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::Slot;

/// How long the kernel is not asked after it had none.
const PAUSE: Duration = Duration::from_secs(60);

impl State {
    /// Makes the huge page that ends with a slot one in memory, if it is shared as a whole and is none yet. The last slot is
    /// the last to be referenced, since services tell references in the order of their pages.
    pub(crate) fn collapse_if_shared(&mut self, last: Slot) {
        let Some(run) = self.segments.small_huge_page(last) else {
            return;
        };
        let state = |n| Some(self.lifetime.slots().state(run.first.checked_add_in_segment(n)?));
        let shared = |n| matches!(state(n), Some(slots::State::Live(references)) if references > 1);
        let now = Instant::now();
        let pause = self.no_huge_page_before.is_some_and(|at| now < at);
        if pause || !(0..run.len).all(shared) {
            return;
        }
        match self.segments.collapse(&run) {
            Ok(()) => self.counters.huge_pages += 1,
            Err(error) => {
                log::info!("huge pages that guests share are small ones for now: {error}");
                self.no_huge_page_before = Some(now + PAUSE);
            }
        }
    }
}
