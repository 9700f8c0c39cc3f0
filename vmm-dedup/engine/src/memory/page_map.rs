//! The owner of what is known of guest memory: the states of pages and of chunks, and how many mappings they take.
//!
//! Every change of a page's state goes through a transition here. A transition draws all consequences: what the store is to
//! be told goes to the [`Outbox`], chunks that must be visited again are marked pending, and the estimate of mappings
//! follows. Nobody else counts mappings, or the references of pages that map slots. (Who lets go of a publication that was
//! never mapped drops its reference, and who repeats sightings withdraws them first.)
//!
//! The rules:
//! - a page that begins to map a slot takes a reference, unless the store counts one already since the page was published; a
//!   page that ceases to map a slot gives it back;
//! - a candidate that ceases to be one withdraws its key, unless it found a slot: then the key is in the index;
//! - two neighbouring pages lie in one mapping or not, which their backings tell ([`Backing::continues`]).
//!
//! Pure: there is no system call in here, and tests need no kernel.

use crate::memory::bitmap::Bits;
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{Chunk, Memory, Page};
use crate::memory::outbox::{Outbox, Sighting};
use crate::memory::page_state::{Backing, Known, PageState, Retry};
use crate::memory::page_table::{Counts, PageTable};
use crate::memory::thp_state::HugeState;
use std::ops::Range;
use std::sync::Arc;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// Mappings that a huge page built by the service takes: its own, and the rest behind it.
pub(crate) const VMAS_PER_HUGE_PAGE: i64 = 2;
/// Mappings that one more run of shared pages may add: its own, and the rest behind it.
pub(crate) const VMAS_PER_RUN: i64 = 2;

/// Whether the store counts a reference for a page already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reference {
    /// It does, since the page was just published.
    Counted,
    /// It is to be told.
    New,
}

/// Why a page that was to be merged is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotMerged {
    /// It is pinned, or shared with another process.
    Pinned,
    /// It stayed in place, write-protected.
    Stayed,
    /// It was taken and came back unprotected, or is not there.
    Returned,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct PageMap {
    memory: Arc<Memory>,
    table: PageTable,
    chunks: Vec<ChunkState>,
    /// Mappings that the service has added to the process, about, and the most that it may add.
    vmas: i64,
    vmas_max: i64,
    /// Mappings that the process had before.
    vmas_before: usize,
    pub(crate) outbox: Outbox,
}

impl PageMap {
    /// All memory is private, and nothing is known of it. `vmas_max`: mappings that the service may add to those that the
    /// process has now, `vmas_before`.
    pub(crate) fn new(memory: Arc<Memory>, vmas_max: i64, vmas_before: usize) -> Self {
        let chunks = memory.chunks().iter().map(|_| ChunkState::new());
        Self {
            chunks: chunks.collect(),
            table: PageTable::new(memory.end()),
            memory,
            vmas: 0,
            vmas_max,
            vmas_before,
            outbox: Outbox::default(),
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(crate) fn state(&self, page: Page) -> PageState {
        self.table.get(page)
    }

    pub(crate) fn backing(&self, page: Page) -> Backing {
        self.state(page).backing
    }

    pub(crate) fn known(&self, page: Page) -> Known {
        self.state(page).known
    }

    /// The key by which a private page was reported to the store.
    pub(crate) fn private_candidate(&self, page: Page) -> Option<Key> {
        let state = self.state(page);
        state
            .known
            .candidate()
            .filter(|_| state.backing == Backing::Private)
    }

    pub(crate) fn chunk_of(&self, page: Page) -> usize {
        self.memory.chunk_of(page)
    }

    /// Address and pages of a chunk.
    pub(crate) fn chunk_at(&self, at: usize) -> &Chunk {
        &self.memory.chunks()[at]
    }

    pub(crate) fn chunks(&self) -> &[ChunkState] {
        &self.chunks
    }

    pub(crate) fn chunk(&self, at: usize) -> &ChunkState {
        &self.chunks[at]
    }

    pub(crate) fn chunk_mut(&mut self, at: usize) -> &mut ChunkState {
        &mut self.chunks[at]
    }

    pub(crate) fn chunks_mut(&mut self) -> impl Iterator<Item = &mut ChunkState> {
        self.chunks.iter_mut()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.table.counts()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.table.bytes() + size_of_val(self.chunks.as_slice())
    }

    /// Pages whose addresses lie in mappings of store files, as other threads may look at them.
    pub(crate) fn in_file(&self) -> Arc<Bits> {
        self.table.in_file()
    }

    /// From now on counts how often keys occur.
    pub(crate) fn count_repetition(&mut self) {
        self.table.count_repetition();
    }

    /// How many pages have this key, at most; 0 if that is not counted.
    pub(crate) fn repetition(&self, key: Key) -> u64 {
        self.table.repetition(key)
    }

    /// Candidates whose key satisfies `pick`, with their keys, in order.
    pub(crate) fn candidates_with(&self, pick: impl FnMut(u64) -> bool) -> Vec<(Page, Key)> {
        let pages = self.table.candidates_with(pick).into_iter();
        pages
            .filter_map(|page| Some((page, self.known(page).candidate()?)))
            .collect()
    }
}

/// The account of mappings.
impl PageMap {
    pub(crate) fn vmas(&self) -> i64 {
        self.vmas
    }

    pub(crate) fn vmas_max(&self) -> i64 {
        self.vmas_max
    }

    /// Whether so many mappings more are allowed.
    pub(crate) fn has_vmas_for(&self, more: i64) -> bool {
        self.vmas + more <= self.vmas_max
    }

    /// The process's mappings were counted.
    pub(crate) fn set_vmas(&mut self, counted: usize) {
        self.vmas = i64::try_from(counted.saturating_sub(self.vmas_before)).unwrap_or(i64::MAX);
    }

    /// The kernel has refused one more.
    pub(crate) fn no_vma_is_left(&mut self) {
        self.vmas_max = self.vmas_max.min(self.vmas);
    }

    /// Whether a mapping begins between a page and the one before it, if that is its neighbour.
    fn begins(&self, page: Page) -> bool {
        let Some(before) = page.checked_sub(1).filter(|before| self.memory.adjacent(*before)) else {
            return false;
        };
        !self.backing(page).continues(self.backing(before))
    }

    /// A page's backing changes: boundaries at both of its ends come or go.
    fn note_boundaries(&mut self, page: Page, old: Backing, next: Backing) {
        let (before, behind) = self.memory.neighbours(page);
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
        self.vmas += i64::from(front + back);
        // A boundary between two chunks counts for both.
        let chunk = self.chunk_of(page);
        let pages = &self.memory.chunks()[chunk].pages;
        let (first, last) = (page == pages.start, page + 1 == pages.end);
        let mut add = |chunk: usize, change: i16| {
            let fragments = &mut self.chunks[chunk].fragments;
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

/// Transitions of pages.
impl PageMap {
    /// Makes a transition and draws its consequences. A wrong one is a bug of the engine: it stops here rather than at a
    /// guest's memory.
    fn set(&mut self, page: Page, next: PageState) {
        let old = self.state(page);
        assert!(
            old.may_become(next),
            "page {page} cannot go from {old:?} to {next:?}"
        );
        self.replace(page, old, next);
    }

    fn replace(&mut self, page: Page, old: PageState, next: PageState) {
        if old == next {
            return;
        }
        if let Some(key) = old.known.candidate()
            && next.known != old.known
            && !matches!(next.backing, Backing::Slot(_))
        {
            self.outbox.withdrawals.push(key.raw());
        }
        if old.backing == next.backing {
            self.table.replace(page, old, next);
            return;
        }
        if let Backing::Slot(slot) = old.backing {
            self.outbox.drop_ref(slot);
        }
        self.note_boundaries(page, old.backing, next.backing);
        self.table.replace(page, old, next);
    }

    fn requeue(&mut self, page: Page) {
        let chunk = self.chunk_of(page);
        self.chunks[chunk].pending = true;
    }

    /// A page was found written. `protected`: it was write-protected, so that it was written since the last look. Returns
    /// whether it waits for another look.
    pub(crate) fn note_written(&mut self, page: Page, protected: bool) -> bool {
        let state = self.state(page);
        let known = match (state.backing, state.known) {
            (Backing::Zero, _) | (Backing::Private, Known::Nothing | Known::KeyedInHuge(_)) => {
                Known::WriteProtected
            }
            (Backing::Private, Known::WriteProtected | Known::Volatile) => Known::Volatile,
            (Backing::Private, Known::Candidate(_)) if protected => Known::WriteProtected,
            _ => return false,
        };
        self.set(page, PageState::private(known));
        true
    }

    /// A page of a huge page has this key. A whole page's hash that was reported stays.
    pub(crate) fn key_in_huge(&mut self, page: Page, key: Key) {
        let state = self.state(page);
        let stays = match (state.backing, state.known) {
            (Backing::Private, Known::Candidate(old)) => old.is_full() || old == key,
            (Backing::Private, known) => matches!(known, Known::Pinned(_)),
            (backing, _) => backing != Backing::Zero,
        };
        if !stays {
            self.set(page, PageState::UNTRACKED);
            self.set(page, PageState::private(Known::KeyedInHuge(key)));
        }
    }

    /// No slot has a page's key: the store is told of it. Nothing happens to a page that is shared by now.
    pub(crate) fn sight(&mut self, page: Page, key: Key, pass: u64) {
        let backing = self.backing(page);
        if !matches!(backing, Backing::Private | Backing::OrphanedSlot(_)) {
            return;
        }
        let known = Known::Candidate(key);
        self.set(page, PageState { backing, known });
        let chunk = self.chunk_of(page);
        self.chunks[chunk].note_activity(pass);
        self.outbox.sightings.push(Sighting { page, key });
    }

    /// A candidate is not what it was: it is keyed anew, once it stands still.
    pub(crate) fn candidate_changed(&mut self, page: Page) {
        self.set(page, PageState::private(Known::WriteProtected));
        self.requeue(page);
    }

    /// A page that was to be merged is not, for now. One that was just published gives up the slot, and with it goes all
    /// knowledge of its key; one in a huge page is found again at the next look. Others stay candidates.
    pub(crate) fn defer(&mut self, page: Page, published: Option<Slot>) {
        if let Some(slot) = published {
            self.outbox.drop_ref(slot);
        }
        let PageState { backing, known } = self.state(page);
        if known.candidate().is_none() {
            return;
        }
        if published.is_some() && backing.maps_a_slot() {
            self.set(page, PageState::resting(backing));
            self.requeue(page);
        } else if backing != Backing::Private {
            // It stays a candidate.
        } else if published.is_some() {
            self.candidate_changed(page);
        } else if self.chunks[self.chunk_of(page)].huge {
            self.set(page, PageState::UNTRACKED);
        }
    }

    /// A page maps a slot.
    pub(crate) fn share(&mut self, page: Page, slot: Slot, reference: Reference) {
        self.set(page, PageState::resting(Backing::Slot(slot)));
        if reference == Reference::New {
            self.outbox.take_ref(slot);
        }
    }

    /// A private page lies in a mapping that would show this slot in its place.
    pub(crate) fn bridge(&mut self, page: Page, place: Slot) {
        self.set(page, PageState::resting(Backing::CopiedOnWrite(place)));
    }

    /// A page became the zero page.
    pub(crate) fn zero(&mut self, page: Page) {
        self.set(page, PageState::resting(Backing::Zero));
    }

    /// A page that was to be merged is where it was.
    pub(crate) fn not_merged(&mut self, page: Page, why: NotMerged, pass: u64) {
        let state = self.state(page);
        let known = match why {
            NotMerged::Pinned => Known::Pinned(Retry::after(state.known, pass)),
            NotMerged::Stayed => Known::WriteProtected,
            NotMerged::Returned => Known::Nothing,
        };
        if state.may_become(PageState::private(known)) {
            self.set(page, PageState::private(known));
        }
        self.requeue(page);
    }

    /// The kernel copied a shared page for a writer; the copy lies in the mapping of the store.
    pub(crate) fn copied_by_kernel(&mut self, page: Page) {
        let copied = self.backing(page).copied();
        self.set(page, PageState::resting(copied));
    }

    /// A page lies in fresh anonymous memory of its own: the service copied it.
    pub(crate) fn made_private(&mut self, page: Page) {
        self.set(page, PageState::UNTRACKED);
        self.requeue(page);
    }

    /// Forgets pages whose memory is not what it was: unmapped, or replaced by fresh memory, which nobody has pinned.
    pub(crate) fn forget(&mut self, pages: Range<Page>) {
        for page in pages {
            let old = self.state(page);
            // What was never looked at holds no memory of the table yet.
            if old != PageState::UNTRACKED {
                self.replace(page, old, PageState::UNTRACKED);
            }
        }
    }

    /// The store was lost: what maps its slots is keyed anew, and nothing that was to be told to it is kept.
    pub(crate) fn orphan_all(&mut self) {
        let mut before = Backing::Private;
        for page in (0..).take(self.memory.end()) {
            let PageState { backing, known } = self.state(page);
            let first = page == 0 || !self.memory.adjacent(page - 1);
            let begins = first || !backing.continues(before);
            before = backing;
            let known = match known {
                Known::Candidate(_) if backing == Backing::Private => Known::WriteProtected,
                Known::Candidate(_) | Known::KeyedInHuge(_) => Known::Nothing,
                known => known,
            };
            let backing = backing.orphaned(begins);
            self.set(page, PageState { backing, known });
            self.outbox.clear(); // nobody is told of any of this
        }
        self.chunks.iter_mut().for_each(ChunkState::forget_store);
    }
}

/// Transitions of chunks.
impl PageMap {
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
            self.vmas += VMAS_PER_HUGE_PAGE;
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

    /// From now on the memory is this one. Pages that stay have the numbers that they had.
    pub(crate) fn set_memory(&mut self, memory: Arc<Memory>) {
        let state_of = |chunk: &Chunk| {
            let there = self.memory.has(chunk.pages.start);
            let Some(at) = there.then(|| self.memory.chunk_of(chunk.pages.start)) else {
                return ChunkState::new();
            };
            let mut old = self.chunks[at];
            if self.memory.chunks()[at].pages != chunk.pages {
                // Not the 2 MiB any more that were watched.
                old.mixed = HugeState::default();
                old.forget_twins();
            }
            old
        };
        let chunks = memory.chunks().iter().map(state_of).collect();
        let before = self.count_boundaries();
        self.chunks = chunks;
        self.table.grow(memory.end());
        self.memory = memory;
        self.vmas += self.count_boundaries() - before;
    }

    /// Counts the boundaries of all memory, and those of each chunk, anew.
    fn count_boundaries(&mut self) -> i64 {
        let mut all = 0;
        for at in 0..self.chunks.len() {
            let pages = self.chunk_at(at).pages.clone();
            let within = pages.clone().filter(|page| self.begins(*page)).count();
            all += i64::try_from(within).unwrap_or(0);
            let behind = self.memory.adjacent(pages.end - 1) && self.begins(pages.end);
            self.chunks[at].fragments = u16::try_from(within + usize::from(behind)).unwrap_or(u16::MAX);
        }
        all
    }
}

#[cfg(test)]
mod tests;
