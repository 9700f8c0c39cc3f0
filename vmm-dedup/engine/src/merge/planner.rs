//! Admitted > merged: which requests go into one window, within the budgets, and what is noted of each.

use crate::account::Account;
use crate::config::Config;
use crate::error::Error;
use crate::lookup::keys::KeyReader;
use crate::lookup::request::{MergeRequest, Role};
use crate::memory::layout::Page;
use crate::memory::page_map::{NotMerged, PageMap, Reference};
use crate::memory::page_state::{Backing, PageState};
use crate::merge::admission::{self, Admission};
use crate::merge::bridged_runs::{self, Deferred};
use crate::merge::context::Context;
use crate::merge::healer::{Healed, Healer};
use crate::merge::merger::{Batch, Merged, Merger, Take};
use crate::merge::ready;
use crate::merge::run::{Open, Outcome, continues, runs_of};
use crate::merge::series;
use crate::merge::swapped::Swapped;
use crate::merge::verify_engine::VerifyEngine;
use crate::store::session::{ResyncCause, Session};
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::thp::monitor::Monitor;
use crate::thp::split;
use crate::unmerge::address_space::AddressSpace;
use crate::window::MAX_WINDOW;
use std::collections::VecDeque;
use std::ops::Range;

/// Most runs of a huge page that is taken as one.
const MOST_RUNS_AT_ONCE: usize = 8;
/// A huge page that was given back so often since somebody waited for it is merged while he waits.
const CONTENDED_TOO_OFTEN: u8 = 3;
/// Smallest merge window, and the one to begin with.
const MIN_WINDOW: usize = 4;
const FIRST_WINDOW: usize = 16;
/// Pages from the first to the last of a window.
#[allow(clippy::cast_possible_truncation)] // 512
const WINDOW_SPAN: Page = MAX_WINDOW as Page;

/// Plans windows and has them merged, one at each step.
#[derive(Debug)]
pub(crate) struct Planner {
    merger: Merger,
    stop_target_ns: u64,
    /// Requests that one window takes at most; adapts to the stop target.
    window: usize,
    /// As of the last plan.
    pub(crate) swapped: Swapped,
    /// What was admitted, in page order, and how much of that was merged.
    admitted: Vec<MergeRequest>,
    done: usize,
    /// The same for pages that the kernel copied; what was merged of these is not in it any more.
    copies: VecDeque<MergeRequest>,
    pub(crate) healer: Healer,
    pub(crate) deferred: Deferred,
    /// Pages that were not what an engine had proposed, since somebody asked.
    wrong_proposals: usize,
}

impl Planner {
    pub(crate) fn new(config: &Config, verify_engine: VerifyEngine, healer: Healer) -> Self {
        Self {
            merger: Merger::new(verify_engine),
            copies: VecDeque::new(),
            healer,
            stop_target_ns: config.stop_target_us * 1000,
            window: FIRST_WINDOW,
            swapped: Swapped::new(),
            admitted: Vec::new(),
            done: 0,
            deferred: Deferred::default(),
            wrong_proposals: 0,
        }
    }

    /// Found > admitted: takes over what may be merged now, of requests in any order. What was admitted before must have been
    /// merged.
    ///
    /// # Errors
    /// Those of the connection to the store.
    pub(crate) fn admit(
        &mut self,
        with: &mut Context<'_>,
        suspended: bool,
        mut found: Vec<MergeRequest>,
    ) -> Result<(), Error> {
        found.sort_by_key(|request| (request.page, request.publisher_ref().is_none()));
        // A page may have been published twice, with two contents.
        found.dedup_by(|again, kept| {
            let twice = again.page == kept.page;
            if twice {
                with.map.give_up_published(again.publisher_ref());
            }
            twice
        });
        let any_copy = found
            .iter()
            .any(|request| with.map.backing(request.page).is_copied());
        let admission = Admission {
            monitor: with.monitor,
            suspended,
            managed: with.managed(),
            heals: any_copy && self.healer.can_heal(with.map, with.pass),
        };
        let mut admitted = admission.admit(with, &mut self.deferred, &found);
        series::use_series(with.map, with.session, with.account, &mut admitted)?;
        let is_copy = |request: &mut MergeRequest| with.map.backing(request.page).is_copied();
        self.copies = admitted.extract_if(.., is_copy).collect();
        self.admitted = admission.let_ripen(with, &mut self.deferred, &admitted);
        self.done = 0;
        self.swapped.look();
        Ok(())
    }

    /// Admitted > merged, before the first window: makes pages private that still map a lost store's file, and joins runs by
    /// exceptions.
    pub(crate) fn prepare(&mut self, with: &mut Context<'_>) {
        make_orphans_private(with, &mut self.admitted);
        if !with.managed() {
            let admitted = std::mem::take(&mut self.admitted);
            self.admitted = bridged_runs::with_exceptions(with.map, with.pass, admitted);
        }
    }

    /// Admitted > merged: merges the next window; whether there was one.
    pub(crate) fn step(&mut self, with: &mut Context<'_>) -> bool {
        let Some(next) = self.admitted.get(self.done) else {
            return self.heal(with);
        };
        let (map, account, monitor) = (&mut *with.map, &mut *with.account, with.monitor);
        let rest = &self.admitted[self.done..];
        let (len, take) = if is_whole_huge_page(map, rest) {
            let contended = map.chunk(map.chunk_of(next.page)).twins.contended;
            let give_back = contended < CONTENDED_TOO_OFTEN;
            (CHUNK_PAGES, Take::HugePage { give_back })
        } else {
            split::split_if_huge(map, account, monitor, next.page);
            (self.window_len(map, rest), Take::Pages)
        };
        let window = self.done..self.done + len;
        let (deferred, requests) = (&mut self.deferred, &self.admitted[window.clone()]);
        if let Some(left) = admission::admit_to_window(with, deferred, &self.swapped, requests) {
            self.admitted.splice(window, left);
            return true; // windows are cut anew
        }
        self.done = window.end;
        self.merge_window(with, window, take);
        true
    }

    /// Ends what was planned, at its end or before: frees what was merged, and returns what was not.
    pub(crate) fn end(&mut self, space: &mut AddressSpace, account: &Account) -> Vec<MergeRequest> {
        self.swapped.tell(account.stats.refused_swapped_total);
        self.merger.clean_up();
        space.scratch.free();
        let mut rest = std::mem::take(&mut self.admitted).split_off(self.done);
        self.done = 0;
        rest.retain(|request| request.role != Role::Exception);
        rest.extend(self.copies.drain(..));
        rest
    }

    /// What verifies.
    pub(crate) fn verify_engine(&mut self) -> &mut VerifyEngine {
        &mut self.merger.verify_engine
    }

    /// The store was lost, and with it everything that maps its slots.
    pub(crate) fn forget_store(&mut self) {
        self.merger.verify_engine.forget_store();
        (self.admitted, self.done) = (Vec::new(), 0);
        self.copies.clear();
        self.deferred = Deferred::default();
    }

    /// Pages that were not what an engine had proposed, since the last call.
    pub(crate) fn take_wrong_proposals(&mut self) -> usize {
        std::mem::take(&mut self.wrong_proposals)
    }

    /// Admitted > merged, for pages that the kernel copied: merges the next batch; whether there was one.
    fn heal(&mut self, with: &mut Context<'_>) -> bool {
        // No discard meets frozen pages, until the states say what became of them.
        let discards = with.space.discards.clone();
        let mut discards = discards.lock();
        with.space.note_discards(&mut discards, with.map);
        let memory = with.map.memory().clone();
        // What was discarded just now is no copy any more; a publication of it is of no use.
        self.copies.retain(|request| {
            let is_copy = with.map.backing(request.page).is_copied();
            if !is_copy {
                with.map.give_up_published(request.publisher_ref());
            }
            is_copy
        });
        if self.copies.is_empty() {
            return false;
        }
        let len = self.healer.batch_len(&memory, self.copies.make_contiguous());
        let batch: Vec<MergeRequest> = self.copies.drain(..len).collect();
        if admission::lacks_mappings(with, &mut self.deferred, &batch) {
            return true;
        }
        let Context {
            map,
            space,
            session,
            account,
            pass,
            ..
        } = with;
        let Some(store) = session.store() else {
            return false;
        };
        let Healed { outcomes, stall_ns } = self.healer.heal(map, store, space, *pass, &batch);
        stall_ns.into_iter().for_each(|ns| account.stats.heal.observe(ns));
        account.stats.bytes_read.verify += (batch.len() * 2 * PAGE_SIZE) as u64;
        self.wrong_proposals += note_healed(map, session, account, *pass, &batch, &outcomes);
        true
    }

    /// How many of the requests make one window.
    fn window_len(&self, map: &PageMap, requests: &[MergeRequest]) -> usize {
        let first = requests[0].page;
        let goes_on = |at: &usize| {
            let (before, page) = (requests[*at - 1].page, requests[*at].page);
            page - first < WINDOW_SPAN
                && !map.chunk(map.chunk_of(page)).huge
                && (before..page).all(|page| map.memory().adjacent(page))
        };
        let most = requests.len().min(self.window);
        (1..most).find(|at| !goes_on(at)).unwrap_or(most)
    }

    fn merge_window(&mut self, with: &mut Context<'_>, window: Range<usize>, take: Take) {
        let Context {
            map,
            space,
            session,
            account,
            monitor,
            pass,
            ..
        } = with;
        let pass = *pass;
        // No discard meets pages that are away, until the states say what became of them.
        let discards = space.discards.clone();
        let mut discards = discards.lock();
        space.note_discards(&mut discards, map);
        let (all, requests) = (&self.admitted, &self.admitted[window.clone()]);
        let goes_on = |at: usize| at > 0 && at < all.len() && continues(&all[at - 1], &all[at]);
        let came_about = |request: &MergeRequest| match map.backing(request.page) {
            Backing::Slot(slot) => request.slot == Some(slot),
            backing => backing.is_copied() && request.role == Role::Exception,
        };
        let begun = |at: usize| goes_on(at) && came_about(&all[at - 1]);
        let open = Open {
            start: begun(window.start),
            end: goes_on(window.end),
        };
        let batch = Batch { requests, open, take };
        let discarded = |request: &MergeRequest| {
            let state = map.state(request.page);
            state.backing == Backing::Zero || state == PageState::UNTRACKED
        };
        if take != Take::Pages && requests.iter().any(discarded) {
            // Just discarded, so it is not that huge page any more.
            let requests = requests.iter();
            return requests.for_each(|request| map.defer(request.page, request.publisher_ref()));
        }
        let Some(store) = session.store() else { return };
        ready::touch_slots(store, requests);
        let memory = map.memory().clone();
        let merged = match self.merger.merge(&memory, store, space, batch) {
            Ok(merged) => merged,
            Err(_) => {
                // The window has noted why.
                account.stats.refused_other_total += requests.len() as u64;
                session.schedule_resync(pass, ResyncCause::Missed);
                let published = requests.iter().map(MergeRequest::publisher_ref);
                return published.for_each(|slot| map.give_up_published(slot));
            }
        };
        account.stats.stop.observe(merged.stop_ns);
        match take {
            Take::Pages => {
                self.window = adapted(self.window, requests.len(), merged.stop_ns, self.stop_target_ns)
            }
            Take::HugePage { .. } => {
                note_huge(map, space, account, monitor, requests[0].page, &merged.outcomes)
            }
        }
        account.stats.bytes_read.verify += (requests.len() * 2 * PAGE_SIZE) as u64;
        let Merged { outcomes, .. } = merged;
        self.wrong_proposals += note_outcomes(map, session, account, pass, requests, &outcomes);
    }
}

/// Pages that still map a lost store's file go back to private memory just before they are merged anew. What could not must
/// not be taken: it lies in a mapping of a file.
fn make_orphans_private(with: &mut Context<'_>, requests: &mut Vec<MergeRequest>) {
    let map = &mut *with.map;
    let orphans: Vec<Page> = requests
        .iter()
        .map(|request| request.page)
        .filter(|page| map.backing(*page).in_file_mapping())
        .collect();
    with.space.make_all_private(map, with.account, &orphans);
    requests.retain(|request| {
        let private = !map.backing(request.page).in_file_mapping();
        if !private {
            map.give_up_published(request.publisher_ref());
        }
        private
    });
}

/// Whether the first requests are all pages of a huge page, and few runs: then it is taken as one. Mapping many runs would
/// keep all of it away for too long.
fn is_whole_huge_page(map: &PageMap, requests: &[MergeRequest]) -> bool {
    let chunk = map.chunk_of(requests[0].page);
    let pages = &map.chunk_at(chunk).pages;
    let Some(all) = requests.get(..CHUNK_PAGES).filter(|_| map.chunk(chunk).huge) else {
        return false;
    };
    let whole = pages.len() == CHUNK_PAGES
        && all[0].page == pages.start
        && all[CHUNK_PAGES - 1].page + 1 == pages.end;
    whole && runs_of(all) <= MOST_RUNS_AT_ONCE
}

/// The next window: it grows while it stays below the stop target, and shrinks when it does not.
fn adapted(window: usize, requests: usize, stop_ns: u64, target_ns: u64) -> usize {
    if stop_ns > target_ns {
        (window * 3 / 4).max(MIN_WINDOW)
    } else if requests == window && stop_ns < target_ns * 3 / 4 {
        (window + window / 4 + 1).min(MAX_WINDOW)
    } else {
        window
    }
}

/// What became of a huge page that was to be merged as one.
fn note_huge(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    monitor: &Monitor,
    first: Page,
    outcomes: &[Outcome],
) {
    let (chunk, start) = (map.chunk_of(first), map.memory().address(first));
    let contended = outcomes.contains(&Outcome::Contended);
    if outcomes.iter().any(|outcome| outcome.was_taken()) {
        split::note_split(map, account, monitor, chunk);
        let whole = outcomes.iter().all(|outcome| *outcome == Outcome::Merged);
        account.stats.huge_whole_total += u64::from(whole);
    } else if contended && !space.pagemap.is_huge(start) {
        split::note_split(map, account, monitor, chunk); // on its way back, or it was none any more
    } else {
        map.stayed_huge(chunk);
    }
    if contended {
        account.stats.huge_wanted_total += 1;
        map.note_contended(chunk);
    }
}

/// Notes what became of each page; how many of those that an engine proposed were not equal.
fn note_outcomes(
    map: &mut PageMap,
    session: &Session,
    account: &mut Account,
    pass: u64,
    requests: &[MergeRequest],
    outcomes: &[Outcome],
) -> usize {
    let mut wrong = 0;
    for (request, outcome) in requests.iter().zip(outcomes) {
        match (outcome, request.slot) {
            (Outcome::Merged, Some(place)) if request.role == Role::Exception => {
                map.bridge(request.page, place);
            }
            (Outcome::Merged, Some(slot)) => {
                let counted = request.publisher_ref().is_some();
                let reference = if counted {
                    Reference::Counted
                } else {
                    Reference::New
                };
                map.share(request.page, slot, reference);
                account.stats.merges_total += 1;
            }
            (Outcome::Merged, None) => {
                map.zero(request.page);
                account.stats.zero_merges_total += 1;
            }
            (Outcome::Different, _) => {
                wrong += usize::from(request.role == Role::Proposed);
                note_collision(map, session, account, request);
                note_failure(map, account, pass, request, Outcome::Different);
            }
            (outcome, _) => note_failure(map, account, pass, request, *outcome),
        }
    }
    wrong
}

/// Notes what became of each copy; how many of those that an engine proposed were not equal.
fn note_healed(
    map: &mut PageMap,
    session: &Session,
    account: &mut Account,
    pass: u64,
    requests: &[MergeRequest],
    outcomes: &[Outcome],
) -> usize {
    let mut wrong = 0;
    for (request, outcome) in requests.iter().zip(outcomes) {
        let stats = &mut account.stats;
        let counter = match outcome {
            Outcome::Merged => {
                note_outcomes(map, session, account, pass, &[*request], &[*outcome]);
                account.stats.heals_total += 1;
                continue;
            }
            Outcome::Pinned => &mut stats.heal_pinned_total,
            Outcome::Untold => &mut stats.heal_failed_total,
            Outcome::Contended => &mut stats.heal_wanted_total,
            Outcome::Different => &mut stats.mismatches_total,
            Outcome::NoVma => &mut stats.refused_vmas_total,
            _ => &mut stats.refused_other_total,
        };
        *counter += 1;
        map.give_up_published(request.publisher_ref());
        match outcome {
            Outcome::Pinned => map.copy_may_be_pinned(request.page, pass),
            // For as long as nothing can be told none is tried.
            Outcome::Untold => map.forget_copy(request.page),
            _ => map.key_copy(request.page, None),
        }
        if *outcome == Outcome::NoVma {
            map.no_vma_is_left(pass);
        }
        if *outcome == Outcome::Different {
            wrong += usize::from(request.role == Role::Proposed);
            note_collision(map, session, account, request);
        }
    }
    wrong
}

fn note_failure(
    map: &mut PageMap,
    account: &mut Account,
    pass: u64,
    request: &MergeRequest,
    outcome: Outcome,
) {
    map.give_up_published(request.publisher_ref());
    let counter = match outcome {
        _ if request.role == Role::Exception => None,
        Outcome::Contended | Outcome::Merged => None, // once for all of the huge page
        Outcome::Different => Some(&mut account.stats.mismatches_total),
        Outcome::Pinned => Some(&mut account.stats.refused_pinned_total),
        Outcome::NoVma => Some(&mut account.stats.refused_vmas_total),
        Outcome::Absent | Outcome::Untold | Outcome::NotTaken | Outcome::Refused | Outcome::Returned => {
            Some(&mut account.stats.refused_other_total)
        }
    };
    if let Some(counter) = counter {
        *counter += 1;
    }
    if outcome == Outcome::NoVma {
        map.no_vma_is_left(pass);
    }
    // A page that was not moved is protected: a pinned one is tried again later, others are keyed anew. What was moved
    // came back unprotected.
    let why = match outcome {
        Outcome::Pinned => NotMerged::Pinned,
        Outcome::NotTaken => NotMerged::Stayed,
        _ => NotMerged::Returned,
    };
    map.not_merged(request.page, why, pass);
}

/// A page was not what its slot holds. If it has the slot's line key all the same, the key must not lead anybody to
/// that slot again: the store marks it, and this page will be hashed. (Else it was written after it was looked up.)
fn note_collision(map: &mut PageMap, session: &Session, account: &mut Account, request: &MergeRequest) {
    let mut reader = KeyReader {
        memory: map.memory(),
        salt: session.salt(),
        account,
    };
    let (key, _) = reader.read(request.page);
    let line = session.index().and_then(|index| index.line(key));
    if request.slot.is_some() && line.and_then(|line| line.slot_for(request.page)) == request.slot {
        map.note_ambiguous(key);
    }
}
