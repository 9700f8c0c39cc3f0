//! Content that fills long stretches of a guest, such as memory that its kernel has poisoned.
//!
//! One slot can be mapped to one page at a time: a stretch would cost a mapping for every page. The store makes a *series*
//! of such content when it is asked to, [`SERIES`](vmm_dedup_protocol::SERIES) consecutive slots that hold the same, and a guest's page maps the one that its
//! number says ([`Line::slot_for`]). Each slot is a slot like others: compared before it is mapped, and counted.

use crate::error::Error;
use crate::merge::request::{Item, Role};
use crate::scan::pass::Scanner;
use crate::sys::page_size::PAGE_SIZE;
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::message::{Staged, Wish};

/// So many neighbours with one slot are worth a series. They spare half of what it costs; content that fills half of a
/// huge page is hardly ever alone.
const WORTH_IT: usize = 256;

impl Scanner {
    /// Lets long stretches of one slot use the slots of a series.
    pub(crate) fn use_series(&mut self, items: &mut [Item]) -> Result<(), Error> {
        let one_slot = |a: &Item, b: &Item| {
            let twins = a.role == Role::Twin && b.role == Role::Twin;
            twins && a.slot.is_some() && a.slot == b.slot && b.page == a.page + 1
        };
        let mut result = Ok(());
        for stretch in items.chunk_by_mut(one_slot).filter(|s| s.len() >= WORTH_IT) {
            result = result.and_then(|()| self.use_series_for(stretch));
        }
        result
    }

    #[allow(unsafe_code)] // reads guest memory
    fn use_series_for(&mut self, stretch: &mut [Item]) -> Result<(), Error> {
        let Item { page, slot, .. } = stretch[0];
        let (key, _) = self.read_key(page);
        let address = self.memory.address(page);
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        if slot.is_some() && store.index().line(key) == slot.map(Line::Sole) {
            // SAFETY: guest memory stays mapped while the service runs.
            unsafe { store.stage(0, address) };
            let (gap, wish) = (0, Wish::Series);
            let published = store.publish(&[Staged { key, gap, wish }])?;
            self.stats.bytes_read.publish += PAGE_SIZE as u64;
            if let Some(slot) = published.into_iter().flatten().next() {
                (stretch[0].slot, stretch[0].role) = (Some(slot), Role::Publisher);
            }
        }
        if let Some(line @ Line::Series(_)) = store.index().line(key) {
            for item in stretch.iter_mut().filter(|item| item.role == Role::Twin) {
                item.slot = line.slot_for(item.page);
            }
        }
        Ok(())
    }
}
