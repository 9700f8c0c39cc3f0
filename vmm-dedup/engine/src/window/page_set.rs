//! A set of pages within 2 MiB.

use crate::sys::page_size::CHUNK_PAGES;
use std::ops::Range;

const WORDS: usize = CHUNK_PAGES / 64;

/// Offsets of pages, below [`CHUNK_PAGES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageSet([u64; WORDS]);

impl PageSet {
    pub(crate) fn of(pages: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut set = Self::default();
        pages.into_iter().for_each(|run| set.insert(run));
        set
    }

    pub(crate) fn insert(&mut self, pages: Range<usize>) {
        pages.for_each(|page| self.0[page / 64] |= 1 << (page % 64));
    }

    pub(crate) fn remove(&mut self, pages: Range<usize>) {
        pages.for_each(|page| self.0[page / 64] &= !(1 << (page % 64)));
    }

    pub(crate) fn contains(&self, page: usize) -> bool {
        self.0[page / 64] & 1 << (page % 64) != 0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The first run at or behind a page.
    fn run_from(&self, page: usize) -> Option<Range<usize>> {
        let start = (page..CHUNK_PAGES).find(|page| self.contains(*page))?;
        let end = (start..CHUNK_PAGES).find(|page| !self.contains(*page));
        Some(start..end.unwrap_or(CHUNK_PAGES))
    }

    /// Runs of pages, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (set, mut at) = (*self, 0);
        std::iter::from_fn(move || {
            let run = set.run_from(at)?;
            at = run.end;
            Some(run)
        })
    }

    /// Runs of pages within a range, in order.
    pub(crate) fn runs_within(&self, pages: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let mut within = *self;
        within.remove(0..pages.start);
        within.remove(pages.end..CHUNK_PAGES);
        within.runs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_across_words() {
        let mut set = PageSet::of([0..2, 60..70, 511..512]);
        assert_eq!(set.runs().collect::<Vec<_>>(), [0..2, 60..70, 511..512]);
        assert_eq!(set.runs_within(&(1..65)).collect::<Vec<_>>(), [1..2, 60..65]);
        set.remove(64..66);
        assert_eq!(set.runs().nth(2), Some(66..70));
        assert!(set.len() == 11 && set.contains(63) && !set.contains(64));
        set.remove(0..CHUNK_PAGES);
        assert!(set.is_empty() && set.runs().next().is_none());
    }
}
