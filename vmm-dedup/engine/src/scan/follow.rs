//! Pages that have moved in the store: this guest's mappings follow, so that what is left of their old segments can go.

use crate::error::Error;
use crate::lookup::request::{MergeRequest, Role};
use crate::memory::layout::Page;
use crate::memory::page_map::{PageMap, VMAS_PER_RUN};
use crate::memory::page_state::Backing;
use crate::merge::follower::{self, Followed};
use crate::merge::healer::Healed;
use crate::merge::in_place::{Cut, Limit};
use crate::merge::run::Outcome;
use crate::scan::pass::Pass;
use crate::store::connection::Store;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time for following in each period of rest.
const RESTING: Duration = Duration::from_millis(20);

/// Copies that leave mappings of store files at once: each is copied while its writers wait.
const MOVED_OUT: Limit = Limit {
    pages: 256,
    stretches: 32,
};
/// Mappings that these may add.
const MOVED_OUT_VMAS: i64 = 32 * VMAS_PER_RUN;
/// Most copies between two pages that follow for which these are not parted.
const FEW_COPIES: Page = 3;

/// Whether a request is for a page that stays private.
fn is_copy(request: &MergeRequest) -> bool {
    request.role == Role::Exception
}

/// Pages that follow, and copies between them that can lie in one mapping with them afterwards.
fn with_copies(map: &PageMap, requests: &[MergeRequest]) -> Vec<MergeRequest> {
    let mut all: Vec<MergeRequest> = Vec::with_capacity(requests.len());
    for request in requests {
        if let Some(last) = all.last().copied() {
            all.extend(copies_between(map, &last, request));
        }
        all.push(*request);
    }
    all
}

fn copies_between(map: &PageMap, last: &MergeRequest, next: &MergeRequest) -> Vec<MergeRequest> {
    let between = last.page + 1..next.page;
    let place = |page: Page| last.slot?.checked_add_in_segment(page - last.page);
    let carried = between.len() <= FEW_COPIES as usize
        && place(next.page) == next.slot
        && (last.page..next.page).all(|page| map.memory().adjacent(page))
        && between
            .clone()
            .all(|page| matches!(map.backing(page), Backing::CopiedOnWrite(_)));
    let request = |page| Some(MergeRequest::exception(page, place(page)?));
    if carried {
        between.filter_map(request).collect()
    } else {
        Vec::new()
    }
}

/// A batch that does not end with a copy, unless it is the last.
fn cut_at_copy(batch: &[MergeRequest], last: bool) -> &[MergeRequest] {
    let end = batch.iter().rposition(|request| !is_copy(request));
    match end {
        Some(end) if !last => &batch[..=end],
        _ => batch,
    }
}

/// Whether copies may be replaced by copies of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copies {
    /// As far as it can be told that they are not pinned.
    Move,
    /// They stay: nothing that a device may be writing to is replaced.
    Stay,
}

impl Pass {
    /// Lets pages map the slots that theirs have moved to, within the CPU budget.
    pub(super) fn follow_moves(&mut self) -> Result<(), Error> {
        let pages = self.pages_to_follow();
        let mut at = 0;
        while let Some(len) = self.follow_some(&pages[at..], Copies::Move) {
            at += len;
            self.account.lap(|cpu| &mut cpu.merge);
            self.tell_store_of_many()?;
            self.yield_and_poll()?;
        }
        Ok(())
    }

    /// The same while nothing is merged: what takes longer than [`RESTING`] waits for the next time.
    pub(super) fn follow_while_resting(&mut self) {
        let (pages, start) = (self.pages_to_follow(), Instant::now());
        let mut at = 0;
        while start.elapsed() < RESTING
            && let Some(len) = self.follow_some(&pages[at..], Copies::Stay)
        {
            at += len;
        }
        self.account.lap(|cpu| &mut cpu.merge);
    }

    /// Pages that map slots of segments whose pages have moved.
    fn pages_to_follow(&self) -> Vec<Page> {
        let store = self.session.store();
        store.map_or_else(Vec::new, |store| self.map.pages_of_segments(store.evacuated()))
    }

    /// Lets some of the pages follow, from the first on: how many were looked at; `None` if there are none.
    fn follow_some(&mut self, pages: &[Page], copies: Copies) -> Option<usize> {
        if pages.is_empty() || !self.session.is_connected() {
            return None;
        }
        let heals = copies == Copies::Move && self.map.counts().copied > 0 && self.can_heal();
        // No discard meets frozen pages, until the states say what became of them.
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        self.space.take_broken(&mut self.map, &mut self.account);
        let store = self.session.store()?;
        // Forwards are read only now: what they name is mapped before the store is told anything.
        let request = |page: &Page| match self.map.backing(*page) {
            Backing::Slot(slot) => Some(MergeRequest::moved(*page, store.forward(slot)?)),
            _ => None,
        };
        let looked_at = pages.len().min(follower::LIMIT.pages);
        let requests: Vec<MergeRequest> = pages[..looked_at].iter().filter_map(request).collect();
        if requests.is_empty() {
            return Some(looked_at);
        }
        let carrying = if heals {
            with_copies(&self.map, &requests)
        } else {
            Vec::new()
        };
        let with_copies = carrying.len() > requests.len();
        let requests = if with_copies { carrying } else { requests };
        let batch = &requests[..follower::LIMIT.fits(self.cut(), &requests)];
        let batch = cut_at_copy(batch, batch.len() == requests.len());
        let mut stall_ns = None;
        let mut outcomes = Vec::new();
        if batch.iter().any(is_copy) {
            let (map, store) = (&self.map, self.session.store()?);
            let healer = &mut self.planner.healer;
            let Healed {
                outcomes: done,
                stall_ns: stall,
            } = healer.heal(map, store, &mut self.space, self.number, batch);
            (outcomes, stall_ns) = (done, stall);
        }
        // Copies stay behind where they are written all the time.
        let contended = outcomes.iter().all(|outcome| {
            matches!(
                outcome,
                Outcome::Contended | Outcome::NotTaken | Outcome::Pinned | Outcome::Untold
            )
        });
        let alone: Vec<MergeRequest>;
        let batch = if contended {
            alone = batch
                .iter()
                .filter(|request| !is_copy(request))
                .copied()
                .collect();
            let Followed {
                outcomes: done,
                stall_ns: stall,
            } = follower::follow(&self.map, self.session.store()?, &mut self.space, &alone);
            (outcomes, stall_ns) = (done, stall_ns.max(Some(stall)));
            &alone[..]
        } else {
            batch
        };
        stall_ns
            .into_iter()
            .for_each(|ns| self.account.stats.stop.observe(ns));
        self.account.stats.bytes_read.verify += (batch.len() * 2 * PAGE_SIZE) as u64;
        let slots_first = |copies: bool| {
            batch
                .iter()
                .zip(&outcomes)
                .filter(move |(request, _)| is_copy(request) == copies)
        };
        for (request, outcome) in slots_first(false).chain(slots_first(true)) {
            self.note_followed(request, *outcome);
        }
        let last = batch.iter().rfind(|request| !is_copy(request))?.page;
        let done = requests.iter().rfind(|request| !is_copy(request))?.page > last;
        Some(if done {
            pages.partition_point(|page| *page <= last)
        } else {
            looked_at
        })
    }

    /// How requests are cut into what is frozen in one piece.
    fn cut(&self) -> Cut<'_> {
        Cut {
            map: &self.map,
            managed: self.space.breaker.managed(),
        }
    }

    /// Whether copies can be told from pages that are in use by direct I/O now.
    fn can_heal(&mut self) -> bool {
        if !self.direct_io.glance_again() {
            return false;
        }
        let healer = &mut self.planner.healer;
        healer.can_heal(&self.map, self.number)
    }

    fn note_followed(&mut self, request: &MergeRequest, outcome: Outcome) {
        match (outcome, request.slot) {
            (Outcome::Merged, Some(slot)) if is_copy(request) => self.map.carry(request.page, slot),
            (Outcome::Merged, Some(slot)) => self.map.follow(request.page, slot),
            (Outcome::Absent, _) => {
                self.space
                    .note_copied(&mut self.map, &mut self.account, request.page);
            }
            (Outcome::Different, _) => self.account.stats.mismatches_total += 1,
            (Outcome::NoVma, _) => {
                self.account.stats.refused_vmas_total += 1;
                self.map.no_vma_is_left(self.number);
            }
            _ => {}
        }
    }

    /// Lets copies leave the mappings of store files that they lie in, which would keep the files; as far as it can be told that
    /// they are not pinned. Whether all did.
    pub(super) fn move_copies_out(&mut self, copies: &[Page]) -> Result<bool, Error> {
        let requests: Vec<MergeRequest> = copies.iter().copied().map(MergeRequest::move_out).collect();
        let mut all = true;
        // In page order, and from the last batch on.
        let mut batches: Vec<&[MergeRequest]> = vec![&requests[..]];
        while let Some(batch) = batches.pop().filter(|batch| !batch.is_empty()) {
            if !self.can_heal() || !self.map.has_vmas_for(MOVED_OUT_VMAS) {
                return Ok(false);
            }
            let most = self.planner.healer.batch_len(self.cut(), batch);
            let (batch, rest) = batch.split_at(MOVED_OUT.fits(self.cut(), batch).min(most));
            if !rest.is_empty() {
                batches.push(rest);
            }
            match self.move_batch_out(batch) {
                Outcome::Merged => {}
                // Each try is a fork, which holds up the VM: the rest is tried another time.
                Outcome::Contended if self.planner.healer.forks_tell() => return Ok(false),
                // Some page is written all the time: the others need not wait for it.
                Outcome::Contended if batch.len() > 1 => {
                    let (first, second) = batch.split_at(batch.len() / 2);
                    batches.extend([second, first]);
                }
                _ => all = false,
            }
            self.account.lap(|cpu| &mut cpu.merge);
            self.tell_store_of_many()?;
            self.yield_and_poll()?;
        }
        Ok(all)
    }

    /// [`Outcome::Merged`]: all are in memory of their own; [`Outcome::Contended`]: some are not, since somebody waited.
    fn move_batch_out(&mut self, requests: &[MergeRequest]) -> Outcome {
        // No discard meets frozen pages, until the states say what became of them.
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        let there = |request: &&MergeRequest| self.map.backing(request.page).is_copied();
        let batch: Vec<MergeRequest> = requests.iter().filter(there).copied().collect();
        let Some(store) = self.session.store().filter(|_| !batch.is_empty()) else {
            return Outcome::Merged;
        };
        let (map, space, healer) = (&self.map, &mut self.space, &mut self.planner.healer);
        let Healed { outcomes, stall_ns } = healer.heal(map, store, space, self.number, &batch);
        stall_ns
            .into_iter()
            .for_each(|ns| self.account.stats.heal.observe(ns));
        for (request, outcome) in batch.iter().zip(&outcomes) {
            match outcome {
                Outcome::Merged => self.map.made_private(request.page),
                Outcome::Contended => self.account.stats.heal_wanted_total += 1,
                _ => self.account.stats.heal_pinned_total += 1,
            }
        }
        let all = |wanted: &[Outcome]| outcomes.iter().all(|outcome| wanted.contains(outcome));
        match () {
            () if all(&[Outcome::Merged]) => Outcome::Merged,
            () if all(&[Outcome::Merged, Outcome::Contended]) => Outcome::Contended,
            () => Outcome::Pinned,
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
        let (slots, orphaned) = self.map.settled_orphans();
        for some in slots.chunks(CHUNK_PAGES) {
            self.space
                .make_all_private(&mut self.map, &mut self.account, some);
            self.account.lap(|cpu| &mut cpu.merge);
            self.tell_store_of_many()?;
            self.yield_and_poll()?;
        }
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
        // Found while the index had them, and mapped after their segments had gone.
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
