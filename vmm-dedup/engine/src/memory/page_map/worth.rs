//! Backing off from pages that are shared and broken again and again.

use super::PageMap;
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
