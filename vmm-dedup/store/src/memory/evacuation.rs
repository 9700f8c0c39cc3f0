//! Emptying segments, so that their memory returns. Which ones, and when, the ledger says
//! ([`crate::ledger::allocator`]); here their pages are copied, and what leads to the old slots leads to the new ones.
//!
//! A page moves in one go, between two messages: the copy is written, it takes the old slot's place in the index (a reader
//! finds one or the other), and the old slot's forward names it. When all of a segment has moved, services are told so, and
//! read the forwards. Why no service maps the wrong page then, or loses one, is argued in [`crate::ledger::lifetime`].
//!
//! - Pages keep their distances, but for long holes, so that what is one mapping in a guest can stay one.
//! - A huge page moves to slots that lie as those of one, a series to another one.
//! - A slot that is in no index (a series took its place, or it had moved once) moves to the slot that is, if one holds the same.

use crate::ledger::allocator::{HUGE_PAGE_SLOTS, Piece, Purpose, Run};
use crate::memory::pool::{Announcement, Pool, SHORT_RUN};
use crate::memory::segments::Segments;
use std::io;
use vmm_dedup_protocol::{HUGE_PAGES, SERIES, SLOTS_PER_SEGMENT, Slot};

/// Most slots that are moved in one go, but for huge pages.
#[allow(clippy::cast_possible_truncation)] // 512
const MOST: u32 = HUGE_PAGES as u32;

/// What is moved next.
#[derive(Debug)]
enum Next {
    Piece(Piece),
    /// A series that begins here.
    Series(Slot),
}

impl Pool {
    /// Pages that were moved, ever.
    pub(crate) fn moved(&self) -> u64 {
        self.evacuation.moved
    }

    /// Moves about so many pages, if there are pages to be moved. Returns whether there may be more.
    pub(crate) fn evacuate(&mut self, most: u32) -> bool {
        let more = match self.try_to_evacuate(most) {
            Ok(more) => {
                self.evacuation.failing = false;
                more
            }
            Err(error) => {
                if !std::mem::replace(&mut self.evacuation.failing, true) {
                    log::warn!("the store cannot shrink for now (memory and open files are short?): {error}");
                }
                false
            }
        };
        self.reclaim();
        more
    }

    fn try_to_evacuate(&mut self, most: u32) -> io::Result<bool> {
        while let Some(slot) = self.evacuation.stragglers.pop() {
            if let Err(error) = self.move_straggler(slot) {
                // The next time.
                self.evacuation.stragglers.push(slot);
                return Err(error);
            }
        }
        let mut left = most;
        while left > 0 {
            let current = self.evacuation.current.take();
            let begin = |segments: &mut Segments| Some((segments.allocator_mut().begin_evacuation()?, 0));
            let Some((number, from)) = current.or_else(|| begin(&mut self.segments)) else {
                return Ok(false);
            };
            let Some(next) = self.next(number, from) else {
                self.announcements.push(Announcement::Evacuated(number));
                continue;
            };
            self.evacuation.current = Some((number, from));
            let (first, len) = match next {
                Next::Piece(piece) => (piece.run.first, self.move_piece(&piece)?),
                Next::Series(first) => (first, self.move_series(first)?),
            };
            left = left.saturating_sub(len);
            self.evacuation.current = Some((number, first.number() % SLOTS_PER_SEGMENT + len));
        }
        Ok(true)
    }

    /// What is to be moved of a segment, from a place in it on.
    fn next(&self, number: u32, from: u32) -> Option<Next> {
        let mut piece = self.segments.allocator().next_piece(number, from, MOST)?;
        let Run { first, len } = piece.run;
        let last = first.checked_add_in_segment(len - 1)?;
        match self.lifetime.first_series(first..=last) {
            Some(series) if series == first => return Some(Next::Series(first)),
            Some(series) => {
                piece.run.len = series.number() - first.number();
                piece.huge_page = false;
            }
            None => {}
        }
        Some(Next::Piece(piece))
    }

    /// Moves what is live of consecutive slots; how many these are.
    fn move_piece(&mut self, piece: &Piece) -> io::Result<u32> {
        let Run { first, len } = piece.run;
        let all_used = piece
            .run
            .slots()
            .all(|slot| self.segments.allocator().is_used(slot));
        let mut done = 0;
        while done < len {
            let run = match piece
                .huge_page
                .then(|| self.take_huge_page())
                .transpose()?
                .flatten()
            {
                Some(run) => run,
                None => self.take_run(len - done, SHORT_RUN)?,
            };
            if all_used {
                self.populate(&run);
            }
            let mut unused = Vec::new();
            for new in run.slots() {
                let old = first.checked_add_in_segment(done);
                done += 1;
                let live = old.filter(|old| self.is_to_be_moved(*old));
                if live.is_none_or(|old| !self.move_slot(old, new)) {
                    unused.push(new);
                }
            }
            self.give_back(unused);
        }
        Ok(len)
    }

    fn move_straggler(&mut self, slot: Slot) -> io::Result<()> {
        if !self.is_to_be_moved(slot) {
            return Ok(());
        }
        let number = slot.segment();
        if self.lifetime.followers(slot).is_some() {
            self.move_series(slot)?;
        } else {
            let run = Run { first: slot, len: 1 };
            self.move_piece(&Piece {
                run,
                huge_page: false,
            })?;
        }
        self.announcements.push(Announcement::Evacuated(number));
        Ok(())
    }

    /// Whether a slot is live in a segment that is being emptied, and has not moved.
    fn is_to_be_moved(&self, slot: Slot) -> bool {
        let allocator = self.segments.allocator();
        allocator.is_used(slot) && allocator.is_leaving(slot) && self.lifetime.moved_to(slot).is_none()
    }

    /// Moves a page to a slot that was just taken, or to one that holds it already: whether that slot is used.
    fn move_slot(&mut self, old: Slot, new: Slot) -> bool {
        let line = self.segments.line_key(old, self.salt);
        self.evacuation.moved += 1;
        let unlisted = self.lifetime.is_unlisted(old);
        let twin = if unlisted { self.twin(line, old) } else { None };
        let (to, led) = match twin {
            Some(twin) => {
                let linked = self.lifetime.relocate_to_twin(old, twin);
                debug_assert!(linked.is_ok(), "what is in the index is live");
                (twin, linked.unwrap_or_default())
            }
            None => {
                self.segments.copy(new, old);
                let listed = !unlisted || self.admits(line, new);
                if unlisted && listed {
                    self.enter(line, new);
                } else if listed {
                    self.replace(old, new);
                }
                (new, self.lifetime.relocate(old, new, listed))
            }
        };
        self.forward(led.into_iter().chain([old]).map(|source| (source, to)));
        self.draw_consequences();
        twin.is_none()
    }

    /// Moves a series; how many slots it has.
    fn move_series(&mut self, first: Slot) -> io::Result<u32> {
        let run = self.take_run(SERIES, SERIES)?;
        if run.len < SERIES {
            self.give_back(run.slots());
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.populate(&run);
        run.slots().for_each(|new| self.segments.copy(new, first));
        self.replace(first, run.first);
        let forwards = self.lifetime.relocate_series(first, run.first);
        self.forward(forwards);
        self.draw_consequences();
        self.evacuation.moved += u64::from(SERIES);
        Ok(SERIES)
    }

    /// A slot takes the place of another one in the index.
    fn replace(&mut self, old: Slot, new: Slot) {
        let line = self.segments.line_key(old, self.salt);
        let (segments, salt) = (&self.segments, self.salt);
        self.catalog.replace(line, old, new, || segments.hash(new, salt));
        self.order_in_place_of(old, new);
    }

    /// Tells where pages have moved. Who maps a slot of a segment that has gone is not told any more.
    fn forward(&self, forwards: impl IntoIterator<Item = (Slot, Slot)>) {
        for (old, new) in forwards {
            if self.segments.has_file(old) {
                self.segments.forward(old, new);
            }
        }
    }

    /// Consecutive slots for pages that are moved; what `least` means, see [`crate::memory::segments`].
    fn take_run(&mut self, pages: u32, least: u32) -> io::Result<Run> {
        let entries = 2 * pages as usize;
        self.reserve(entries).map_err(io::Error::other)?;
        let taken = self.segments.allocate_run(pages, Purpose::Survivors, least)?;
        let (run, new) = taken.ok_or(io::ErrorKind::StorageFull)?;
        self.announce_segment(new);
        Ok(run)
    }

    fn take_huge_page(&mut self) -> io::Result<Option<Run>> {
        let entries = 2 * HUGE_PAGE_SLOTS as usize;
        self.reserve(entries).map_err(io::Error::other)?;
        let Some((run, new)) = self.segments.allocate_huge_page(Purpose::Survivors)? else {
            return Ok(None);
        };
        self.announce_segment(new);
        Ok(Some(run))
    }
}
