//! What the guest says of pages, and what follows for their states.

use super::PageMap;
use crate::memory::hint::{Hint, HintCounts};
use crate::memory::layout::Page;
use crate::memory::page_state::{Backing, Known, PageState};
use std::ops::Range;

impl PageMap {
    /// What the guest says of a page.
    pub(crate) fn hint(&self, page: Page) -> Hint {
        self.hints.get(page)
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

    pub(crate) fn hint_counts(&self) -> HintCounts {
        self.hints.counts()
    }

    /// The guest says this of a page from now on; whether that is news. A page that is to rest has no key any more: the store
    /// neither asks for it nor finds it.
    pub(crate) fn say(&mut self, page: Page, hint: Hint) -> bool {
        let is_news = self.hints.say(page, hint);
        if is_news {
            if hint.withholds() {
                self.forget_key(page);
            }
            self.requeue(page);
        }
        is_news
    }

    /// A visit saw a page. `written`: since the one before.
    pub(crate) fn see(&mut self, page: Page, written: bool) {
        self.hints.visit(page, written);
    }

    /// Nothing is said of pages any more: they are others now.
    pub(crate) fn unsay(&mut self, pages: Range<Page>) {
        pages.for_each(|page| {
            self.hints.say(page, Hint::NONE);
        });
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
