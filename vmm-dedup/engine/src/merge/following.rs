//! Pages that have moved in the store: this guest's mappings follow, so that what is left of their old segments can go.
//!
//! They follow in the order of addresses, since neighbours follow together, in one mapping.

use crate::lookup::request::{MergeRequest, Role};
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::memory::page_state::Backing;
use crate::merge::context::{Context, Tools};
use crate::merge::follower::{self, Followed};
use crate::merge::healer::{Healed, Healer};
use crate::merge::moving_out;
use crate::merge::run::Outcome;
use crate::store::session::Session;
use crate::sys::page_size::PAGE_SIZE;

/// Most copies between two pages that follow for which these are not parted.
const FEW_COPIES: Page = 3;

/// Whether copies may be replaced by copies of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// As far as it can be told that they are not pinned.
    Move,
    /// They stay: nothing that a device may be writing to is replaced.
    Stay,
}

/// Pages that follow, and how far they have come.
#[derive(Debug)]
pub(crate) struct Following {
    /// Those that map slots of segments whose pages have moved, in order, and how many of them were looked at.
    pages: Vec<Page>,
    done: usize,
    copies: Copies,
}

impl Following {
    /// Of all pages that are to follow.
    pub(crate) fn new(map: &PageMap, session: &Session, copies: Copies) -> Self {
        let moved = session
            .store()
            .map(|store| map.pages_of_segments(store.evacuated()));
        Self {
            pages: moved.unwrap_or_default(),
            done: 0,
            copies,
        }
    }

    /// Lets the next pages follow; whether there were any.
    pub(crate) fn step(&mut self, with: &mut Context<'_>, healer: &mut Healer) -> bool {
        let pages = &self.pages[self.done..];
        if pages.is_empty() || !with.session.is_connected() {
            return false;
        }
        let heals =
            self.copies == Copies::Move && with.map.counts().copied > 0 && moving_out::can_move(with, healer);
        let done = follow_some(with, healer, pages, heals);
        self.done += done.unwrap_or(0);
        done.is_some()
    }
}

/// Lets some of the pages follow, from the first on: how many were looked at; `None` without a store. `heals`: copies between
/// them may be carried along.
fn follow_some(with: &mut Context<'_>, healer: &mut Healer, pages: &[Page], heals: bool) -> Option<usize> {
    // No discard meets frozen pages, until the states say what became of them.
    let discards = with.space.discards.clone();
    let mut discards = discards.lock();
    with.space.note_discards(&mut discards, with.map);
    with.space.take_broken(with.map, with.account);
    let store = with.session.store()?;
    // Forwards are read only now: what they name is mapped before the store is told anything.
    let request = |page: &Page| match with.map.backing(*page) {
        Backing::Slot(slot) => Some(MergeRequest::moved(*page, store.forward(slot)?)),
        _ => None,
    };
    let looked_at = pages.len().min(follower::LIMIT.pages);
    let requests: Vec<MergeRequest> = pages[..looked_at].iter().filter_map(request).collect();
    if requests.is_empty() {
        return Some(looked_at);
    }
    let carrying = if heals {
        with_copies(with.map, &requests)
    } else {
        Vec::new()
    };
    let has_copies = carrying.len() > requests.len();
    let requests = if has_copies { carrying } else { requests };
    let memory = with.map.memory().clone();
    let batch = &requests[..follower::LIMIT.fits(&memory, &requests)];
    let batch = cut_at_copy(batch, batch.len() == requests.len());
    let (batch, outcomes) = replace(with, healer, batch)?;
    with.account.stats.bytes_read.verify += (batch.len() * 2 * PAGE_SIZE) as u64;
    let slots_first = |copies: bool| {
        batch
            .iter()
            .zip(&outcomes)
            .filter(move |(request, _)| is_copy(request) == copies)
    };
    for (request, outcome) in slots_first(false).chain(slots_first(true)) {
        note_followed(with, request, *outcome);
    }
    let last = batch.iter().rfind(|request| !is_copy(request))?.page;
    let cut = requests.iter().rfind(|request| !is_copy(request))?.page > last;
    Some(if cut {
        pages.partition_point(|page| *page <= last)
    } else {
        looked_at
    })
}

/// Replaces the mappings of a batch, with the copies in it if that can be done, else without: who was in it in the end, and what
/// became of each.
fn replace(
    with: &mut Context<'_>,
    healer: &mut Healer,
    batch: &[MergeRequest],
) -> Option<(Vec<MergeRequest>, Vec<Outcome>)> {
    let memory = with.map.memory().clone();
    let mut tools = Tools {
        store: with.session.store()?,
        space: with.space,
        verify: with.verify,
    };
    let mut healed = Healed::none(&[], Outcome::NotTaken);
    if batch.iter().any(is_copy) {
        healed = healer.heal(with.map, &mut tools, with.pass, batch);
    }
    let Healed { outcomes, stall_ns } = healed;
    // Copies stay behind where they are written all the time.
    let contended = outcomes.iter().all(|outcome| {
        matches!(
            outcome,
            Outcome::Contended | Outcome::NotTaken | Outcome::Pinned | Outcome::Untold
        )
    });
    if !contended {
        stall_ns
            .into_iter()
            .for_each(|ns| with.account.stats.stop.observe(ns));
        return Some((batch.to_vec(), outcomes));
    }
    let alone = without_copies(&memory, batch);
    let Followed {
        outcomes,
        stall_ns: stall,
    } = follower::follow(&memory, &mut tools, &alone);
    let longest = stall_ns.map_or(stall, |ns| ns.max(stall));
    with.account.stats.stop.observe(longest);
    Some((alone, outcomes))
}

/// What of a batch follows if its copies stay: there are more stretches then, and no more are frozen at once than ever.
fn without_copies(memory: &Memory, batch: &[MergeRequest]) -> Vec<MergeRequest> {
    let alone = batch.iter().filter(|request| !is_copy(request));
    let mut alone: Vec<MergeRequest> = alone.copied().collect();
    alone.truncate(follower::LIMIT.fits(memory, &alone));
    alone
}

fn note_followed(with: &mut Context<'_>, request: &MergeRequest, outcome: Outcome) {
    match (outcome, request.slot) {
        (Outcome::Merged, Some(slot)) if is_copy(request) => with.map.carry(request.page, slot),
        (Outcome::Merged, Some(slot)) => with.map.follow(request.page, slot),
        (Outcome::Absent, _) => {
            with.space.note_copied(with.map, with.account, request.page);
        }
        (Outcome::Different, _) => with.account.stats.mismatches_total += 1,
        (Outcome::NoVma, _) => {
            with.account.stats.refused_vmas_total += 1;
            with.map.no_vma_is_left(with.pass);
        }
        _ => {}
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::follower::LIMIT;
    use crate::merge::in_place::stretches;
    use crate::sys::page_size::bytes;
    use vmm_dedup_protocol::Slot;

    const PAGES: Page = 512;

    /// Pages that follow, but for those that stay private.
    fn batch(is_copy: impl Fn(Page) -> bool) -> (Memory, Vec<MergeRequest>) {
        let start = bytes(PAGES as usize);
        let request = |page: Page| {
            let slot = Slot::try_new(page).unwrap();
            match is_copy(page) {
                true => MergeRequest::exception(page, slot),
                false => MergeRequest::moved(page, slot),
            }
        };
        let memory = Memory::made_up(std::slice::from_ref(&(start..2 * start)));
        (memory, (0..PAGES).map(request).collect())
    }

    #[test]
    fn no_more_stretches_are_frozen_where_copies_stay_behind() {
        let (memory, all) = batch(|page| page % 3 == 1);
        assert_eq!(
            (LIMIT.fits(&memory, &all), stretches(&memory, &all).count()),
            (512, 1)
        );
        let alone = without_copies(&memory, &all);
        assert_eq!(stretches(&memory, &alone).count(), LIMIT.stretches);
        let rest = all
            .iter()
            .filter(|request| !is_copy(request))
            .map(|request| request.page);
        assert!(
            alone
                .iter()
                .map(|request| request.page)
                .eq(rest.take(alone.len()))
        );
    }

    #[test]
    fn without_copies_all_follow() {
        let (memory, all) = batch(|_| false);
        assert_eq!(without_copies(&memory, &all).len(), all.len());
    }
}
