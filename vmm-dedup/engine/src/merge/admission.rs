//! Found > admitted: whether a page may share a slot now. One place answers, with a reason, and `explain` shows it.
//!
//! Nothing is changed here: what follows from a refusal is done by [`refusals`](mod@crate::merge::refusals).

use crate::lookup::request::MergeRequest;
use crate::memory::layout::Page;
use crate::memory::page_map::{PageMap, VMAS_PER_RUN};
use crate::merge::bridged_runs;
use crate::merge::run::runs_of;
use crate::sys::page_size::CHUNK_PAGES;
use crate::track::access::Probes;
use vmm_dedup_protocol::Slot;

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

/// What is known of a page, and of those that are asked about with it, beside their states.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// All of its 2 MiB share what is or becomes a huge page of the store: no sample of its use is needed any more.
    pub(crate) as_one: bool,
    /// It waits until its 2 MiB have quiesced ([`bridged_runs`]).
    pub(crate) deferred: bool,
    /// It is swapped out now.
    pub(crate) swapped: bool,
    /// Mappings that it needs, with those that are asked about with it.
    pub(crate) runs: usize,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            as_one: false,
            deferred: false,
            swapped: false,
            runs: 1,
        }
    }
}

/// What holds for all pages while some are merged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    pub(crate) probes: Probes,
    /// Nothing is merged for now: direct I/O that merging could lose.
    pub(crate) suspended: bool,
    /// The service breaks sharing.
    pub(crate) managed: bool,
    /// Pages that the kernel copied can be merged.
    pub(crate) heals: bool,
}

/// What became of requests.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// They may be merged now; in page order.
    pub(crate) now: Vec<MergeRequest>,
    /// They may not, and why.
    pub(crate) refused: Vec<(MergeRequest, Obstacle)>,
}

impl Admitted {
    /// `verdicts`: on these requests, in order. Whole passes are sorted out, so who is admitted stays where he is.
    fn by(verdicts: &[Verdict], mut requests: Vec<MergeRequest>) -> Self {
        let (mut refused, mut verdicts) = (Vec::new(), verdicts.iter());
        requests.retain(|request| match verdicts.next() {
            Some(Verdict::Refuse(obstacle)) => {
                refused.push((*request, *obstacle));
                false
            }
            _ => true,
        });
        Self {
            now: requests,
            refused,
        }
    }
}

/// Answers, for pages of one VM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission<'a> {
    pub(crate) map: &'a PageMap,
    pub(crate) terms: Terms,
}

impl Admission<'_> {
    /// Whether a page may share a slot; `None`: the zero page.
    pub(crate) fn may_merge(&self, page: Page, slot: Option<Slot>, facts: Facts) -> Verdict {
        let unchanged = self.map.backing(page).may_be_merged(slot);
        // A lost store's page is made private first, which frees mappings; it is asked again then.
        let lacks_mappings = || !self.map.backing(page).maps_a_slot() && !self.has_mappings_for(facts.runs);
        let obstacle = match () {
            () if self.terms.suspended => Some(Obstacle::Suspended),
            () if !unchanged => Some(Obstacle::Changed),
            () => self.obstacle(page, facts.as_one),
        };
        let obstacle = obstacle.or_else(|| match () {
            () if slot.is_some() && self.map.is_paused(page) => Some(Obstacle::Restless),
            () if slot.is_some() && lacks_mappings() => Some(Obstacle::NoMappings),
            () if facts.deferred => Some(Obstacle::Deferred),
            () if facts.swapped => Some(Obstacle::SwappedOut),
            () => None,
        });
        obstacle.map_or(Verdict::Merge, Verdict::Refuse)
    }

    /// Why a page could share no slot now, whichever it is; asked of pages that have no twin.
    pub(crate) fn obstacle_to_any(&self, page: Page) -> Option<Obstacle> {
        let restless = || self.map.is_paused(page).then_some(Obstacle::Restless);
        self.obstacle(page, Facts::default().as_one).or_else(restless)
    }

    /// The same for zeros as well.
    fn obstacle(&self, page: Page, as_one: bool) -> Option<Obstacle> {
        let (map, chunk) = (self.map, self.map.chunk_of(page));
        let state = map.chunk(chunk);
        match () {
            () if map.is_withheld(page) => Some(Obstacle::Guest),
            () if map.backing(page).is_copied() && !self.terms.heals => Some(Obstacle::MayBePinned),
            () if state.huge && !state.twins.split => Some(Obstacle::Huge),
            () if !as_one && self.terms.probes.include(map, chunk, page) => Some(Obstacle::Probe),
            () => None,
        }
    }

    fn has_mappings_for(&self, runs: usize) -> bool {
        let needed = i64::try_from(runs).map_or(i64::MAX, |runs| runs.saturating_mul(VMAS_PER_RUN));
        self.map.has_vmas_for(needed)
    }

    /// Found > admitted. Requests are in page order, each page once.
    pub(crate) fn admit(&self, found: Vec<MergeRequest>) -> Admitted {
        let mut verdicts = Vec::with_capacity(found.len());
        for (_, group) in self.map.memory().by_chunk(&found, |request| request.page) {
            let facts = Facts {
                as_one: !self.terms.managed && is_huge_page_of_store(group),
                ..Facts::default()
            };
            let verdict = |request: &MergeRequest| self.may_merge(request.page, request.slot, facts);
            verdicts.extend(group.iter().map(verdict));
        }
        Admitted::by(&verdicts, found)
    }

    /// Found > admitted: the twins of 2 MiB in which more twins could make longer runs are refused until these have quiesced.
    pub(crate) fn admit_quiesced(&self, requests: Vec<MergeRequest>, pass: u64) -> Admitted {
        let mut verdicts = Vec::with_capacity(requests.len());
        for (_, group) in self.map.memory().by_chunk(&requests, |request| request.page) {
            let waits = !self.terms.managed && bridged_runs::waits(self.map, pass, group);
            let verdict = match waits {
                true => Verdict::Refuse(Obstacle::Deferred),
                false => Verdict::Merge,
            };
            verdicts.resize(verdicts.len() + group.len(), verdict);
        }
        Admitted::by(&verdicts, requests)
    }

    /// Admitted > admitted, right before these requests are merged, since time went by: other windows have used mappings, the
    /// kernel may have swapped pages out, and the guest may have discarded some.
    pub(crate) fn admit_again(
        &self,
        requests: &[MergeRequest],
        is_swapped: impl Fn(Page) -> bool,
    ) -> Admitted {
        // It was asked with all of its 2 MiB.
        let facts = Facts {
            as_one: true,
            runs: runs_of(requests),
            ..Facts::default()
        };
        let verdict = |request: &MergeRequest| {
            let swapped = is_swapped(request.page);
            self.may_merge(request.page, request.slot, Facts { swapped, ..facts })
        };
        let verdicts: Vec<Verdict> = requests.iter().map(verdict).collect();
        Admitted::by(&verdicts, requests.to_vec())
    }
}

/// Whether requests show all of what is or becomes a huge page of the store.
fn is_huge_page_of_store(requests: &[MergeRequest]) -> bool {
    let begins = requests[0].slot.is_some_and(Slot::begins_huge_page);
    requests.len() == CHUNK_PAGES && begins && runs_of(requests) == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::hint::Hint;
    use crate::memory::layout::Memory;
    use crate::memory::page_map::Reference;
    use crate::sys::page_size::HUGE_SIZE;
    use std::sync::Arc;
    use vmm_dedup_protocol::key::Key;

    const PASS: u64 = 1;
    const CHUNK: Page = 512;

    /// Candidates in two chunks, and mappings for so many runs.
    fn map(runs: i64) -> PageMap {
        let memory = Memory::made_up(std::slice::from_ref(&(HUGE_SIZE..3 * HUGE_SIZE)));
        let mut map = PageMap::new(Arc::new(memory), runs * VMAS_PER_RUN, 0);
        for page in 0..2 * CHUNK {
            map.sight(page, Key::try_new(u64::from(page) + 1).unwrap(), PASS);
        }
        map
    }

    fn slot(n: u32) -> Slot {
        Slot::try_new(n).unwrap()
    }

    /// What is refused if these pages are to share slots that do not follow each other.
    fn refused(map: &PageMap, terms: Terms, pages: &[Page]) -> Vec<(Page, Obstacle)> {
        let twin = |page: &Page| MergeRequest::twin_of(*page, slot(2 * page + 1));
        let requests: Vec<MergeRequest> = pages.iter().map(twin).collect();
        let Admitted { now, refused } = Admission { map, terms }.admit(requests.clone());
        assert_eq!(now.len() + refused.len(), requests.len());
        let refused = refused.into_iter();
        refused
            .map(|(request, obstacle)| (request.page, obstacle))
            .collect()
    }

    #[test]
    fn who_has_an_obstacle_is_refused_alone() {
        let mut map = map(1000);
        let terms = Terms::default();
        assert_eq!(refused(&map, terms, &[1, 2, 600]), []);
        map.share(2, slot(9), Reference::New);
        map.say(3, Hint::NEVER);
        map.share(4, slot(9), Reference::New);
        map.copied_by_kernel(4);
        let wanted = [
            (2, Obstacle::Changed),
            (3, Obstacle::Guest),
            (4, Obstacle::MayBePinned),
        ];
        assert_eq!(refused(&map, terms, &[1, 2, 3, 4, 5]), wanted);
        let heals = Terms { heals: true, ..terms };
        assert_eq!(refused(&map, heals, &[1, 2, 3, 4, 5]), wanted[..2]);
        let suspended = Terms {
            suspended: true,
            ..heals
        };
        assert_eq!(
            refused(&map, suspended, &[1, 2]),
            [1, 2].map(|page| (page, Obstacle::Suspended))
        );
    }

    #[test]
    fn a_window_is_asked_with_all_the_mappings_that_it_needs() {
        let map = map(2);
        let terms = Terms::default();
        let admission = Admission { map: &map, terms };
        let requests = [1, 3, 5].map(|page| MergeRequest::twin_of(page, slot(page)));
        assert_eq!(
            admission.admit(requests.to_vec()).now,
            requests,
            "each alone has one"
        );
        let again = admission.admit_again(&requests, |_| false);
        assert_eq!(
            again.refused,
            requests.map(|request| (request, Obstacle::NoMappings))
        );
        assert_eq!(
            admission.admit_again(&requests[..2], |_| false).now,
            requests[..2]
        );
        let zeros = [1, 3, 5].map(MergeRequest::zero);
        assert_eq!(
            admission.admit_again(&zeros, |_| false).now,
            zeros,
            "zeros need none"
        );
    }

    #[test]
    fn what_is_swapped_out_waits_and_the_rest_of_its_window_does_not() {
        let map = map(1000);
        let terms = Terms::default();
        let admission = Admission { map: &map, terms };
        let requests = [1, 2, 3].map(|page| MergeRequest::twin_of(page, slot(page)));
        let again = admission.admit_again(&requests, |page| page == 2);
        assert_eq!(again.now, [requests[0], requests[2]]);
        assert_eq!(again.refused, [(requests[1], Obstacle::SwappedOut)]);
    }

    #[test]
    fn the_answer_to_explain_is_the_answer_to_merging() {
        let mut map = map(1000);
        map.say(3, Hint::NEVER);
        map.share(4, slot(9), Reference::New);
        map.copied_by_kernel(4);
        for terms in [
            Terms::default(),
            Terms {
                heals: true,
                ..Terms::default()
            },
            Terms {
                suspended: true,
                ..Terms::default()
            },
        ] {
            let admission = Admission { map: &map, terms };
            for page in 1..6 {
                let request = MergeRequest::twin_of(page, slot(page));
                let verdict = admission.may_merge(page, request.slot, Facts::default());
                let wanted = Admitted::by(&[verdict], vec![request]);
                assert_eq!(admission.admit(vec![request]), wanted);
                assert_eq!(admission.admit_again(&[request], |_| false), wanted);
            }
        }
    }
}
