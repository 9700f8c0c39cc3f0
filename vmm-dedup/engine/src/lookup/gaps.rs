//! Gaps between shared pages, as far as one mapping may bridge them ([`bridged_runs`](mod@crate::merge::bridged_runs)). The
//! store lays slots out with the gaps that their publisher tells it of.

use crate::memory::layout::{Memory, Page};
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
    pub(crate) fn before(&mut self, memory: &Memory, page: Page) -> u16 {
        let gap = self.last.and_then(|last| gap(memory, last, page));
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

/// Pages between two, if they are few and all of one region.
pub(crate) fn gap(memory: &Memory, a: Page, b: Page) -> Option<u16> {
    let gap = u16::try_from(b.checked_sub(a)?.checked_sub(1)?).ok()?;
    (gap <= MOST_IN_A_ROW && (a..b).all(|page| memory.adjacent(page))).then_some(gap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::HostRange;
    use crate::sys::vma::Anonymous;

    #[test]
    fn gaps_are_short_and_no_more_than_the_pages() {
        let area = Anonymous::new(100).unwrap();
        let range = HostRange::try_new(area.base(), 100 * crate::sys::page_size::PAGE_SIZE).unwrap();
        let memory = Memory::new(&[range]).unwrap();
        let mut gaps = Gaps::default();
        let pages = [3, 4, 6, 7, 8, 12, 14, 15, 30, 31, 29, 31, 34];
        let found = pages.map(|page| gaps.before(&memory, page));
        //                  3  4  6  7  8  12 14 15 30 31 29 31 34
        assert_eq!(found, [0, 0, 1, 0, 0, 3, 1, 0, 0, 0, 0, 1, 0]);
    }
}
