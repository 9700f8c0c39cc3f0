//! Writers that walk through shared memory page by page: what they are about to write is broken along, so that the pages of a
//! walk cost few wake-ups and few mappings.
//!
//! A walk is known by a write right behind what was broken for the one before. Then as many pages are broken along as the walk
//! has written so far, so that there are never more of those that nobody writes than of those that somebody wrote.

use crate::sys::page_size::bytes;

/// Walks that are followed at a time: about as many as there are vCPUs that write.
const WALKS: usize = 16;
/// Most pages that are broken at once: a writer waits until all of them are copied.
const MOST: usize = 32;

/// The walks seen last.
#[derive(Debug, Default)]
pub(super) struct Foresight {
    walks: [Walk; WALKS],
    /// The one that is given up next.
    oldest: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Walk {
    /// Behind the last page that was broken for it.
    next: usize,
    /// Pages that were broken for it.
    pages: usize,
}

impl Foresight {
    /// How many pages to break for somebody who writes the page at this address, from that page on.
    pub(super) fn pages(&self, address: usize) -> usize {
        let walk = self.walks.iter().find(|walk| walk.next == address);
        walk.map_or(1, |walk| walk.pages.clamp(1, MOST))
    }

    /// So many were broken.
    pub(super) fn note(&mut self, address: usize, pages: usize) {
        let next = address + bytes(pages);
        if let Some(walk) = self.walks.iter_mut().find(|walk| walk.next == address) {
            walk.pages += pages;
            walk.next = next;
        } else {
            self.walks[self.oldest] = Walk { next, pages };
            self.oldest = (self.oldest + 1) % WALKS;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::PAGE_SIZE;

    const START: usize = 1 << 30;

    /// Breaks for writers at these pages; how many pages at each break.
    fn breaks(pages: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let (mut foresight, mut broken) = (Foresight::default(), std::collections::HashSet::new());
        let mut breaks = Vec::new();
        for page in pages {
            if broken.contains(&page) {
                continue;
            }
            let address = START + page * PAGE_SIZE;
            let len = foresight.pages(address);
            foresight.note(address, len);
            broken.extend(page..page + len);
            breaks.push(len);
        }
        breaks
    }

    #[test]
    fn a_walk_takes_few_breaks() {
        assert_eq!(breaks(0..64), [1, 1, 2, 4, 8, 16, 32]);
        assert_eq!(breaks(0..160)[7..], [32, 32, 32]);
    }

    #[test]
    fn walks_at_the_same_time_are_told_apart() {
        let both = (0..32).flat_map(|page| [page, 1000 + page]);
        assert_eq!(breaks(both), [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]);
    }

    #[test]
    fn single_writes_break_single_pages() {
        assert_eq!(breaks((0..100).map(|n| n * 3)), vec![1; 100]);
        assert_eq!(breaks((0..100).rev()), vec![1; 100]);
    }

    #[test]
    fn no_more_is_broken_in_vain_than_was_written() {
        for written in 1..200 {
            let broken: usize = breaks(0..written).iter().sum();
            assert!(
                broken - written <= written && broken - written < MOST,
                "{written}: {broken}"
            );
        }
    }
}
