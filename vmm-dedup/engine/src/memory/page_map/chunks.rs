//! Transitions of chunks, and of memory as a whole.

use super::{PageMap, VMAS_PER_HUGE_PAGE};
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{Chunk, Memory};
use crate::memory::page_state::{Backing, PageState};
use crate::memory::thp_state::{Asked, Folds, Use};
use std::sync::Arc;

/// When chunks are visited, and what a visit found.
impl PageMap {
    /// Something may have happened in a chunk that no state tells: it is visited again.
    pub(crate) fn requeue_chunk(&mut self, chunk: usize) {
        self.chunks[chunk].pending = true;
    }

    /// All chunks are to be visited.
    pub(crate) fn requeue_all(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.pending = true);
    }

    /// Other threads had faults: anything may have been written for the first time, or copied by the kernel.
    pub(crate) fn note_faults(&mut self) {
        self.chunks.iter_mut().for_each(ChunkState::note_faults);
    }

    /// A visit found one huge page. Such a chunk is never write-protected.
    pub(crate) fn found_huge(&mut self, chunk: usize) {
        self.chunks[chunk].found_huge();
    }

    /// A visit found small pages; whether none of them is protected yet.
    pub(crate) fn found_small(&mut self, chunk: usize) -> bool {
        self.chunks[chunk].found_small()
    }

    /// The end of a visit. `waiting`: pages wait for the next.
    pub(crate) fn end_visit(&mut self, chunk: usize, waiting: bool) {
        self.chunks[chunk].pending = waiting;
    }

    /// Whether the kernel may have copied pages since that was looked for. It counts as looked for from now on.
    pub(crate) fn take_unchecked(&mut self, chunk: usize) -> bool {
        self.chunks[chunk].take_unchecked()
    }

    /// The same for the next of the chunk's [`PARTS`](crate::memory::chunk_state::PARTS), which this is.
    pub(crate) fn take_unchecked_part(&mut self, chunk: usize) -> Option<u8> {
        self.chunks[chunk].take_unchecked_part()
    }

    /// Whether shared pages were overwritten, as somebody says who knows, since copies were looked for. They count as looked for from
    /// now on.
    pub(crate) fn take_overwritten(&mut self, chunk: usize) -> bool {
        self.chunks[chunk].take_overwritten()
    }

    /// Whether pages that the kernel had copied are to be looked at in this pass.
    pub(crate) fn copies_due(&mut self, chunk: usize) -> bool {
        self.chunks[chunk].copies_due()
    }

    /// They were looked at. `any`: there are some.
    pub(crate) fn looked_at_copies(&mut self, chunk: usize, any: bool) {
        self.chunks[chunk].looked_at_copies(any);
    }

    /// Pages with twins wait until nothing new has come to the chunk for some passes.
    pub(crate) fn defer_chunk(&mut self, chunk: usize, pass: u64) {
        self.chunks[chunk].defer(pass);
    }

    /// The end of a pass: what was deferred until now has been merged.
    pub(crate) fn end_pass(&mut self, pass: u64) {
        self.chunks.iter_mut().for_each(|chunk| chunk.end_pass(pass));
    }

    /// A chunk is lent to somebody else: it is not looked at until it comes back. What of it the kernel copied stays where it is,
    /// and nobody is to ask for it.
    pub(crate) fn lend(&mut self, chunk: usize) {
        for page in self.chunk_at(chunk).pages.clone() {
            if self.backing(page).is_copied() {
                self.forget_copy(page);
            }
        }
        self.chunks[chunk].lend();
    }

    /// A chunk that was lent came back.
    pub(crate) fn take_back(&mut self, chunk: usize) {
        self.chunks[chunk].take_back();
        let mut pages = self.chunk_at(chunk).pages.clone();
        if pages.any(|page| self.backing(page).is_copied()) {
            self.chunks[chunk].look_at_copies_soon();
        }
    }
}

/// Huge pages.
impl PageMap {
    /// Whether the keys of a huge page are to be read in this pass.
    pub(crate) fn look_due(&mut self, chunk: usize) -> bool {
        self.chunks[chunk].look_due()
    }

    /// Notes a look at a huge page's keys, of which these folds were taken; returns whether they were the same last time.
    pub(crate) fn looked(&mut self, chunk: usize, folds: &Folds) -> bool {
        self.chunks[chunk].looked(folds)
    }

    /// Lets the next pass look at the whole huge page.
    pub(crate) fn look_again(&mut self, chunk: usize) {
        self.chunks[chunk].look_again();
    }

    /// So many pages of a huge page have a twin. `split`: these are enough to split it.
    pub(crate) fn note_twins(&mut self, chunk: usize, known: usize, split: bool) {
        let twins = &mut self.chunks[chunk].twins;
        twins.known = u16::try_from(known).unwrap_or(u16::MAX);
        twins.split |= split;
    }

    /// A huge page was taken to be merged, and stayed one.
    pub(crate) fn stayed_huge(&mut self, chunk: usize) {
        self.chunks[chunk].stayed_huge();
    }

    /// Somebody waited for a huge page while it was away.
    pub(crate) fn note_contended(&mut self, chunk: usize) {
        self.chunks[chunk].note_contended();
    }

    /// The chunk's huge page was split by the service: it is tracked from now on.
    pub(crate) fn note_split(&mut self, chunk: usize) {
        self.chunks[chunk].note_split();
    }

    /// All of a chunk is one huge page, built by the service.
    pub(crate) fn note_collapsed(&mut self, chunk: usize) {
        self.chunks[chunk].note_collapsed();
    }

    /// Copies of a chunk's pages were put into their place, as mappings of their own.
    pub(crate) fn note_own_mapping(&mut self, chunk: usize) {
        if self.chunks[chunk].begin_own_mapping() {
            self.pages.mappings.added += VMAS_PER_HUGE_PAGE;
        }
    }

    /// All of a chunk's huge page was zero, and its place is empty now.
    pub(crate) fn note_huge_zero(&mut self, chunk: usize) {
        for page in self.chunk_at(chunk).pages.clone() {
            if self.backing(page) != Backing::Zero {
                self.set(page, PageState::UNTRACKED);
                self.zero(page);
            }
        }
        self.chunks[chunk].note_zero();
    }
}

/// Memory that comes and goes.
impl PageMap {
    /// From now on the memory is this one. Pages that stay have the numbers that they had.
    pub(crate) fn set_memory(&mut self, memory: Arc<Memory>) {
        let old = self.memory();
        let state_of = |chunk: &Chunk| {
            let there = old.has(chunk.pages.start);
            let Some(at) = there.then(|| old.chunk_of(chunk.pages.start)) else {
                return ChunkState::new();
            };
            let mut state = self.chunks[at];
            if old.chunks()[at].pages != chunk.pages {
                // Not the 2 MiB any more that were watched.
                state.forget_watching();
            }
            state
        };
        self.chunks = memory.chunks().iter().map(state_of).collect();
        self.still = self.still.as_ref().map(|still| still.resized(memory.end()));
        self.pages.set_memory(&mut self.chunks, memory);
    }
}

/// What the policy for huge pages remembers of a chunk. Nothing in it has an effect on pages, references or mappings.
impl PageMap {
    /// So many subpages in a quarter of a huge page look repeated.
    pub(crate) fn note_repeated(&mut self, chunk: usize, quarter: usize, repeated: usize) {
        self.chunks[chunk].thp.note_repeated(quarter, repeated);
    }

    /// The store is asked about so much of a huge page.
    pub(crate) fn note_asked(&mut self, chunk: usize, asked: Asked) {
        self.chunks[chunk].thp.asked = asked;
    }

    /// A huge page has enough twins: at the next look the store is asked about all of it. `likely_whole`: all of a sample had
    /// twins.
    pub(crate) fn ask_about_all(&mut self, chunk: usize, likely_whole: bool) {
        self.chunks[chunk].look_again();
        let policy = &mut self.chunks[chunk].thp;
        (policy.asked, policy.likely_whole) = (Asked::Whole, likely_whole);
    }

    /// Whether the use of a huge page is to be sampled in this interval. To be called once in each.
    pub(crate) fn sample_due(&mut self, chunk: usize) -> bool {
        self.chunks[chunk].thp.sample_due()
    }

    /// A sample told of a chunk's use.
    pub(crate) fn note_use(&mut self, chunk: usize, used: Use) {
        self.chunks[chunk].thp.note_use(used);
    }

    /// Sharing broken in a chunk since the last call.
    pub(crate) fn take_breaks(&mut self, chunk: usize) -> u8 {
        std::mem::take(&mut self.chunks[chunk].thp.breaks)
    }

    /// A huge page could not be built: so many intervals pass before it is tried again.
    pub(crate) fn delay_rebuild(&mut self, chunk: usize, intervals: u8) {
        self.chunks[chunk].thp.wait = intervals;
    }

    /// Whether intervals must pass before a huge page is built. `due`: one more has.
    pub(crate) fn rebuild_waits(&mut self, chunk: usize, due: bool) -> bool {
        let wait = &mut self.chunks[chunk].thp.wait;
        let waits = *wait > 0;
        *wait -= u8::from(waits && due);
        waits
    }
}
