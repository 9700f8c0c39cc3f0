//! What the guest says of each page, as far as the order and the choice of work depend on it. It never makes anything safe.
//!
//! A byte a page, in pieces of 512 pages, where anything is said.

use crate::memory::layout::Page;
use crate::sys::page_size::CHUNK_PAGES;
use std::fmt;
use std::ops::Range;

/// What is said of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hint(u8);

impl Hint {
    /// Nothing.
    pub(crate) const NONE: Self = Self(0);
    /// It is never to be shared, nor read for keys.
    pub(crate) const NEVER: Self = Self(1);
    /// It is free: its content does not matter until the guest writes it.
    pub(crate) const FREE: Self = Self(1 << 1);
    /// It will be overwritten soon.
    pub(crate) const SOON: Self = Self(1 << 2);
    /// It holds a piece of a file as it is on the disk, or a program calls it worth sharing.
    pub(crate) const WORTH: Self = Self(1 << 3);
    /// The VMM's word: it has just read a piece of a file into it, and no visit has seen it since.
    pub(crate) const READ: Self = Self(1 << 5);
    /// The service's own note: a visit saw the page after it was said to be free, so that a write since then shows.
    const WATCHED: Self = Self(1 << 4);

    /// This, and more.
    #[must_use]
    pub(crate) fn and(self, more: Self) -> Self {
        Self(self.0 | more.0)
    }

    fn without(self, less: Self) -> Self {
        Self(self.0 & !less.0)
    }

    /// Whether this is said.
    pub(crate) fn has(self, what: Self) -> bool {
        self.0 & what.0 != 0
    }

    fn comes_first(self) -> bool {
        self.has(Self::WORTH) || self.has(Self::READ)
    }

    /// Whether the page's key is not to be read.
    pub(crate) fn withholds(self) -> bool {
        self.has(Self(Self::NEVER.0 | Self::FREE.0 | Self::SOON.0))
    }
}

/// How far what was said led.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HintCounts {
    /// Pages merged of which the guest had said that they are worth it.
    pub(crate) merges: u64,
    /// Pages that were written although they were said to be free, or to hold a file as it is on the disk.
    pub(crate) wrong: u64,
}

/// Pages of a piece that are worth looking at, from which on the piece comes first.
const WORTH_A_PIECE: u16 = 128;

#[derive(Clone, Debug)]
struct Piece {
    hints: [Hint; CHUNK_PAGES],
    /// How many of them come first.
    worth: u16,
}

/// What is said of all pages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hints {
    pieces: Vec<Option<Box<Piece>>>,
    counts: HintCounts,
}

impl Hints {
    pub(crate) fn get(&self, page: Page) -> Hint {
        let (piece, place) = place_of(page);
        let piece = self.pieces.get(piece).and_then(Option::as_deref);
        piece.map_or(Hint::NONE, |piece| piece.hints[place])
    }

    fn set(&mut self, page: Page, hint: Hint) {
        let (at, place) = place_of(page);
        if hint == Hint::NONE && self.get(page) == Hint::NONE {
            return;
        }
        if self.pieces.len() <= at {
            self.pieces.resize(at + 1, None);
        }
        let piece = self.pieces[at].get_or_insert_with(|| {
            Box::new(Piece {
                hints: [Hint::NONE; CHUNK_PAGES],
                worth: 0,
            })
        });
        let old = std::mem::replace(&mut piece.hints[place], hint);
        piece.worth += u16::from(hint.comes_first());
        piece.worth -= u16::from(old.comes_first());
        if hint == Hint::NONE && piece.hints == [Hint::NONE; CHUNK_PAGES] {
            self.pieces[at] = None;
        }
    }

    /// This is said of a page now; whether it is news.
    pub(crate) fn say(&mut self, page: Page, hint: Hint) -> bool {
        let is_news = self.get(page).without(Hint::WATCHED.and(Hint::READ)) != hint;
        if is_news {
            self.set(page, hint);
        }
        is_news
    }

    /// Whether a visit that finds the page unwritten is to be noted.
    #[inline]
    pub(crate) fn await_visit(&self, page: Page) -> bool {
        if self.pieces.is_empty() {
            return false;
        }
        let hint = self.get(page);
        hint.has(Hint::READ) || hint.has(Hint::FREE) && !hint.has(Hint::WATCHED)
    }

    /// The VMM has read a piece of a file into a page, which is not free then.
    pub(crate) fn note_read(&mut self, page: Page) {
        let hint = self.get(page).without(Hint::FREE.and(Hint::WATCHED));
        self.set(page, hint.and(Hint::READ));
    }

    /// What the VMM has read into the page matters no more.
    pub(crate) fn forget_read(&mut self, page: Page) {
        let hint = self.get(page);
        if hint.has(Hint::READ) {
            self.set(page, hint.without(Hint::READ));
        }
    }

    /// Nothing is said of the page, by anybody.
    pub(crate) fn forget(&mut self, page: Page) {
        self.set(page, Hint::NONE);
    }

    /// A visit saw the page. `written`: since the one before.
    pub(crate) fn visit(&mut self, page: Page, written: bool) {
        self.forget_read(page);
        let hint = self.get(page);
        if !hint.has(Hint::FREE) {
            return;
        }
        if !written || !hint.has(Hint::WATCHED) {
            return self.set(page, hint.and(Hint::WATCHED));
        }
        self.counts.wrong += 1;
        self.set(page, hint.without(Hint::FREE.and(Hint::WATCHED)));
    }

    /// A page that had a key was found written.
    pub(crate) fn note_changed(&mut self, page: Page) {
        self.counts.wrong += u64::from(self.get(page).has(Hint::WORTH));
    }

    /// A page was merged.
    pub(crate) fn note_merged(&mut self, page: Page) {
        self.counts.merges += u64::from(self.get(page).has(Hint::WORTH));
    }

    pub(crate) fn counts(&self) -> HintCounts {
        self.counts
    }

    /// Whether anything is said of any page, or was.
    pub(crate) fn are_any(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Whether many pages around this one are worth looking at.
    pub(crate) fn are_worth(&self, page: Page) -> bool {
        let piece = self.pieces.get(place_of(page).0).and_then(Option::as_deref);
        piece.is_some_and(|piece| piece.worth >= WORTH_A_PIECE)
    }

    pub(crate) fn bytes(&self) -> usize {
        let pieces = self.pieces.iter().flatten().count();
        self.pieces.capacity() * size_of::<Option<Box<Piece>>>() + pieces * size_of::<Piece>()
    }
}

/// What the guest says of some pages, for a person to read: how many are what. A page may be several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SaidOf {
    free: usize,
    worth: usize,
    soon: usize,
    never: usize,
}

impl SaidOf {
    /// Counts some pages.
    pub(crate) fn add(&mut self, hints: &Hints, mut pages: Range<Page>) {
        while let Some(first) = pages.next() {
            let (at, place) = place_of(first);
            let Some(piece) = hints.pieces.get(at).and_then(Option::as_deref) else {
                // Nothing is said of any page of the piece.
                pages.start = pages
                    .end
                    .min(Page::try_from((at + 1) * CHUNK_PAGES).unwrap_or(Page::MAX));
                continue;
            };
            let hint = piece.hints[place];
            self.free += usize::from(hint.has(Hint::FREE));
            self.worth += usize::from(hint.has(Hint::WORTH));
            self.soon += usize::from(hint.has(Hint::SOON));
            self.never += usize::from(hint.has(Hint::NEVER));
        }
    }
}

impl fmt::Display for SaidOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = [
            (self.free, "free"),
            (self.worth, "worth sharing (files as on the disk, or marked)"),
            (self.soon, "soon overwritten"),
            (self.never, "never to be shared"),
        ];
        let said: Vec<String> = said
            .iter()
            .filter(|(pages, _)| *pages > 0)
            .map(|(pages, what)| format!("{pages} {what}"))
            .collect();
        if said.is_empty() {
            return Ok(());
        }
        write!(f, "pages by what the guest says: {}", said.join(", "))
    }
}

fn place_of(page: Page) -> (usize, usize) {
    (page as usize / CHUNK_PAGES, page as usize % CHUNK_PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_page_is_believed_until_a_write_is_seen_that_came_later() {
        let mut hints = Hints::default();
        assert!(hints.say(700, Hint::FREE) && !hints.say(700, Hint::FREE));
        // Written before it was said, or after: nobody knows.
        assert!(hints.await_visit(700) && !hints.await_visit(701));
        hints.visit(700, true);
        assert!(hints.get(700).withholds() && !hints.await_visit(700));
        hints.visit(700, false);
        assert!(hints.get(700).withholds() && hints.counts().wrong == 0);
        hints.visit(700, true);
        assert!(!hints.get(700).withholds() && hints.counts().wrong == 1);
        assert!(hints.say(700, Hint::FREE), "it is told again");
        hints.visit(701, true);
        assert_eq!(hints.get(701), Hint::NONE);
    }

    #[test]
    fn what_is_said_of_pages_is_told_by_kind() {
        let mut hints = Hints::default();
        hints.say(5000, Hint::FREE);
        hints.say(5001, Hint::NEVER.and(Hint::WORTH));
        let told = |pages| {
            let mut said = SaidOf::default();
            said.add(&hints, pages);
            said.to_string()
        };
        assert_eq!(told(0..5000), "");
        assert_eq!(
            told(0..9000),
            "pages by what the guest says: 1 free, 1 worth sharing (files as on the disk, or marked), 1 never to be shared"
        );
        assert_eq!(told(5000..5001), "pages by what the guest says: 1 free");
    }

    #[test]
    fn what_was_read_is_forgotten_with_its_page() {
        let mut hints = Hints::default();
        let all = Page::try_from(CHUNK_PAGES).unwrap();
        (0..all).for_each(|page| hints.note_read(page));
        assert!(hints.are_worth(0));
        (0..500).for_each(|page| hints.forget_read(page));
        hints.say(500, Hint::WORTH);
        (500..all).for_each(|page| hints.forget(page));
        assert!(!hints.are_worth(0));
        assert!((0..all).all(|page| hints.get(page) == Hint::NONE));
    }

    #[test]
    fn what_the_vmm_has_read_comes_first_until_it_is_seen() {
        let mut hints = Hints::default();
        hints.say(0, Hint::FREE);
        (0..128).for_each(|page| hints.note_read(page));
        assert!(hints.are_worth(0) && !hints.get(0).withholds() && hints.await_visit(0));
        (0..128).for_each(|page| hints.visit(page, page % 2 == 0));
        assert!(!hints.are_worth(0) && !hints.await_visit(0));
        assert!(hints.pieces.iter().all(Option::is_none));
    }

    #[test]
    fn what_is_marked_rests_however_often_it_is_written() {
        let mut hints = Hints::default();
        hints.say(1, Hint::NEVER.and(Hint::FREE));
        hints.say(2, Hint::SOON);
        for page in [1, 2].repeat(3) {
            hints.visit(page, true);
        }
        assert!(hints.get(1).withholds() && hints.get(1).has(Hint::NEVER) && !hints.get(1).has(Hint::FREE));
        assert!(hints.get(2).withholds());
        assert!(!Hint::WORTH.withholds());
    }

    #[test]
    fn pieces_come_first_while_they_are_worth_it_and_go_with_the_last_hint() {
        let mut hints = Hints::default();
        assert_eq!(hints.bytes(), 0);
        (512..640).for_each(|page| assert!(hints.say(page, Hint::WORTH)));
        assert!(hints.are_worth(1000) && !hints.are_worth(511) && !hints.are_worth(Page::MAX));
        hints.note_merged(600);
        hints.note_merged(700);
        hints.note_changed(600);
        assert_eq!(hints.counts(), HintCounts { merges: 1, wrong: 1 });
        (512..640).for_each(|page| assert!(hints.say(page, Hint::NONE)));
        assert!(!hints.are_worth(1000));
        assert!(hints.pieces.iter().all(Option::is_none));
    }
}
