//! One bit for each page, written by one thread and read by others.

use crate::memory::layout::Page;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits by page number.
#[derive(Debug)]
pub(crate) struct Bits(Vec<AtomicU64>);

impl Bits {
    pub(crate) fn new(pages: usize) -> Self {
        Self((0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// A copy with room for `pages` pages.
    pub(crate) fn resized(&self, pages: usize) -> Self {
        let copy = Self::new(pages);
        for (to, from) in copy.0.iter().zip(&self.0) {
            to.store(from.load(Ordering::Acquire), Ordering::Relaxed);
        }
        copy
    }

    pub(crate) fn get(&self, page: Page) -> bool {
        let word = self.0.get(page as usize / 64);
        word.is_some_and(|w| w.load(Ordering::Acquire) & mask(page) != 0)
    }

    pub(crate) fn set(&self, page: Page, value: bool) {
        let word = &self.0[page as usize / 64];
        if value {
            word.fetch_or(mask(page), Ordering::Release);
        } else {
            word.fetch_and(!mask(page), Ordering::Release);
        }
    }

    /// Sets bits; those of neighbours at once.
    pub(crate) fn set_all(&self, pages: impl Iterator<Item = Page>) {
        let (mut at, mut bits) = (0, 0);
        for page in pages {
            let word = page as usize / 64;
            if word != at {
                self.insert(at, std::mem::take(&mut bits));
                at = word;
            }
            bits |= mask(page);
        }
        self.insert(at, bits);
    }

    fn insert(&self, word: usize, bits: u64) {
        if bits != 0 {
            self.0[word].fetch_or(bits, Ordering::Release);
        }
    }

    /// Runs of set bits among some pages, in order.
    pub(crate) fn runs(&self, pages: Range<Page>) -> Vec<Range<Page>> {
        let mut runs: Vec<Range<Page>> = Vec::new();
        let end = pages
            .end
            .min(Page::try_from(self.0.len() * 64).unwrap_or(Page::MAX));
        let mut page = pages.start;
        while page < end {
            if page.is_multiple_of(64) && is_empty(&self.0[page as usize / 64]) {
                page = page.saturating_add(64);
                continue;
            }
            if self.get(page) {
                match runs.last_mut() {
                    Some(last) if last.end == page => last.end += 1,
                    _ => runs.push(page..page + 1),
                }
            }
            page += 1;
        }
        runs
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

fn mask(page: Page) -> u64 {
    1 << (page % 64)
}

fn is_empty(word: &AtomicU64) -> bool {
    word.load(Ordering::Acquire) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_across_words() {
        let bits = Bits::new(300);
        let set = [0, 1, 63, 64, 65, 200, 299];
        set.iter().for_each(|page| bits.set(*page, true));
        assert_eq!(bits.runs(0..300), [0..2, 63..66, 200..201, 299..300]);
        assert_eq!(bits.runs(64..210), [64..66, 200..201]);
        bits.set(64, false);
        assert_eq!(bits.runs(60..70), [63..64, 65..66]);
    }

    #[test]
    fn many_are_set_as_single_ones_are() {
        let (all, each) = (Bits::new(300), Bits::new(300));
        let pages = [1, 2, 63, 64, 70, 200, 3, 299];
        all.set_all(pages.into_iter());
        pages.iter().for_each(|page| each.set(*page, true));
        assert_eq!(all.runs(0..300), each.runs(0..300));
        all.set_all(std::iter::empty());
        assert_eq!(all.runs(0..300), each.runs(0..300));
    }

    #[test]
    fn growing_keeps_what_was_set() {
        let bits = Bits::new(10);
        bits.set(9, true);
        let bits = bits.resized(1000);
        bits.set(999, true);
        assert_eq!(bits.runs(0..1000), [9..10, 999..1000]);
    }
}
