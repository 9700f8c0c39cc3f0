//! Content of long stretches gets a series of slots, see [`SERIES`].

use crate::epochs::MemberId;
use crate::segments::Run;
use crate::state::State;
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::{SERIES, Slot};

/// A service may have series made of one page in this many of its own: what it asks for costs others nothing much.
const PAGES_PER_EXTRA_SLOT: u64 = 64;

impl State {
    /// Makes a series of the page in a slot, the only one of its line key, and enters it in that slot's place: its first
    /// slot, to which the service has a reference. `None` if it has had its share, or there is no room for one.
    pub(crate) fn make_series(&mut self, id: MemberId, line: Key, twin: Slot) -> Option<Slot> {
        if self.catalog.reader().line(line) != Some(Line::Sole(twin)) {
            return None;
        }
        let service = self.service_mut(id)?;
        let extra = (service.series + 1) * u64::from(SERIES - 1);
        if extra * PAGES_PER_EXTRA_SLOT > service.pages {
            return None;
        }
        let slots = self.take_series()?;
        if let Some(service) = self.service_mut(id) {
            service.series += 1;
        }
        for slot in &slots {
            self.segments.copy(*slot, twin);
        }
        let (first, followers) = slots.split_first()?;
        self.lifetime.publish_series(id, *first, followers);
        self.lifetime.unlist(twin);
        self.catalog.replace_by_series(line, *first);
        if self.config.ordered {
            let segments = &self.segments;
            self.catalog.unorder(twin, |other| segments.compare(twin, other));
            self.catalog
                .order(*first, |other| segments.compare(*first, other));
        }
        Some(*first)
    }

    /// Consecutive free slots for a series.
    fn take_series(&mut self) -> Option<Vec<Slot>> {
        let Run { first, len } = self.allocate_run(SERIES)?;
        let slots: Vec<Slot> = (0..len).filter_map(|n| first.checked_add_in_segment(n)).collect();
        if len == SERIES {
            return Some(slots);
        }
        self.give_back(slots);
        None
    }
}
