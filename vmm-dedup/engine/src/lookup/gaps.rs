//! Gaps between shared pages, as far as one mapping may bridge them ([`bridged_runs`](mod@crate::merge::bridged_runs)). The
//! store lays slots out with the gaps that their publisher tells it of. The places in them cost memory, so only pages that
//! could become exceptions make a gap: a page that lies in a mapping of the store has a place of its own.

use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use vmm_dedup_protocol::message::MAX_GAP;

/// Most exceptions in a row: copying more costs more than the mappings that they save.
const MOST_IN_A_ROW: u16 = 3;
const _: () = assert!(MOST_IN_A_ROW <= MAX_GAP);

/// Whether a run of so many shared pages may have so many exceptions.
pub(crate) fn is_worth_it(shared: usize, exceptions: usize) -> bool {
    exceptions <= shared
}

/// The gaps between pages that are published together, as far as a run may bridge them.
#[derive(Debug, Default)]
pub(crate) struct Gaps {
    last: Option<Page>,
    pages: usize,
    skipped: usize,
}

impl Gaps {
    /// Pages to be left out before this one. Pages come in any order; those that follow each other count.
    pub(crate) fn before(&mut self, map: &PageMap, page: Page) -> u16 {
        let gap = self.last.and_then(|last| gap(map, last, page));
        self.last = Some(page);
        match gap {
            Some(gap) if is_worth_it(self.pages, self.skipped + usize::from(gap)) => {
                self.pages += 1;
                self.skipped += usize::from(gap);
                gap
            }
            _ => {
                (self.pages, self.skipped) = (1, 0);
                0
            }
        }
    }
}

/// Pages between two, if they are few, all of one region, and none in a mapping of the store.
pub(crate) fn gap(map: &PageMap, a: Page, b: Page) -> Option<u16> {
    let gap = u16::try_from(b.checked_sub(a)?.checked_sub(1)?).ok()?;
    let bridges = gap <= MOST_IN_A_ROW
        && (a..b).all(|page| map.memory().adjacent(page))
        && (a + 1..b).all(|page| !map.backing(page).in_file_mapping());
    bridges.then_some(gap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::Memory;
    use crate::memory::page_map::Reference;
    use crate::sys::page_size::{HUGE_SIZE, bytes};
    use std::sync::Arc;
    use vmm_dedup_protocol::Slot;

    fn map() -> PageMap {
        let region = HUGE_SIZE..HUGE_SIZE + bytes(100);
        PageMap::new(Arc::new(Memory::made_up(&[region])), 1000, 0)
    }

    #[test]
    fn gaps_are_short_and_no_more_than_the_pages() {
        let (map, mut gaps) = (map(), Gaps::default());
        let pages = [3, 4, 6, 7, 8, 12, 14, 15, 30, 31, 29, 31, 34];
        let found = pages.map(|page| gaps.before(&map, page));
        //                  3  4  6  7  8  12 14 15 30 31 29 31 34
        assert_eq!(found, [0, 0, 1, 0, 0, 3, 1, 0, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn pages_of_the_store_make_no_gap() {
        let (mut map, mut gaps) = (map(), Gaps::default());
        map.share(5, Slot::try_new(1).unwrap(), Reference::New);
        map.share(9, Slot::try_new(2).unwrap(), Reference::New);
        map.copied_by_kernel(9);
        let found = [3, 4, 6, 7, 8, 10, 12].map(|page| gaps.before(&map, page));
        assert_eq!(found, [0, 0, 0, 0, 0, 0, 1]);
    }
}
