//! In what order pages are looked at: which chunks a pass visits, and how many at a time.
//!
//! All looks for twins go through chunks in the order of [`Chunks`]: those come first of which the guest says that much is worth
//! sharing, and then the others, both in the order of addresses. A visit has of all chunks those where something may have
//! happened, fragmented ones less often, and each now and then ([`ScanOrder`]). Whatever else should come first or last (memory
//! pressure) belongs here.
//!
//! Some work has no order to choose:
//!
//! - what the kernel copied is found in each chunk's turn, or at once where it is known to be filled, and only noted ([`find_copied`]);
//! - all huge pages of a round are sampled before any is judged, and what is built again is built for speed ([`Monitor`]);
//! - pages that follow their slots do so by neighbours, for one mapping ([`Following`]);
//! - what was found is merged in page order, for one window ([`Plan`]).
//!
//! [`find_copied`]: crate::unmerge::address_space::AddressSpace::find_copied
//! [`Monitor`]: crate::thp::monitor::Monitor
//! [`Following`]: crate::merge::following::Following
//! [`Plan`]: crate::merge::plan::Plan

use crate::memory::chunk_state::{ChunkState, MAX_PERIOD};
use crate::memory::page_map::PageMap;
use std::ops::Range;

/// Chunks that are visited together (64 MiB): one request to the kernel.
const TOGETHER: usize = 32;
/// Every chunk is visited at least this often, in passes, for what raises no fault here: another process writing
/// guest memory through the kernel.
const FORCED_PERIOD: u64 = 128;

/// Goes through all chunks once.
#[derive(Debug)]
pub(crate) struct Chunks {
    next: usize,
    /// Those come now that are worth it; else the others.
    worth: bool,
}

impl Chunks {
    pub(crate) fn new(map: &PageMap) -> Self {
        Self {
            next: 0,
            // Nobody may have said anything: then one round does.
            worth: map.has_hints(),
        }
    }

    /// The next one that is due, of which each is asked once; `None` at the end.
    pub(crate) fn next(
        &mut self,
        map: &mut PageMap,
        mut is_due: impl FnMut(&mut PageMap, usize) -> bool,
    ) -> Option<usize> {
        loop {
            let mut rest = self.next..map.chunks().len();
            let due = rest.find(|at| map.is_worth(*at) == self.worth && is_due(map, *at));
            self.next = rest.start;
            if due.is_some() || !self.goes_on() {
                return due;
            }
        }
    }

    /// At the end of a round: whether there is another one.
    fn goes_on(&mut self) -> bool {
        let goes_on = std::mem::take(&mut self.worth);
        if goes_on {
            self.next = 0;
        }
        goes_on
    }
}

/// The chunks that one pass visits.
#[derive(Debug)]
pub(crate) struct ScanOrder {
    pass: u64,
    chunks: Chunks,
    /// A chunk was passed over that waits for a visit.
    skipped: bool,
}

impl ScanOrder {
    /// The order of the pass of this number.
    pub(crate) fn new(map: &PageMap, pass: u64) -> Self {
        Self {
            pass,
            chunks: Chunks::new(map),
            skipped: false,
        }
    }

    /// The next consecutive chunks to be visited, without gaps between them; `None` at the end.
    pub(crate) fn next(&mut self, map: &PageMap) -> Option<Range<usize>> {
        let count = map.chunks().len();
        let Some(start) = (self.chunks.next..count).find(|at| self.is_next(*at, map)) else {
            self.chunks.next = count;
            return if self.chunks.goes_on() {
                self.next(map)
            } else {
                None
            };
        };
        let goes_on = |at: usize, order: &mut Self| {
            at - start < TOGETHER
                && map.chunk_at(at).start == map.chunk_at(at - 1).addresses().end
                && order.is_next(at, map)
        };
        let end = (start + 1..count).find(|at| !goes_on(*at, self)).unwrap_or(count);
        self.chunks.next = end;
        Some(start..end)
    }

    fn is_next(&mut self, at: usize, map: &PageMap) -> bool {
        map.is_worth(at) == self.chunks.worth && self.is_due(at, map.chunk(at))
    }

    fn is_due(&mut self, at: usize, chunk: &ChunkState) -> bool {
        if chunk.lent {
            return false;
        }
        let turn = |period: u64| (self.pass + at as u64).is_multiple_of(period);
        if turn(FORCED_PERIOD) || chunk.is_quiesced(self.pass) {
            return true;
        }
        let due = chunk.pending && turn(chunk.period());
        self.skipped |= chunk.pending && !due;
        due
    }

    /// Whether what was returned last comes first, since the guest says that much of it is worth sharing.
    pub(crate) fn comes_first(&self) -> bool {
        self.chunks.worth
    }

    /// Whether this pass has seen, with those before it, all that was written.
    pub(crate) fn is_full(&self) -> bool {
        !self.skipped || self.pass.is_multiple_of(MAX_PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::hint::Hint;
    use crate::memory::layout::Memory;
    use crate::sys::page_size::HUGE_SIZE;
    use std::sync::Arc;

    /// `chunks` chunks, and two more behind a gap.
    fn map(chunks: usize) -> PageMap {
        let at = |chunk: usize| (chunk + 10) * HUGE_SIZE;
        let memory = Memory::made_up(&[at(0)..at(chunks), at(chunks + 1)..at(chunks + 3)]);
        PageMap::new(Arc::new(memory), 1000, 0)
    }

    fn order(map: &PageMap, pass: u64) -> Vec<Range<usize>> {
        let mut order = ScanOrder::new(map, pass);
        std::iter::from_fn(|| order.next(map)).collect()
    }

    #[test]
    fn new_memory_is_visited_in_pieces_that_end_at_gaps() {
        assert_eq!(order(&map(40), 1), [0..32, 32..40, 40..42]);
    }

    #[test]
    fn only_chunks_where_something_happened_are_visited() {
        let mut map = map(10);
        (0..12).for_each(|at| map.end_visit(at, false));
        map.lend(7);
        [3, 4, 7].into_iter().for_each(|at| map.requeue_chunk(at));
        assert!(order(&map, 1).into_iter().eq(std::iter::once(3..5)));
        // Each in its turn, whether pending or not.
        assert_eq!(order(&map, FORCED_PERIOD - 9), [3..5, 9..10]);
    }

    #[test]
    fn what_the_guest_calls_worth_sharing_comes_first() {
        let mut map = map(6);
        for chunk in [2, 3, 6] {
            let pages = map.chunk_at(chunk).pages.clone();
            pages.for_each(|page| assert!(map.say(page, Hint::WORTH)));
        }
        assert_eq!(order(&map, 1), [2..4, 6..7, 0..2, 4..6, 7..8]);
        let mut chunks = Chunks::new(&map);
        let mut asked = Vec::new();
        let due = std::iter::from_fn(|| {
            chunks.next(&mut map, |_, at| {
                asked.push(at);
                at % 2 == 1
            })
        });
        assert_eq!(Vec::from_iter(due), [3, 1, 5, 7]);
        assert_eq!(asked, [2, 3, 6, 0, 1, 4, 5, 7]);
    }

    #[test]
    fn fragmented_chunks_wait_for_their_turn() {
        let mut map = map(2);
        map.set_fragments(1, 64);
        let mut first = ScanOrder::new(&map, 2);
        assert_eq!(first.next(&map), Some(0..1));
        assert_eq!(first.next(&map), Some(2..4));
        assert!(first.next(&map).is_none() && !first.is_full());
        assert_eq!(order(&map, 3), [0..2, 2..4]);
    }
}
