//! Runs with private exceptions: one mapping over a stretch of guest pages in which a few are not shared.
//!
//! Real duplicates are scattered: a mapping for each little run would cost more kernel memory and more time than it
//! is worth. The store lays slots out as the pages of their publisher lie, short gaps included ([`gaps`]), so a guest
//! of the same layout can map the whole stretch, with its own pages in the gaps. Such an *exception* is anonymous memory
//! inside a mapping of the store: UFFDIO_MOVE refuses it later, so like a page that the kernel copied it is merged again only
//! where it can be told that it is not pinned ([`Backing::CopiedOnWrite`]). Therefore:
//!
//! - only pages that were keyed, have no twin and were not written become exceptions, and only after nothing new came to
//!   their chunk for some passes: the twins around them are deferred so long;
//! - at most three in a row, and never more exceptions than shared pages;
//! - none with managed breaks, whose promise is that every page can be merged again.
//!
//! [`gaps`]: mod@crate::lookup::gaps
//! [`Backing::CopiedOnWrite`]: crate::memory::page_state::Backing::CopiedOnWrite

use crate::lookup::gaps::{gap, is_worth_it};
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::merge::run::continues;
use std::collections::HashSet;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// Requests whose chunks have not quiesced.
#[derive(Debug, Default)]
pub(crate) struct Deferred {
    /// Pages that the store counts a reference for.
    pub(crate) published: Vec<MergeRequest>,
    /// Candidates whose keys the index had.
    pub(crate) twins: Vec<(Page, Key)>,
}

impl Deferred {
    /// The pages.
    pub(crate) fn pages(&self) -> HashSet<Page> {
        let published = self.published.iter().map(|request| request.page);
        published
            .chain(self.twins.iter().map(|(page, _)| *page))
            .collect()
    }

    /// Adds what waits from now on.
    pub(crate) fn push(&mut self, map: &PageMap, request: &MergeRequest) {
        match map.known(request.page).candidate() {
            _ if request.publisher_ref().is_some() => self.published.push(*request),
            Some(key) => self.twins.push((request.page, key)),
            None => {} // keyed anew by the next pass
        }
    }

    /// Takes out what is to be merged now: its chunk has quiesced. Twins are to be looked up again: nothing found in the index
    /// outlives an epoch. A key that was there was no sighting for the store any more; if it has left meanwhile (who
    /// published it gave it up as well), it must become one again, or nobody would ever be asked for the page.
    pub(crate) fn take_quiesced(&mut self, map: &PageMap, pass: u64) -> Self {
        let quiesced = |page: Page| map.chunk(map.chunk_of(page)).is_quiesced(pass);
        let published = self.published.extract_if(.., |request| quiesced(request.page));
        let published = published.collect();
        let twins = self.twins.extract_if(.., |(page, _)| quiesced(*page));
        let unchanged = |(page, key): &(Page, Key)| map.private_candidate(*page) == Some(*key);
        let twins = twins.filter(unchanged).collect();
        Self { published, twins }
    }
}

/// Whether the twins of a chunk, in page order, are to wait until it has quiesced, since exceptions could make longer runs of
/// them then.
pub(crate) fn waits(map: &PageMap, pass: u64, twins: &[MergeRequest]) -> bool {
    let bridges = || {
        let mut pairs = twins.windows(2);
        pairs.any(|pair| bridge(map, &pair[0], &pair[1]).is_some())
    };
    // Pages of a lost store are found by its keys only once.
    let orphaned = || {
        let mut pages = twins.iter().map(|request| request.page);
        pages.any(|page| map.backing(page).in_file_mapping())
    };
    !map.chunk(map.chunk_of(twins[0].page)).is_quiesced(pass) && bridges() && !orphaned()
}

/// Adds the exceptions that join neighbouring requests to runs.
pub(crate) fn with_exceptions(map: &PageMap, pass: u64, requests: Vec<MergeRequest>) -> Vec<MergeRequest> {
    let mut all: Vec<MergeRequest> = Vec::with_capacity(requests.len());
    let (mut shared, mut exceptions) = (0, 0);
    for request in requests {
        match all.last().copied() {
            Some(last) if continues(&last, &request) => shared += 1,
            Some(last) => match exceptions_between(map, pass, &last, &request) {
                Some(between) if is_worth_it(shared, exceptions + between.len()) => {
                    shared += 1;
                    exceptions += between.len();
                    all.extend(between);
                }
                _ => (shared, exceptions) = (1, 0),
            },
            None => shared = 1,
        }
        all.push(request);
    }
    all
}

/// The pages between two requests, if all of them may become exceptions now.
fn exceptions_between(
    map: &PageMap,
    pass: u64,
    a: &MergeRequest,
    b: &MergeRequest,
) -> Option<Vec<MergeRequest>> {
    let place = bridge(map, a, b)?;
    let quiesced = map.chunk(map.chunk_of(b.page)).is_quiesced(pass);
    let mut between = a.page + 1..b.page;
    if !quiesced || !between.clone().all(|page| map.private_candidate(page).is_some()) {
        return None;
    }
    let places = (1..).map_while(|n| place.checked_add_in_segment(n));
    let exceptions = between.by_ref().zip(places);
    Some(
        exceptions
            .map(|(page, place)| MergeRequest::exception(page, place))
            .collect(),
    )
}

/// Whether one mapping could show both requests' slots in their places, with pages between: the first one's slot.
fn bridge(map: &PageMap, a: &MergeRequest, b: &MergeRequest) -> Option<Slot> {
    let (first, last) = (a.slot?, b.slot?);
    if b.page == a.page + 1 {
        return None; // Most are neighbours.
    }
    let gap = gap(map, a.page, b.page)?;
    (first.checked_add_in_segment(u32::from(gap) + 1) == Some(last)).then_some(first)
}
