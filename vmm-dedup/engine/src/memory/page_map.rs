//! The owner of what is known of guest memory: the states of pages and of chunks, and how many mappings they take.
//!
//! Every change of a page's state goes through a transition here. A transition draws all consequences: what the store is to
//! be told goes to the [`Outbox`], chunks that must be visited again are marked pending, and the estimate of mappings
//! follows. Nobody else counts mappings or references, or tells the store of pages.
//!
//! The rules:
//! - a page that begins to map a slot takes a reference, unless the store counts one already since the page was published; a
//!   page that ceases to map a slot gives it back;
//! - a candidate that ceases to be one withdraws its key, unless it found a slot: then the key is in the index;
//! - two neighbouring pages lie in one mapping or not, which [`PlacedPages`] counts.
//!
//! Pure: there is no system call in here, and tests need no kernel.

use crate::memory::bitmap::Bits;
use crate::memory::chunk_state::ChunkState;
use crate::memory::hint::{Hint, Hints};
use crate::memory::layout::{Chunk, Memory, Page};
use crate::memory::mappings::Mappings;
use crate::memory::outbox::{Outbox, Sighting};
use crate::memory::page_state::{Backing, Counts, Edges, Known, PageState, PinnedUntil};
use crate::memory::placed_pages::PlacedPages;
use crate::memory::worth::Worth;
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
    pages: PlacedPages,
    chunks: Vec<ChunkState>,
    outbox: Outbox,
    /// What the guest says.
    hints: Hints,
    /// Pages that were candidates at the last look for cold ones, and have not become candidates again; `None`: nobody looks.
    still: Option<Bits>,
    /// Passes from one tick of [`Worth`] to the next; 0: it does not matter.
    tick_period: u64,
    /// Times that sharing ended before it had paid.
    early_breaks: u64,
}

impl PageMap {
    /// All memory is private, and nothing is known of it. `vmas_max`: mappings that the service may add to those that the
    /// process has now, `vmas_before`.
    pub(crate) fn new(memory: Arc<Memory>, vmas_max: i64, vmas_before: usize) -> Self {
        let chunks = memory.chunks().iter().map(|_| ChunkState::new());
        Self {
            chunks: chunks.collect(),
            pages: PlacedPages::new(memory, Mappings::new(vmas_max, vmas_before)),
            outbox: Outbox::default(),
            hints: Hints::default(),
            still: None,
            tick_period: 0,
            early_breaks: 0,
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        self.pages.memory()
    }

    #[inline]
    pub(crate) fn state(&self, page: Page) -> PageState {
        self.pages.state(page)
    }

    #[inline]
    pub(crate) fn backing(&self, page: Page) -> Backing {
        self.state(page).backing
    }

    #[inline]
    pub(crate) fn known(&self, page: Page) -> Known {
        self.state(page).known
    }

    /// Whether a visit that finds the page unwritten has nothing to do with it.
    #[inline]
    pub(crate) fn is_settled(&self, page: Page) -> bool {
        self.pages.table().is_settled(page) && !self.hints.await_visit(page)
    }

    /// Whether a page's key is not to be read, since the guest says so.
    pub(crate) fn is_withheld(&self, page: Page) -> bool {
        let hint = self.hints.get(page);
        // What keeps a store's memory alive that is gone comes home by way of its key.
        let comes_home = || matches!(self.backing(page), Backing::OrphanedSlot(_));
        hint.has(Hint::NEVER) || hint.withholds() && !comes_home()
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
        self.memory().chunk_of(page)
    }

    /// Address and pages of a chunk.
    pub(crate) fn chunk_at(&self, at: usize) -> &Chunk {
        &self.memory().chunks()[at]
    }

    pub(crate) fn chunks(&self) -> &[ChunkState] {
        &self.chunks
    }

    pub(crate) fn chunk(&self, at: usize) -> &ChunkState {
        &self.chunks[at]
    }

    pub(crate) fn counts(&self) -> Counts {
        self.pages.table().counts()
    }

    pub(crate) fn bytes(&self) -> usize {
        let still = self.still.as_ref().map_or(0, Bits::bytes);
        self.pages.table().bytes() + size_of_val(self.chunks.as_slice()) + self.hints.bytes() + still
    }

    /// From now on counts how often keys occur.
    pub(crate) fn count_repetition(&mut self) {
        self.pages.count_repetition();
    }

    /// How many pages have this key, at most; 0 if that is not counted.
    pub(crate) fn repetition(&self, key: Key) -> u64 {
        self.pages.table().repetition(key)
    }

    /// From now on [`Self::stood_still`] tells which pages stand still.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn watch_for_cold(&mut self) {
        if self.still.is_none() {
            self.still = Some(Bits::new(self.memory().end()));
        }
    }

    /// Looks at a page: whether it is private, has a key and no twin, and was so at the last look without a write since that was
    /// noticed.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn stood_still(&mut self, page: Page) -> bool {
        let Some(still) = &self.still else {
            return false;
        };
        let is_candidate = self.private_candidate(page).is_some();
        let stood_still = is_candidate && still.get(page);
        still.set(page, is_candidate);
        stood_still
    }

    /// Whether a page is somebody else's to register for now.
    pub(crate) fn is_lent(&self, page: Page) -> bool {
        self.memory().has(page) && self.chunk(self.chunk_of(page)).lent
    }
}

/// Transitions of pages.
impl PageMap {
    /// Makes a transition and draws its consequences. A wrong one is a bug of the engine: it stops here rather than at a
    /// guest's memory.
    fn set(&mut self, page: Page, next: PageState) {
        let place = match next.backing {
            Backing::Slot(slot) => Some(slot),
            _ => None,
        };
        self.set_at(page, next, place);
    }

    /// `place`: the slot that the mapping has at the page, if it comes to lie in one.
    fn set_at(&mut self, page: Page, next: PageState, place: Option<Slot>) {
        let old = self.state(page);
        if old == next {
            return;
        }
        assert!(
            old.may_become(next),
            "page {page} cannot go from {old:?} to {next:?}"
        );
        self.replace(page, old, next, place);
    }

    fn replace(&mut self, page: Page, old: PageState, next: PageState, place: Option<Slot>) {
        if let Some(key) = old.known.candidate()
            && next.known != old.known
            && !matches!(next.backing, Backing::Slot(_))
        {
            self.outbox.withdrawals.push_back(key.raw());
        }
        if let Backing::Slot(slot) = old.backing
            && next.backing != old.backing
        {
            self.outbox.drop_ref(slot);
        }
        self.pages.replace(&mut self.chunks, page, old, next, place);
    }

    /// A page is to be looked at: its chunk is visited again.
    pub(crate) fn requeue(&mut self, page: Page) {
        let chunk = self.chunk_of(page);
        self.chunks[chunk].pending = true;
    }

    /// A page was found written. `protected`: it was write-protected, so that it was written since the last look. Returns
    /// whether it waits for another look.
    pub(crate) fn note_written(&mut self, page: Page, protected: bool) -> bool {
        let state = self.state(page);
        let known = match (state.backing, state.known) {
            (Backing::Zero, _) | (Backing::Private, Known::Nothing | Known::Keyed(_)) => {
                Known::WriteProtected
            }
            (Backing::Private, Known::WriteProtected | Known::Volatile) => Known::Volatile,
            (Backing::Private, Known::Candidate(_)) if protected => {
                self.hints.note_changed(page);
                Known::WriteProtected
            }
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
            // It is looked at again and again.
            (Backing::Private, Known::Keyed(old)) => old == key,
            (Backing::Private, known) => matches!(known, Known::Pinned(_)),
            (backing, _) => backing != Backing::Zero,
        };
        if !stays && !self.is_withheld(page) {
            self.set(page, PageState::UNTRACKED);
            self.set(page, PageState::private(Known::Keyed(key)));
        }
    }

    /// No slot has a page's key: the store is told of it. Nothing happens to a page that is shared by now, or of which the guest
    /// has said meanwhile that it is to rest.
    pub(crate) fn sight(&mut self, page: Page, key: Key, pass: u64) {
        let backing = self.backing(page);
        let may_be_keyed =
            matches!(backing, Backing::Private | Backing::OrphanedSlot(_)) || backing.is_copied();
        if !may_be_keyed || self.is_withheld(page) {
            return;
        }
        let known = Known::Candidate(key);
        self.set(page, PageState { backing, known });
        if let Some(still) = &self.still {
            still.set(page, false);
        }
        let chunk = self.chunk_of(page);
        self.chunks[chunk].note_activity(pass);
        self.outbox.sightings.push_back(Sighting { page, key });
    }

    /// A candidate is not what it was: it is keyed anew, once it stands still.
    pub(crate) fn candidate_changed(&mut self, page: Page) {
        self.set(page, PageState::private(Known::WriteProtected));
        self.requeue(page);
    }

    /// A page that was to be merged is not, for now. One that was just published gives up the slot, and with it goes all
    /// knowledge of its key; one in a huge page is found again at the next look. Others stay candidates.
    pub(crate) fn defer(&mut self, page: Page, published: Option<Slot>) {
        self.give_up_published(published);
        let PageState { backing, known } = self.state(page);
        if known.candidate().is_none() {
            return;
        }
        if published.is_some() {
            self.key_anew(page);
        } else if backing == Backing::Private && self.chunks[self.chunk_of(page)].huge {
            self.set(page, PageState::UNTRACKED);
        }
    }

    /// A candidate was published, or should have been, and is not shared: nothing is known of its key any more.
    pub(crate) fn key_anew(&mut self, page: Page) {
        let PageState { backing, known } = self.state(page);
        if known.candidate().is_none() {
            return;
        }
        if backing.in_file_mapping() {
            self.set(page, PageState::unkeyed(backing));
            self.requeue(page);
            let chunk = self.chunk_of(page);
            self.chunks[chunk].look_at_copies_soon();
        } else if backing == Backing::Private {
            self.candidate_changed(page);
        }
    }

    /// A page that was published is not merged, and is noted elsewhere or gone: the reference that the store counts for it is
    /// given back.
    pub(crate) fn give_up_published(&mut self, published: Option<Slot>) {
        if let Some(slot) = published {
            self.outbox.drop_ref(slot);
        }
    }

    /// A page maps a slot.
    pub(crate) fn share(&mut self, page: Page, slot: Slot, reference: Reference) {
        assert!(
            !matches!(self.backing(page), Backing::Slot(_)),
            "page {page} cannot go from one slot to another"
        );
        self.hints.note_merged(page);
        self.set_slot(page, slot, reference);
        self.note_shared(page);
    }

    fn set_slot(&mut self, page: Page, slot: Slot, reference: Reference) {
        self.set(page, PageState::unkeyed(Backing::Slot(slot)));
        if reference == Reference::New {
            self.outbox.take_ref(slot);
        }
    }

    /// The page of the slot that a page maps has moved: the page maps the new one.
    pub(crate) fn follow(&mut self, page: Page, slot: Slot) {
        debug_assert!(matches!(self.backing(page), Backing::Slot(_)));
        self.set_slot(page, slot, Reference::New);
    }

    /// A private page lies in a mapping that would show this slot in its place.
    pub(crate) fn bridge(&mut self, page: Page, place: Slot) {
        let edges = self.pages.edges_of(page, place);
        let state = PageState::unkeyed(Backing::CopiedOnWrite(edges));
        self.set_at(page, state, Some(place));
        // It may have a twin later, as any copy.
        let chunk = self.chunk_of(page);
        self.chunks[chunk].look_at_copies_soon();
    }

    /// A page's place is the packed pages' from now on: its key is not the store's to find any more.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn pack(&mut self, page: Page) {
        self.set(page, PageState::unkeyed(Backing::Packed));
    }

    /// A page that was packed is back, in memory of its own that is tracked again.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn unpack(&mut self, page: Page) {
        self.set(page, PageState::UNTRACKED);
        self.requeue(page);
    }

    /// A page became the zero page.
    pub(crate) fn zero(&mut self, page: Page) {
        self.set(page, PageState::unkeyed(Backing::Zero));
    }

    /// A page that was the zero page has memory of its own.
    pub(crate) fn fill(&mut self, page: Page) {
        self.set(page, PageState::UNTRACKED);
        self.requeue(page);
    }

    /// A page that was to be merged is where it was.
    pub(crate) fn not_merged(&mut self, page: Page, why: NotMerged, pass: u64) {
        let state = self.state(page);
        let known = match why {
            NotMerged::Pinned => Known::Pinned(PinnedUntil::after(state.known, pass)),
            NotMerged::Stayed => Known::WriteProtected,
            NotMerged::Returned => Known::Nothing,
        };
        // (A packed page is the packer's: nothing but its return makes it private.)
        if !state.backing.is_with_packer() && state.may_become(PageState::private(known)) {
            self.set(page, PageState::private(known));
        }
        self.requeue(page);
    }

    /// The kernel copied a shared page for a writer; the copy lies in the mapping of the store.
    pub(crate) fn copied_by_kernel(&mut self, page: Page) {
        self.note_break(page);
        let backing = self.backing(page);
        let (before, behind) = self.memory().neighbours(page);
        let edges = Edges {
            begins: !(before && backing.continues(self.backing(page - 1))),
            ends: !(behind && self.backing(page + 1).continues(backing)),
        };
        self.set(page, PageState::unkeyed(backing.copied(edges)));
        let chunk = self.chunk_of(page);
        self.chunks[chunk].look_at_copies_soon();
    }

    /// A page that the kernel had copied has this key, or one that is not known any more. It was not reported to the store.
    pub(crate) fn key_copy(&mut self, page: Page, key: Option<Key>) {
        let known = key.map_or(Known::Nothing, Known::Keyed);
        let backing = self.backing(page);
        self.set(page, PageState { backing, known });
        let chunk = self.chunk_of(page);
        self.chunks[chunk].look_at_copies_soon();
    }

    /// Nothing is to be known of a page that the kernel had copied, and no store to hear of it: it is looked at when the others
    /// of its chunk are.
    pub(crate) fn forget_copy(&mut self, page: Page) {
        let backing = self.backing(page);
        self.set(page, PageState::unkeyed(backing));
    }

    /// A page that the kernel had copied may be pinned, for all that can be told: it is left alone for some passes.
    pub(crate) fn copy_may_be_pinned(&mut self, page: Page, pass: u64) {
        let PageState { backing, known } = self.state(page);
        let retry = PinnedUntil::after(known, pass);
        let known = Known::Pinned(retry);
        self.set(page, PageState { backing, known });
        let chunk = self.chunk_of(page);
        self.chunks[chunk].look_at_copies_within(retry.pause());
    }

    /// A copy moved along with its neighbours: the mapping that it lies in now would show this slot in its place.
    pub(crate) fn carry(&mut self, page: Page, place: Slot) {
        let edges = self.pages.edges_of(page, place);
        let PageState { known, .. } = self.state(page);
        let backing = Backing::CopiedOnWrite(edges);
        self.set_at(page, PageState { backing, known }, Some(place));
    }

    /// The service copied a shared page for a writer, into memory of its own.
    pub(crate) fn broken_by_service(&mut self, page: Page) {
        self.note_break(page);
        self.made_private(page);
    }

    fn note_break(&mut self, page: Page) {
        let chunk = self.chunk_of(page);
        self.chunks[chunk].thp.note_break();
        self.note_broken(page);
    }

    /// A page lies in fresh anonymous memory of its own: the service copied it.
    pub(crate) fn made_private(&mut self, page: Page) {
        self.set(page, PageState::UNTRACKED);
        self.note_ended(page);
        self.requeue(page);
    }

    /// Forgets pages whose memory is not what it was: unmapped, or replaced by fresh memory, which nobody has pinned.
    pub(crate) fn forget(&mut self, pages: Range<Page>) {
        for page in pages {
            let old = self.state(page);
            // What was never looked at holds no memory of the table yet.
            if old != PageState::UNTRACKED {
                self.replace(page, old, PageState::UNTRACKED, None);
            }
            if self.pages.table().worth(page) != Worth::default() {
                self.pages.set_worth(page, Worth::default());
            }
        }
    }

    /// The store was lost: what maps its slots is keyed anew, and nothing that was to be told to it is kept.
    pub(crate) fn orphan_all(&mut self) {
        let mut before = Backing::Private;
        for page in (0..).take(self.memory().end()) {
            let PageState { backing, known } = self.state(page);
            let first = page == 0 || !self.memory().adjacent(page - 1);
            let begins = first || !backing.continues(before);
            before = backing;
            let known = match known {
                Known::Candidate(_) if backing == Backing::Private => Known::WriteProtected,
                Known::Candidate(_) | Known::Keyed(_) => Known::Nothing,
                known => known,
            };
            let backing = backing.orphaned(begins);
            self.set(page, PageState { backing, known });
            self.outbox.clear(); // nobody is told of any of this
        }
        self.chunks.iter_mut().for_each(ChunkState::forget_store);
    }
}

/// What sharing pages was worth; [`worth`](mod@worth) lets time pass.
impl PageMap {
    /// Whether a page is left alone since sharing it did not pay lately.
    #[inline]
    pub(crate) fn is_paused(&self, page: Page) -> bool {
        self.pages.table().worth(page).is_paused()
    }

    fn note_shared(&mut self, page: Page) {
        self.change_worth(page, Worth::shared);
    }

    fn note_broken(&mut self, page: Page) {
        self.change_worth(page, Worth::broken);
        self.early_breaks += u64::from(self.is_paused(page));
    }

    fn note_ended(&mut self, page: Page) {
        self.change_worth(page, Worth::ended);
    }

    fn change_worth(&mut self, page: Page, change: fn(Worth) -> Worth) {
        if self.tick_period > 0 {
            let worth = change(self.pages.table().worth(page));
            self.pages.set_worth(page, worth);
            let chunk = self.chunk_of(page);
            self.chunks[chunk].ticking |= !worth.is_calm();
        }
    }
}

mod budget;
mod chunks;
mod finding;
mod hints;
mod in_file;
mod telling;
mod worth;

#[cfg(test)]
mod tests;
