//! Where pages lie: the states of all, and the mappings that these make.
//!
//! Two neighbouring pages lie in one mapping or not, which their backings tell ([`Backing::continues`]). When a backing changes,
//! boundaries between mappings come or go, and copies beside the page may come to lie in another mapping than the one from whose
//! place they were copied. All of that is counted here: for the process in [`Mappings`], for each chunk in
//! [`ChunkState::fragments`]. Which changes there may be, and what else follows from one, is [`PageMap`]'s to say.
//!
//! [`PageMap`]: crate::memory::page_map::PageMap

use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{Chunk, Memory, Page};
use crate::memory::mappings::Mappings;
use crate::memory::page_state::{Backing, Edges, PageState};
use crate::memory::page_table::PageTable;
use crate::memory::worth::Worth;
use std::ops::Range;
use std::sync::Arc;
use vmm_dedup_protocol::Slot;

/// Most copied pages that are passed to find out what slot would be seen in the place of one.
const FEW_COPIES: usize = 8;

/// See the module's text.
#[derive(Debug)]
pub(super) struct PlacedPages {
    memory: Arc<Memory>,
    table: PageTable,
    pub(super) mappings: Mappings,
}

impl PlacedPages {
    /// All memory is private.
    pub(super) fn new(memory: Arc<Memory>, mappings: Mappings) -> Self {
        Self {
            table: PageTable::new(memory.end()),
            memory,
            mappings,
        }
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// What is counted of the states.
    pub(super) fn table(&self) -> &PageTable {
        &self.table
    }

    #[inline]
    pub(super) fn state(&self, page: Page) -> PageState {
        self.table.get(page)
    }

    #[inline]
    fn backing(&self, page: Page) -> Backing {
        self.state(page).backing
    }

    /// As [`PageTable::count_repetition`].
    pub(super) fn count_repetition(&mut self) {
        self.table.count_repetition();
    }

    pub(super) fn set_worth(&mut self, page: Page, worth: Worth) {
        self.table.set_worth(page, worth);
    }

    /// A page's state changes. `place`: the slot that the mapping has at the page, if it comes to lie in one.
    pub(super) fn replace(
        &mut self,
        chunks: &mut [ChunkState],
        page: Page,
        old: PageState,
        next: PageState,
        place: Option<Slot>,
    ) {
        if old.backing != next.backing {
            let neighbours = self.memory.neighbours(page);
            if !old.backing.keeps_place(next.backing) {
                self.part_neighbours(chunks, page, neighbours, place);
            }
            self.note_boundaries(chunks, page, neighbours, old.backing, next.backing);
        }
        self.table.replace(page, next);
    }

    /// From now on the memory is this one, with these chunks. Chunks that stay with what is before and behind them are not counted
    /// anew.
    pub(super) fn set_memory(&mut self, chunks: &mut [ChunkState], memory: Arc<Memory>) {
        for at in changed(&self.memory, &memory) {
            self.mappings.added -= self.boundaries(at).0;
        }
        self.table.grow(memory.end());
        let old = std::mem::replace(&mut self.memory, memory);
        for at in changed(&self.memory.clone(), &old) {
            let (within, behind) = self.boundaries(at);
            self.mappings.added += within;
            chunks[at].fragments = u16::try_from(within + behind).unwrap_or(u16::MAX);
        }
    }

    /// Counts the boundaries at and behind the pages of a chunk: those that count for the whole, and the one behind the last
    /// page, which counts for the next chunk.
    fn boundaries(&self, at: usize) -> (i64, i64) {
        let pages = self.memory.chunks()[at].pages.clone();
        let behind = self.memory.adjacent(pages.end - 1) && self.begins(pages.end);
        let within = pages.filter(|page| self.begins(*page));
        (within.fold(0, |n, _| n + 1), i64::from(behind))
    }

    /// Whether a mapping begins between a page and the one before it, if that is its neighbour.
    fn begins(&self, page: Page) -> bool {
        let Some(before) = page.checked_sub(1).filter(|before| self.memory.adjacent(*before)) else {
            return false;
        };
        !self.backing(page).continues(self.backing(before))
    }

    /// The slot that the mapping has at a page, as far as the pages before it (or behind it) tell.
    fn place_by(&self, page: Page, before: bool) -> Option<Slot> {
        let (mut at, mut steps) = (page, 0);
        loop {
            match self.backing(at) {
                Backing::Slot(slot) if before => return slot.checked_add_in_segment(steps),
                Backing::Slot(slot) => return slot.checked_sub_in_segment(steps),
                Backing::CopiedOnWrite(_) if (steps as usize) < FEW_COPIES => {}
                _ => return None,
            }
            let (has_before, has_behind) = self.memory.neighbours(at);
            let (first, second) = if before {
                (at.checked_sub(1)?, at)
            } else {
                (at, at + 1)
            };
            let there = if before { has_before } else { has_behind };
            if !there || !self.backing(second).continues(self.backing(first)) {
                return None;
            }
            at = if before { first } else { second };
            steps += 1;
        }
    }

    /// A page comes to another place, or shows this slot now: copies beside it may lie in another mapping then. It has a neighbour
    /// before it, or behind it, or both.
    fn part_neighbours(
        &mut self,
        chunks: &mut [ChunkState],
        page: Page,
        (before, behind): (bool, bool),
        slot: Option<Slot>,
    ) {
        if before && let Backing::CopiedOnWrite(edges) = self.backing(page - 1) {
            let expected = self
                .place_by(page - 1, true)
                .and_then(|place| place.checked_add_in_segment(1));
            let ends = slot.is_none() || expected != slot;
            self.set_edges(chunks, page - 1, Edges { ends, ..edges });
        }
        if behind && let Backing::CopiedOnWrite(edges) = self.backing(page + 1) {
            let expected = self
                .place_by(page + 1, false)
                .and_then(|place| place.checked_sub_in_segment(1));
            let begins = slot.is_none() || expected != slot;
            self.set_edges(chunks, page + 1, Edges { begins, ..edges });
        }
    }

    fn set_edges(&mut self, chunks: &mut [ChunkState], page: Page, edges: Edges) {
        let old = self.state(page);
        let next = PageState {
            backing: Backing::CopiedOnWrite(edges),
            ..old
        };
        if next != old {
            let neighbours = self.memory.neighbours(page);
            self.note_boundaries(chunks, page, neighbours, old.backing, next.backing);
            self.table.replace(page, next);
        }
    }

    /// Of a page that comes to lie where a mapping has this slot.
    pub(super) fn edges_of(&self, page: Page, place: Slot) -> Edges {
        let (before, behind) = self.memory.neighbours(page);
        let (place_before, place_behind) = (place.checked_sub_in_segment(1), place.checked_add_in_segment(1));
        let continues = before && place_before.is_some() && self.place_by(page - 1, true) == place_before;
        let goes_on = behind && place_behind.is_some() && self.place_by(page + 1, false) == place_behind;
        Edges {
            begins: !continues,
            ends: !goes_on,
        }
    }

    /// A page's backing changes: boundaries at both of its ends come or go.
    fn note_boundaries(
        &mut self,
        chunks: &mut [ChunkState],
        page: Page,
        (before, behind): (bool, bool),
        old: Backing,
        next: Backing,
    ) {
        let change = |was: bool, is: bool| i16::from(is) - i16::from(was);
        let front = if before {
            let before = self.backing(page - 1);
            change(!old.continues(before), !next.continues(before))
        } else {
            0
        };
        let back = if behind {
            let behind = self.backing(page + 1);
            change(!behind.continues(old), !behind.continues(next))
        } else {
            0
        };
        if (front, back) == (0, 0) {
            return;
        }
        self.mappings.added += i64::from(front + back);
        // A boundary between two chunks counts for both.
        let chunk = self.memory.chunk_of(page);
        let pages = &self.memory.chunks()[chunk].pages;
        let (first, last) = (page == pages.start, page + 1 == pages.end);
        let mut add = |chunk: usize, change: i16| {
            let fragments = &mut chunks[chunk].fragments;
            *fragments = fragments.saturating_add_signed(change);
        };
        add(chunk, front + back);
        if first && front != 0 {
            add(chunk - 1, front);
        }
        if last && back != 0 {
            add(chunk + 1, back);
        }
    }
}

/// Chunks of one memory that another does not have, with the same before and behind them.
fn changed(memory: &Memory, other: &Memory) -> Vec<usize> {
    let chunks = 0..memory.chunks().len();
    let is_there = |at: usize| {
        let place = place_of(memory, at);
        let there = other.chunk_of(place.pages.start);
        there < other.chunks().len() && place_of(other, there) == place
    };
    chunks.filter(|at| !is_there(*at)).collect()
}

/// What the boundaries of a chunk depend on, besides its pages' states and its neighbours'.
#[derive(PartialEq, Eq)]
struct ChunkPlace {
    start: usize,
    pages: Range<Page>,
    /// Memory goes on before it, and behind it.
    goes_on: (bool, bool),
}

fn place_of(memory: &Memory, at: usize) -> ChunkPlace {
    let Chunk { start, pages } = memory.chunks()[at].clone();
    let before = pages.start > 0 && memory.adjacent(pages.start - 1);
    ChunkPlace {
        start,
        goes_on: (before, memory.adjacent(pages.end - 1)),
        pages,
    }
}
