//! Huge pages within a pass: sampling their use, building them again, and what repeats in them.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::merge::moving_out;
use crate::scan::order::Chunks;
use crate::scan::pass::Pass;
use crate::thp::duplicates::{self, Judgement};
use crate::thp::{collapse, split, zeros};
use std::time::Instant;

/// Tries in a pass to build a huge page of what is being written.
const TRIES: usize = 4;

impl Pass {
    /// Samples the use of memory, and builds huge pages again of what is hot.
    pub(super) fn watch_use(&mut self) -> Result<(), Error> {
        let Some(mut round) = self.monitor.begin_round(&mut self.map, &self.space.uffd) else {
            return Ok(());
        };
        while let Some(batch) = round.next_batch() {
            // A page that is to go back and cannot be moved is copied back, and a write by a plain reference would be lost with the
            // one that was there. What is left of the round is sampled by another one, which is due at once.
            if !self.direct_io.glance_again() {
                return Ok(());
            }
            let (map, space) = (&mut self.map, &mut self.space);
            self.monitor.sample(map, space, &mut self.account, &batch);
            self.account.lap(|cpu| &mut cpu.monitor);
            self.yield_and_poll()?;
        }
        self.monitor.end_round(&self.map, &mut self.account, &round);
        self.build_again(round.due)
    }

    /// Builds huge pages of what is hot, for speed: no page is shared sooner or later by it. Where the kernel copied a page for a
    /// writer meanwhile it is tried again after the others.
    fn build_again(&mut self, due: bool) -> Result<(), Error> {
        let (monitor, map) = (&self.monitor, &mut self.map);
        let all = 0..map.chunks().len();
        let mut left: Vec<usize> = all.filter(|at| monitor.wants_collapse(map, *at, due)).collect();
        for tries in (0..TRIES).rev() {
            for at in std::mem::take(&mut left) {
                if self.build_one_again(at, tries)? {
                    left.push(at);
                }
            }
        }
        Ok(())
    }

    /// Tries to build one, after which there are so many tries; whether it is to be tried again.
    fn build_one_again(&mut self, at: usize, tries: usize) -> Result<bool, Error> {
        if !self.direct_io.glance() {
            return Ok(false);
        }
        self.move_copies_of_chunk_out(at)?;
        let pages = self.map.chunk_at(at).pages.clone();
        self.space.bring_back(&mut self.map, &pages);
        // It may have taken long.
        if !self.direct_io.glance() {
            return Ok(false);
        }
        let (map, space) = (&mut self.map, &mut self.space);
        let copied = collapse::collapse(map, space, &mut self.account, self.number, at);
        let mut again = false;
        if copied {
            let (healer, mut with) = self.replacing();
            // Each try that takes a fork holds up the VM.
            let tells = moving_out::can_move(&mut with, healer) && !healer.forks_tell();
            again = tells && tries > 0;
            if !again {
                collapse::put_off_copied(&mut self.map, &mut self.account, at, tells);
            }
        }
        self.account.lap(|cpu| &mut cpu.merge);
        self.show_progress();
        self.yield_and_poll()?;
        Ok(again)
    }

    /// Lets pages that the kernel copied leave the mappings of the store, so that a huge page can be built of them; those that
    /// may be pinned stay.
    fn move_copies_of_chunk_out(&mut self, at: usize) -> Result<(), Error> {
        let found = self.space.find_copied_in(&mut self.map, &mut self.account, at);
        if found.is_err() {
            // It was noted. Building finds out.
            return Ok(());
        }
        let pages = self.map.chunk_at(at).pages.clone();
        let copies: Vec<Page> = pages.filter(|page| self.map.backing(*page).is_copied()).collect();
        self.move_copies_out(&copies).map(drop)
    }

    /// Looks at the huge pages that are due: what repeats in them, and what is to be split or given up.
    pub(super) fn look_at_huge_pages(&mut self) -> Result<(), Error> {
        let mut chunks = Chunks::new(&self.map);
        let is_due = |map: &mut PageMap, at: usize| map.chunk(at).huge && map.look_due(at);
        while let Some(at) = chunks.next(&mut self.map, is_due) {
            let (start, began) = (self.map.chunk_at(at).start, Instant::now());
            self.look_at_huge_page(at);
            self.monitor.note_own_read(start, began.elapsed());
            self.tell_store_of_many(|cpu| &mut cpu.key)?;
            self.yield_and_poll()?;
        }
        self.account.lap(|cpu| &mut cpu.key);
        Ok(())
    }

    fn look_at_huge_page(&mut self, at: usize) {
        let (map, session, account) = (&mut self.map, &self.session, &mut self.account);
        let look = duplicates::look(map, session, account, &self.monitor, at);
        if look.all_zero() && self.direct_io.glance() && zeros::free(map, &mut self.space, account, at) {
            return;
        }
        let managed = self.space.breaker.managed();
        match look.judge(map, session, &self.monitor, managed, self.number) {
            Judgement::Stay => {}
            Judgement::Split => {
                let first = map.chunk_at(at).pages.start;
                split::split_if_huge(map, account, &self.monitor, first);
            }
            Judgement::Ask(keyed) => self.find(keyed),
        }
    }
}
