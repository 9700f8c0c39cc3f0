//! Backing off from pages that are shared and broken again and again.

use super::PageMap;
use crate::memory::layout::Page;
use crate::memory::worth::TICKS;

impl PageMap {
    /// Sharing pays that lasts for so many passes; 0: always. Pages whose sharing ends sooner are left alone for a while.
    pub(crate) fn set_pays_after(&mut self, passes: u32) {
        self.tick_period = u64::from(passes).div_ceil(TICKS.into());
    }

    /// Pages that are left alone so.
    pub(crate) fn paused(&self) -> u64 {
        self.pages.table().paused()
    }

    /// Times that sharing ended before it had paid.
    pub(crate) fn early_breaks(&self) -> u64 {
        self.early_breaks
    }

    /// The end of a pass. Pages that were left alone for long enough are looked at again.
    pub(crate) fn let_time_pass(&mut self, pass: u64) {
        if self.tick_period == 0 {
            return;
        }
        for at in 0..self.chunks.len() {
            let turn = pass + at as u64;
            if self.chunks[at].ticking && turn.is_multiple_of(self.tick_period) {
                self.tick(at, turn / self.tick_period);
            }
        }
    }

    /// Somebody who knows says that a page holds another content than before, or will before anybody reads it again: it is not left
    /// alone any more for what sharing the old one was worth.
    pub(super) fn content_replaced(&mut self, page: Page) {
        let worth = self.pages.table().worth(page);
        let next = worth.replaced();
        if next == worth {
            return;
        }
        self.pages.set_worth(page, next);
        if worth.is_paused() && self.backing(page).is_copied() {
            let chunk = self.chunk_of(page);
            self.chunks[chunk].look_at_copies_soon();
        }
    }

    /// The guest or its VMM has just filled a page. If it is shared for all that is known, it was copied: that is looked for soon.
    pub(super) fn filled(&mut self, page: Page) {
        if self.backing(page).maps_a_slot() {
            let chunk = self.chunk_of(page);
            self.chunks[chunk].note_overwritten();
        }
        self.content_replaced(page);
    }

    fn tick(&mut self, at: usize, number: u64) {
        let mut ticking = false;
        for page in self.memory().chunks()[at].pages.clone() {
            let worth = self.pages.table().worth(page);
            if worth.is_calm() {
                continue;
            }
            let next = worth.tick(number);
            ticking |= !next.is_calm();
            if next == worth {
                continue;
            }
            self.pages.set_worth(page, next);
            if worth.is_paused() && !next.is_paused() {
                self.chunks[at].pending = true;
                if self.backing(page).is_copied() {
                    self.chunks[at].look_at_copies_soon();
                }
            }
        }
        self.chunks[at].ticking = ticking;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Reference;
    use super::*;
    use crate::memory::hint::Hint;
    use crate::memory::layout::Memory;
    use crate::sys::page_size::{HUGE_SIZE, bytes};
    use std::sync::Arc;
    use vmm_dedup_protocol::Slot;

    fn map() -> PageMap {
        let memory = Memory::made_up(&[
            HUGE_SIZE..HUGE_SIZE + bytes(8),
            3 * HUGE_SIZE..3 * HUGE_SIZE + bytes(1),
        ]);
        let mut map = PageMap::new(Arc::new(memory), 1000, 0);
        map.set_pays_after(16);
        map
    }

    fn slot(n: u32) -> Slot {
        Slot::try_new(n).unwrap()
    }

    #[test]
    fn what_is_read_anew_or_free_is_not_left_alone_for_what_it_was() {
        let restless = || {
            let mut map = map();
            for page in [2, 3] {
                map.share(page, slot(30 + page), Reference::New);
            }
            map.broken_by_service(2);
            map.copied_by_kernel(3);
            map.looked_at_copies(0, false);
            map.end_visit(0, false);
            assert!([2, 3].into_iter().all(|page| map.is_paused(page)) && !map.copies_due(0));
            map
        };
        let lifts: [fn(&mut PageMap, Page); 3] = [
            |map, page| map.note_read(page),
            |map, page| assert!(map.say(page, Hint::FREE)),
            |map, page| assert!(map.say(page, Hint::WORTH)),
        ];
        for lift in lifts {
            let mut map = restless();
            [2, 3].into_iter().for_each(|page| lift(&mut map, page));
            assert!(map.paused() == 0 && map.copies_due(0) && map.chunk(0).pending);
        }
        // Other words say nothing of what it holds, and neither does one that was said before.
        let mut map = restless();
        assert!(map.say(2, Hint::SOON) && map.say(2, Hint::NONE) && map.is_paused(2));
        assert!(map.say(2, Hint::WORTH));
        map.share(2, slot(32), Reference::New);
        map.broken_by_service(2);
        assert!(map.say(2, Hint::WORTH.and(Hint::SOON)) && map.is_paused(2));
    }

    #[test]
    fn a_break_that_is_found_behind_a_read_was_by_that_read() {
        let mut map = map();
        map.share(2, slot(32), Reference::New);
        map.note_read(2);
        map.copied_by_kernel(2);
        assert_eq!((map.is_paused(2), map.early_breaks()), (false, 0));
    }

    #[test]
    fn who_fills_a_shared_page_has_copies_looked_for_and_a_free_page_waits_until_it_is_filled() {
        let fills: [fn(&mut PageMap, Page); 2] = [
            |map, page| map.note_read(page),
            |map, page| assert!(map.say(page, Hint::WORTH)),
        ];
        for fill in fills {
            let mut map = map();
            map.share(2, slot(32), Reference::New);
            fill(&mut map, 3);
            assert!(map.say(2, Hint::FREE) && !map.take_overwritten(0));
            fill(&mut map, 2);
            assert!(map.take_overwritten(0) && !map.take_overwritten(0));
        }
    }
}
