//! Leaving store files: mappings follow pages that have moved, copies are moved out, and files that went are given up.

use crate::account::Stage;
use crate::error::Error;
use crate::memory::layout::Page;
use crate::merge::following::{Copies, Following};
use crate::merge::moving_out::MovingOut;
use crate::scan::pass::Pass;
use crate::store::connection::Store;
use crate::sys::page_size::CHUNK_PAGES;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time for following in each pass in standby.
const IN_STANDBY: Duration = Duration::from_millis(20);

/// What CPU time is booked for here.
const MERGING: Stage = |cpu| &mut cpu.merge;

impl Pass {
    /// Lets pages map the slots that theirs have moved to, within the CPU budget.
    pub(super) fn follow_moves(&mut self) -> Result<(), Error> {
        let mut following = Following::new(&self.map, &self.session, Copies::Move);
        loop {
            let (healer, mut with) = self.replacing();
            if !following.step(&mut with, healer) {
                self.account.lap(MERGING);
                return Ok(());
            }
            self.tell_store_of_many(MERGING)?;
            self.yield_and_poll()?;
        }
    }

    /// The same while nothing is merged: what takes longer than [`IN_STANDBY`] waits for the next time.
    pub(super) fn follow_in_standby(&mut self) {
        let start = Instant::now();
        let mut following = Following::new(&self.map, &self.session, Copies::Stay);
        let (healer, mut with) = self.replacing();
        while start.elapsed() < IN_STANDBY && following.step(&mut with, healer) {}
        self.account.lap(MERGING);
    }

    /// Lets copies leave the mappings of store files that they lie in, which would keep the files; as far as it can be told that
    /// they are not pinned. Whether all did.
    pub(super) fn move_copies_out(&mut self, copies: &[Page]) -> Result<bool, Error> {
        let mut moving = MovingOut::new(copies);
        loop {
            let (healer, mut with) = self.replacing();
            if !moving.step(&mut with, healer) {
                self.account.lap(MERGING);
                return Ok(moving.all());
            }
            self.tell_store_of_many(MERGING)?;
            self.yield_and_poll()?;
        }
    }

    /// Leaves files that went: copies are moved out, and so is what is left of stores that are gone.
    pub(super) fn vacate_files(&mut self) -> Result<(), Error> {
        let kept = self.session.take_kept();
        let copies = self.map.copies_within(&kept);
        self.move_copies_out(&copies)?;
        self.vacate_old_stores(Copies::Move)
    }

    /// Leaves files of stores that are gone, once it is time.
    pub(super) fn vacate_old_stores(&mut self, copies: Copies) -> Result<(), Error> {
        if !self.session.vacates_old_stores() {
            return Ok(());
        }
        // But for those in memory that is lent, whether all of it was given back or not.
        let (slots, orphaned) = self.map.orphans_without_twins();
        for some in slots.chunks(CHUNK_PAGES) {
            self.space
                .make_all_private(&mut self.map, &mut self.account, some);
            self.tell_store_of_many(MERGING)?;
            self.yield_and_poll()?;
        }
        self.account.lap(MERGING);
        let moved = copies == Copies::Move && self.move_copies_out(&orphaned)?;
        let done = moved && self.map.counts().orphaned == 0;
        self.session.note_vacated(done);
        Ok(())
    }

    /// Gives up segments that went. Nothing that was looked up is pending, and all was told.
    pub(super) fn release_retired(&mut self) -> Result<(), Error> {
        let retired = |store: &Store| store.retired().iter().map(|segment| segment.number).collect();
        let numbers: BTreeSet<u32> = self.session.store().map(retired).unwrap_or_default();
        if numbers.is_empty() {
            return Ok(());
        }
        // Found while the index had them, and mapped after their segments had gone. Memory that is lent, and could not be given back, is
        // among it: whoever has it finds the same content there, and where it has a userfaultfd the pages cannot be frozen, and stay.
        let late = self.map.pages_of_segments(&numbers);
        if !late.is_empty() {
            self.space
                .make_all_private(&mut self.map, &mut self.account, &late);
            self.tell_store()?;
        }
        if self.map.pages_of_segments(&numbers).is_empty() {
            self.session.release_unmapped()?;
        }
        Ok(())
    }
}
