//! What the guest says of pages, and what follows for their states.

use super::PageMap;
use crate::memory::hint::{Hint, HintCounts, SaidOf};
use crate::memory::layout::Page;
use crate::memory::page_state::{Backing, Known, PageState};
use std::ops::Range;

impl PageMap {
    /// What the guest says of a page.
    pub(crate) fn hint(&self, page: Page) -> Hint {
        self.hints.get(page)
    }

    /// Counts what the guest says of some pages.
    pub(crate) fn count_said(&self, pages: Range<Page>, to: &mut SaidOf) {
        to.add(&self.hints, pages);
    }

    /// Whether the guest says anything of its pages.
    pub(crate) fn has_hints(&self) -> bool {
        self.hints.are_any()
    }

    /// Whether a chunk comes first, since the guest calls much of it worth sharing.
    pub(crate) fn is_worth(&self, chunk: usize) -> bool {
        let pages = &self.chunk_at(chunk).pages;
        self.hints.are_worth(pages.start.midpoint(pages.end))
    }

    /// Whether a page that a visit finds written may be keyed by that visit, once it is protected: the guest calls it worth sharing, and it
    /// was not written between the last two visits, or the VMM has filled it since the last one. To be asked before the write is noted.
    pub(crate) fn keys_at_once(&self, page: Page) -> bool {
        let state = self.state(page);
        let was_still = matches!(
            state.known,
            Known::Nothing | Known::Keyed(_) | Known::Candidate(_)
        );
        let hint = self.hints.get(page);
        state.backing == Backing::Private
            && (hint.has(Hint::READ) || hint.has(Hint::WORTH) && was_still)
            && !self.is_withheld(page)
            && !self.is_paused(page)
    }

    pub(crate) fn hint_counts(&self) -> HintCounts {
        self.hints.counts()
    }

    /// The guest says this of a page from now on; whether that is news. A page that is to rest has no key any more: the store
    /// neither asks for it nor finds it.
    pub(crate) fn say(&mut self, page: Page, hint: Hint) -> bool {
        let before = self.hints.get(page);
        let is_news = self.hints.say(page, hint);
        if is_news {
            let has_become = |what| hint.has(what) && !before.has(what);
            if has_become(Hint::WORTH) {
                self.filled(page);
            } else if has_become(Hint::FREE) {
                self.content_replaced(page);
            }
            if hint.withholds() {
                self.forget_key(page);
            }
            self.requeue(page);
        }
        is_news
    }

    /// The VMM has read a piece of a file into a page.
    pub(crate) fn note_read(&mut self, page: Page) {
        self.hints.note_read(page);
        self.filled(page);
        self.requeue(page);
    }

    /// A visit saw a page. `written`: since the one before.
    pub(crate) fn see(&mut self, page: Page, written: bool) {
        self.hints.visit(page, written);
    }

    /// What the VMM has read into a chunk matters no more.
    pub(crate) fn forget_reads(&mut self, chunk: usize) {
        if self.hints.are_any() {
            let pages = self.chunk_at(chunk).pages.clone();
            pages.for_each(|page| self.hints.forget_read(page));
        }
    }

    /// Nothing is said of pages any more: they are others now.
    pub(crate) fn unsay(&mut self, pages: Range<Page>) {
        pages.for_each(|page| self.hints.forget(page));
    }

    fn forget_key(&mut self, page: Page) {
        match self.state(page) {
            PageState {
                known: Known::Candidate(_),
                ..
            } => self.key_anew(page),
            PageState {
                backing: Backing::Private,
                known: Known::Keyed(_),
            } => self.set(page, PageState::UNTRACKED),
            PageState {
                backing,
                known: Known::Keyed(_),
            } => self.set(page, PageState::unkeyed(backing)),
            _ => {}
        }
    }
}
