//! Content of long stretches gets a series of slots, see [`SERIES`].

use crate::ledger::epochs::MemberId;
use crate::memory::pool::Pool;
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::{SERIES, Slot};

impl Pool {
    /// Makes a series of the page in a slot, the only one of its line key, and enters it in that slot's place. Returns
    /// its first slot, to which the member has a reference. `None` if the slot is not the only one of its key, or there
    /// is no room.
    pub(crate) fn make_series(&mut self, id: MemberId, line: Key, twin: Slot) -> Option<Slot> {
        if self.index().line(line) != Some(Line::Sole(twin)) {
            return None;
        }
        let slots = self.take_series(id)?;
        for slot in &slots {
            self.segments.copy(*slot, twin);
        }
        let (first, followers) = slots.split_first()?;
        self.lifetime.publish_series(id, *first, followers);
        self.lifetime.unlist(twin);
        self.catalog.replace_by_series(line, *first);
        self.order_in_place_of(twin, *first);
        Some(*first)
    }

    /// Consecutive free slots for a series.
    fn take_series(&mut self, id: MemberId) -> Option<Vec<Slot>> {
        let run = self.allocate_run_of(id, SERIES, SERIES)?;
        let slots: Vec<Slot> = run.slots().collect();
        if run.len == SERIES {
            return Some(slots);
        }
        self.give_back(slots);
        None
    }
}
