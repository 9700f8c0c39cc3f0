//! The parts of the memory, and what their pages hold.

use crate::content::HUGE_PAGES;
use std::ops::Range;

/// Huge pages of each part.
pub(super) struct Parts {
    pub(super) hot: Range<usize>,
    pub(super) warm: Range<usize>,
    pub(super) cold: Range<usize>,
}

impl Parts {
    pub(super) fn of(chunks: usize) -> Self {
        let quarter = chunks / 4 / 2 * 2;
        let cold = chunks * 3 / 8 / 2 * 2;
        Self {
            hot: 0..quarter,
            warm: quarter..2 * quarter,
            cold: 2 * quarter..2 * quarter + cold,
        }
    }

    /// Content of a page: pages with the same number are equal. Neighbouring huge pages have their repeated parts, runs of
    /// eight pages, in common.
    pub(super) fn content(&self, page: usize) -> usize {
        if self.repeats(page) {
            page / HUGE_PAGES / 2 * HUGE_PAGES + page % HUGE_PAGES
        } else {
            page | 1 << 40
        }
    }

    /// Whether a page has a twin.
    pub(super) fn repeats(&self, page: usize) -> bool {
        let (chunk, run) = (page / HUGE_PAGES, page % HUGE_PAGES / 8);
        match chunk {
            c if self.hot.contains(&c) => run % 32 == 0,
            c if self.repetitive().contains(&c) => run % 2 == 0,
            _ => false,
        }
    }

    /// The huge pages of which half repeats: the warm and the cold ones.
    pub(super) fn repetitive(&self) -> Range<usize> {
        self.warm.start..self.cold.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn parts_repeat_as_the_help_says() {
        let parts = Parts::of(16);
        assert_eq!(
            [parts.hot.clone(), parts.warm.clone(), parts.cold.clone()],
            [0..4, 4..8, 8..14]
        );
        let mut copies: HashMap<usize, usize> = HashMap::new();
        (0..16 * HUGE_PAGES).for_each(|page| *copies.entry(parts.content(page)).or_default() += 1);
        let repeated = |chunk: usize| {
            let pages = chunk * HUGE_PAGES..(chunk + 1) * HUGE_PAGES;
            pages.filter(|page| copies[&parts.content(*page)] == 2).count()
        };
        assert_eq!([0, 5, 9, 15].map(repeated), [16, 256, 256, 0]);
    }
}
