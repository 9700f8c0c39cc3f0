//! In what order pages are looked at: which chunks a pass visits, and how many at a time.
//!
//! Of all chunks those where something may have happened, fragmented ones less often, and each now and then. Those come first of
//! which the guest says that much is worth sharing, and then the others, both in the order of addresses. Whatever else should
//! come first or last (memory pressure) belongs here.

use crate::memory::chunk_state::{ChunkState, MAX_PERIOD};
use crate::memory::page_map::PageMap;
use std::ops::Range;

/// Chunks that are visited together (64 MiB): one request to the kernel.
const TOGETHER: usize = 32;
/// Every chunk is visited at least this often, in passes, for what raises no fault here: another process writing
/// guest memory through the kernel.
const FORCED_PERIOD: u64 = 128;

/// The chunks of one pass.
#[derive(Debug)]
pub(crate) struct ScanOrder {
    pass: u64,
    next: usize,
    /// Those are visited now that are worth it; else the others.
    worth: bool,
    /// A chunk was passed over that waits for a visit.
    skipped: bool,
}

impl ScanOrder {
    /// The order of the pass of this number.
    pub(crate) fn new(pass: u64) -> Self {
        Self {
            pass,
            next: 0,
            worth: true,
            skipped: false,
        }
    }

    /// The next consecutive chunks to be visited, without gaps between them; `None` at the end.
    pub(crate) fn next(&mut self, map: &PageMap) -> Option<Range<usize>> {
        let count = map.chunks().len();
        let first = (self.next..count).find(|at| self.is_next(*at, map));
        if first.is_none() && std::mem::take(&mut self.worth) {
            self.next = 0;
            return self.next(map);
        }
        let start = first?;
        let goes_on = |at: usize, order: &mut Self| {
            at - start < TOGETHER
                && map.chunk_at(at).start == map.chunk_at(at - 1).addresses().end
                && order.is_next(at, map)
        };
        let end = (start + 1..count).find(|at| !goes_on(*at, self)).unwrap_or(count);
        self.next = end;
        Some(start..end)
    }

    fn is_next(&mut self, at: usize, map: &PageMap) -> bool {
        map.is_worth(at) == self.worth && self.is_due(at, map.chunk(at))
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
        let mut order = ScanOrder::new(pass);
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
    }

    #[test]
    fn fragmented_chunks_wait_for_their_turn() {
        let mut map = map(2);
        map.set_fragments(1, 64);
        let mut first = ScanOrder::new(2);
        assert_eq!(first.next(&map), Some(0..1));
        assert_eq!(first.next(&map), Some(2..4));
        assert!(first.next(&map).is_none() && !first.is_full());
        assert_eq!(order(&map, 3), [0..2, 2..4]);
    }
}
