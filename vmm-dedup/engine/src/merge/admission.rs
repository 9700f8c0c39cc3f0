//! Found > admitted: whether a page may share a slot now. One place answers, with a reason, and `explain` shows it.

use crate::lookup::request::MergeRequest;
use crate::memory::layout::Page;
use crate::memory::page_map::{PageMap, VMAS_PER_RUN};
use crate::memory::page_state::Backing;
use crate::memory::thp_state::{Asked, SAMPLING};
use crate::merge::bridged_runs::{self, Deferred};
use crate::merge::context::Context;
use crate::merge::run::runs_of;
use crate::merge::swapped::Swapped;
use crate::store::session::{ResyncCause, Session};
use crate::sys::guest;
use crate::sys::page_size::CHUNK_PAGES;
use crate::thp::duplicates::is_sampled;
use crate::thp::monitor::Monitor;
use crate::thp::split;
use vmm_dedup_protocol::Slot;

/// Fewest pages of a sample, chosen by key, that tell something of a whole huge page.
const LEAST_SAMPLE: usize = CHUNK_PAGES / SAMPLING / 2;

/// Whether a page may share a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Merge,
    Refuse(Obstacle),
}

/// Why a page may not share a slot now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// Something could be lost: merging is suspended for all of the VM.
    Suspended,
    /// It is shared already.
    Changed,
    /// The kernel has copied it, and it may be pinned.
    MayBePinned,
    /// It is kept private so that the use of its 2 MiB can be sampled.
    Probe,
    /// It is part of a huge page that is not worth splitting, as far as is known.
    Huge,
    /// Sharing it did not last lately: it is left alone for a while.
    Restless,
    /// There is no mapping left for it.
    NoMappings,
    /// Its 2 MiB have not quiesced: with more twins it can be one mapping.
    Deferred,
    /// It is swapped out: comparing it would read it in while its window is open.
    SwappedOut,
    /// The guest says that it is never to be shared, free, or soon overwritten.
    Guest,
}

/// What is known of a page beside its state.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    /// It waits until its 2 MiB have quiesced ([`bridged_runs`]).
    pub(crate) deferred: bool,
    /// It is swapped out now.
    pub(crate) swapped: bool,
}

impl Facts {
    /// Why the page may not share any slot now, for all that is known beside its state.
    fn obstacle(self) -> Option<Obstacle> {
        match self {
            Self { deferred: true, .. } => Some(Obstacle::Deferred),
            Self { swapped: true, .. } => Some(Obstacle::SwappedOut),
            _ => None,
        }
    }
}

/// What the answer depends on beside the page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission<'a> {
    pub(crate) monitor: &'a Monitor,
    /// Nothing is merged for now: direct I/O that merging could lose.
    pub(crate) suspended: bool,
    /// The service breaks sharing.
    pub(crate) managed: bool,
    /// Pages that the kernel copied can be merged.
    pub(crate) heals: bool,
}

impl Admission<'_> {
    /// Whether a page may share a slot; `None`: the zero page.
    pub(crate) fn may_merge(&self, map: &PageMap, page: Page, slot: Option<Slot>, facts: Facts) -> Verdict {
        match (self.judge(map, page, slot, false), facts.obstacle()) {
            (Verdict::Merge, Some(obstacle)) => Verdict::Refuse(obstacle),
            (verdict, _) => verdict,
        }
    }

    /// `as_one`: all of the 2 MiB around share what is or becomes a huge page of the store.
    fn judge(&self, map: &PageMap, page: Page, slot: Option<Slot>, as_one: bool) -> Verdict {
        let chunk = map.chunk_of(page);
        let state = map.chunk(chunk);
        let orphan = map.backing(page).maps_a_slot();
        let private = match map.backing(page) {
            Backing::Private | Backing::OrphanedSlot(_) => true,
            Backing::Zero => slot.is_none(),
            backing => backing.is_copied(),
        };
        let reason = match () {
            () if self.suspended => Obstacle::Suspended,
            () if !private => Obstacle::Changed,
            () if map.rests(page) => Obstacle::Guest,
            () if map.backing(page).is_copied() && !self.heals => Obstacle::MayBePinned,
            () if state.huge && !state.twins.split => Obstacle::Huge,
            () if !as_one && self.monitor.probes().include(map, chunk, page) => Obstacle::Probe,
            () if slot.is_some() && map.is_paused(page) => Obstacle::Restless,
            // A lost store's page is made private first, which frees mappings; it is asked again then.
            () if slot.is_some() && !orphan && !map.has_vmas_for(VMAS_PER_RUN) => Obstacle::NoMappings,
            () => return Verdict::Merge,
        };
        Verdict::Refuse(reason)
    }

    /// Leaves out what may not be merged now. Requests are in page order, each page once. Also decides which huge pages have
    /// enough twins to be split.
    pub(crate) fn admit(
        &self,
        with: &mut Context<'_>,
        deferred: &mut Deferred,
        requests: &[MergeRequest],
    ) -> Vec<MergeRequest> {
        let mut admitted = Vec::with_capacity(requests.len());
        let memory = with.map.memory().clone();
        for group in requests.chunk_by(|a, b| memory.chunk_of(a.page) == memory.chunk_of(b.page)) {
            let chunk = memory.chunk_of(group[0].page);
            if with.map.chunk(chunk).huge && !with.map.chunk(chunk).twins.split {
                self.count_twins(with.map, with.session, chunk, group);
            }
            let as_one = !self.managed && is_huge_page_of_store(group);
            for request in group {
                match self.judge(with.map, request.page, request.slot, as_one) {
                    Verdict::Merge => admitted.push(*request),
                    Verdict::Refuse(obstacle) => refuse(with, deferred, request, obstacle),
                }
            }
        }
        admitted
    }

    /// Leaves out the twins of 2 MiB in which more twins could make longer runs, until these have quiesced.
    pub(crate) fn let_ripen(
        &self,
        with: &mut Context<'_>,
        deferred: &mut Deferred,
        requests: &[MergeRequest],
    ) -> Vec<MergeRequest> {
        if self.managed {
            return requests.to_vec();
        }
        let mut ripe = Vec::with_capacity(requests.len());
        let memory = with.map.memory().clone();
        for group in requests.chunk_by(|a, b| memory.chunk_of(a.page) == memory.chunk_of(b.page)) {
            if !bridged_runs::ripens(with.map, with.pass, group) {
                ripe.extend_from_slice(group);
                continue;
            }
            with.map.defer_chunk(memory.chunk_of(group[0].page), with.pass);
            for request in group {
                refuse(with, deferred, request, Obstacle::Deferred);
            }
            split::split_if_huge(with.map, with.account, with.monitor, group[0].page);
        }
        ripe
    }

    /// Adds to the twins that a huge page is known to have, and decides on splitting it. A line key is not enough for
    /// that: a huge page may be busy outside its key lines.
    fn count_twins(&self, map: &mut PageMap, session: &Session, chunk: usize, requests: &[MergeRequest]) {
        let mixed = map.chunk(chunk).mixed;
        let Some(wanted) = self.monitor.twins_wanted(&mixed) else {
            return;
        };
        let sampled = mixed.asked == Asked::Sample;
        let share = if sampled { SAMPLING } else { 1 };
        let enough = (wanted as usize / share).max(1);
        let known = usize::from(map.chunk(chunk).twins.known);
        let equal = requests
            .iter()
            .filter(|request| looks_equal(map, session, request));
        let found = equal.take(enough.saturating_sub(known)).count();
        let likely_whole = sampled && is_sample_repeated(map, chunk, requests);
        let all = known + found >= enough || likely_whole;
        map.note_twins(chunk, known + found, all && !sampled);
        if all {
            // Those that were deferred before are found again at the next look.
            map.look_again(chunk);
            map.ask_about_all(chunk, likely_whole);
        }
    }
}

/// Refuses a page: counts it, and sees to it that it is found again when that may help.
fn refuse(with: &mut Context<'_>, deferred: &mut Deferred, request: &MergeRequest, obstacle: Obstacle) {
    let (map, session, stats) = (&mut *with.map, &mut *with.session, &mut with.account.stats);
    match obstacle {
        // It waits in the list.
        Obstacle::Deferred => return deferred.push(map, request),
        // What is no news any more must be found again.
        Obstacle::Suspended => session.overrun_news(),
        Obstacle::SwappedOut => {
            stats.refused_swapped_total += 1;
            session.schedule_resync(with.pass, ResyncCause::Missed);
        }
        Obstacle::NoMappings => {
            stats.refused_vmas_total += 1;
            session.schedule_resync(with.pass, ResyncCause::NoMappings);
        }
        Obstacle::MayBePinned => stats.heal_pinned_total += 1,
        // Whoever ends these has the page looked at again.
        Obstacle::Changed | Obstacle::Probe | Obstacle::Huge | Obstacle::Guest | Obstacle::Restless => {}
    }
    map.defer(request.page, request.publisher_ref());
    if obstacle == Obstacle::MayBePinned {
        map.copy_may_be_pinned(request.page, with.pass);
    }
}

/// Right before a window, since time went by: other windows have used mappings, and the kernel may have swapped pages out. Who
/// is left of its requests, which are in page order within 2 MiB; `None`: all.
pub(crate) fn admit_to_window(
    with: &mut Context<'_>,
    deferred: &mut Deferred,
    swapped: &Swapped,
    requests: &[MergeRequest],
) -> Option<Vec<MergeRequest>> {
    let (first, last) = (requests.first()?.page, requests.last()?.page);
    let zero_only = requests.iter().all(|request| request.slot.is_none());
    if !zero_only && lacks_mappings(with, deferred, requests) {
        return Some(Vec::new());
    }
    let swapped = swapped.out(&mut with.space.pagemap, with.map.memory(), &(first..last + 1));
    if swapped.is_empty() {
        return None;
    }
    let mut left = Vec::with_capacity(requests.len());
    for request in requests {
        let facts = Facts {
            swapped: swapped.contains((request.page - first) as usize),
            ..Facts::default()
        };
        match facts.obstacle() {
            None => left.push(*request),
            Some(obstacle) => refuse(with, deferred, request, obstacle),
        }
    }
    // What is swapped out may lie between the requests.
    (left.len() < requests.len()).then_some(left)
}

/// Whether the mappings that requests need do not fit the budget any more; then all are refused.
pub(crate) fn lacks_mappings(
    with: &mut Context<'_>,
    deferred: &mut Deferred,
    requests: &[MergeRequest],
) -> bool {
    let runs = i64::try_from(runs_of(requests)).unwrap_or(i64::MAX / VMAS_PER_RUN);
    let lacks = !with.map.has_vmas_for(runs * VMAS_PER_RUN);
    if lacks {
        for request in requests {
            refuse(with, deferred, request, Obstacle::NoMappings);
        }
    }
    lacks
}

/// Whether all pages of a huge page that were asked about as a sample have twins.
fn is_sample_repeated(map: &PageMap, chunk: usize, requests: &[MergeRequest]) -> bool {
    let in_sample = |page: Page| map.private_candidate(page).is_some_and(is_sampled);
    let pages = map.chunk_at(chunk).pages.clone();
    let asked = pages.filter(|page| in_sample(*page));
    let twins = requests.iter().filter(|request| in_sample(request.page)).count();
    twins >= LEAST_SAMPLE && asked.count() == twins
}

/// Whether a page that the guest may be writing seems to hold what its slot holds.
#[allow(unsafe_code)] // reads guest memory
fn looks_equal(map: &PageMap, session: &Session, request: &MergeRequest) -> bool {
    let page = map.memory().address(request.page);
    let Some(slot) = request.slot else {
        return true; // it was read whole when it was keyed
    };
    let slot = session.store().and_then(|store| store.slot(slot));
    // SAFETY: guest memory stays mapped while the service runs, and slots are mapped.
    slot.is_some_and(|(_, slot)| unsafe { guest::seems_same_page(page, slot) })
}

/// Whether requests show all of what is or becomes a huge page of the store.
fn is_huge_page_of_store(requests: &[MergeRequest]) -> bool {
    let begins = requests[0].slot.is_some_and(Slot::begins_huge_page);
    requests.len() == CHUNK_PAGES && begins && runs_of(requests) == 1
}
