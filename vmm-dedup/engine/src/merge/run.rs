//! Runs of requests, and what became of each: which pages make one mapping, and which exceptions stay in it.

use crate::lookup::gaps::is_worth_it;
use crate::lookup::request::{MergeRequest, Role};
use crate::window::Taken;
use std::ops::Range;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It maps the slot, or the zero page.
    Merged,
    /// Its content was another one; it is where it was.
    Different,
    /// It is pinned or shared with another process.
    Pinned,
    /// What tells whether it is pinned failed.
    Untold,
    /// Nothing was there.
    Absent,
    /// The kernel would not take it.
    NotTaken,
    /// The kernel would not map the zero page in its place.
    Refused,
    /// No VMA was left to map it.
    NoVma,
    /// An exception whose run did not come about; it is where it was.
    Returned,
    /// Somebody waited for the huge page that it is a part of, which is where it was.
    Contended,
}

impl Outcome {
    /// Whether the page was taken, whatever became of it.
    pub(crate) fn was_taken(self) -> bool {
        matches!(
            self,
            Self::Merged | Self::Different | Self::Refused | Self::NoVma | Self::Returned
        )
    }

    /// What taking a page comes to; [`Outcome::Merged`] stands for "taken" until it is verified.
    pub(crate) fn of_taking(taken: Taken) -> Self {
        match taken {
            Taken::Yes => Self::Merged,
            Taken::Pinned => Self::Pinned,
            Taken::Absent => Self::Absent,
            Taken::Refused => Self::NotTaken,
        }
    }
}

/// Where a window's pages are while they are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    /// In scratch memory for small pages, which is freed for many windows at once.
    Pages,
    /// The window is a huge page: in a place where it can stay one.
    HugePage {
        /// Whether it goes back at once if somebody waits for it.
        give_back: bool,
    },
}

/// Whether a window's first and last run go on in the windows beside it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Open {
    pub(crate) start: bool,
    pub(crate) end: bool,
}

/// Whether two requests can go into one run: neighbours in the guest and in the store, two zero pages, or two that stay
/// private.
pub(crate) fn continues(a: &MergeRequest, b: &MergeRequest) -> bool {
    b.page == a.page + 1
        && match (a.slot, b.slot) {
            (None, None) => (a.role == Role::MovedOut) == (b.role == Role::MovedOut),
            (Some(a), Some(b)) => a.checked_add_in_segment(1) == Some(b),
            _ => false,
        }
}

/// The last run before `end` of requests that are to be mapped together: neighbours that are [`Outcome::Merged`]. Runs are mapped from the
/// last to the first: the kernel splits a mapping a tenth cheaper at its end than at its beginning.
pub(crate) fn last_run(requests: &[MergeRequest], outcomes: &[Outcome], end: usize) -> Option<Range<usize>> {
    let last = outcomes[..end]
        .iter()
        .rposition(|outcome| *outcome == Outcome::Merged)?;
    let goes_on =
        |at: &usize| outcomes[at - 1] == Outcome::Merged && continues(&requests[at - 1], &requests[*at]);
    let before = (1..=last).rev().take_while(goes_on).count();
    Some(last - before..last + 1)
}

/// How many runs requests make.
pub(crate) fn runs_of(requests: &[MergeRequest]) -> usize {
    let ends = requests.windows(2).filter(|pair| !continues(&pair[0], &pair[1]));
    1 + ends.count()
}

/// Gives up exceptions that are at the end of a run, or too many, since pages around them could not be merged.
pub(crate) fn return_exceptions(requests: &[MergeRequest], outcomes: &mut [Outcome], open: Open) {
    let is_exception = |at: usize| requests[at].role == Role::Exception;
    let mut start = 0;
    while start < requests.len() {
        let goes_on = |at: usize, outcomes: &[Outcome]| {
            outcomes[at] == Outcome::Merged
                && outcomes[at + 1] == Outcome::Merged
                && continues(&requests[at], &requests[at + 1])
        };
        let end = (start..requests.len() - 1)
            .find(|at| !goes_on(*at, outcomes))
            .map_or(requests.len(), |at| at + 1);
        let (open_start, open_end) = (open.start && start == 0, open.end && end == requests.len());
        let first = (start..end)
            .find(|at| open_start || !is_exception(*at))
            .unwrap_or(end);
        let last = (first..end)
            .rfind(|at| open_end || !is_exception(*at))
            .map_or(first, |at| at + 1);
        let exceptions = (first..last).filter(|at| is_exception(*at)).count();
        // A part of a run is not judged by itself.
        let worth_it = open_start || open_end || is_worth_it(last - first - exceptions, exceptions);
        for at in (start..end).filter(|at| is_exception(*at)) {
            if outcomes[at] == Outcome::Merged && !(worth_it && (first..last).contains(&at)) {
                outcomes[at] = Outcome::Returned;
            }
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::Slot;

    const DONE: Outcome = Outcome::Merged;

    /// A run from page and slot 100 on: `s` shared, `e` an exception, `x` shared and not taken.
    fn run(kinds: &str) -> (Vec<MergeRequest>, Vec<Outcome>) {
        let request = |(n, kind): (u32, char)| {
            let slot = Slot::try_new(100 + n).unwrap();
            let request = match kind {
                'e' => MergeRequest::exception(100 + n, slot),
                _ => MergeRequest::twin_of(100 + n, slot),
            };
            (request, if kind == 'x' { Outcome::Pinned } else { DONE })
        };
        (0..).zip(kinds.chars()).map(request).unzip()
    }

    fn kept(kinds: &str, open: Open) -> String {
        let (requests, mut outcomes) = run(kinds);
        return_exceptions(&requests, &mut outcomes, open);
        let show = |(kind, outcome): (char, &Outcome)| if *outcome == Outcome::Returned { 'r' } else { kind };
        kinds.chars().zip(&outcomes).map(show).collect()
    }

    #[test]
    fn exceptions_lie_between_shared_pages() {
        assert_eq!(kept("sesses", Open::default()), "sesses");
        assert_eq!(kept("esse", Open::default()), "rssr");
        assert_eq!(kept("sexes", Open::default()), "srxrs");
        assert_eq!(kept("eee", Open::default()), "rrr");
    }

    #[test]
    fn more_exceptions_than_shared_pages_are_not_worth_it() {
        assert_eq!(kept("seees", Open::default()), "srrrs");
        assert_eq!(kept("sseees", Open::default()), "sseees");
    }

    #[test]
    fn a_run_may_go_on_beside_the_window() {
        let (start, end) = (true, true);
        assert_eq!(kept("ees", Open { start, end: false }), "ees");
        assert_eq!(kept("see", Open { start: false, end }), "see");
        assert_eq!(kept("ee", Open { start, end }), "ee");
        assert_eq!(kept("exe", Open { start, end }), "rxr");
        assert_eq!(kept("sexes", Open { start, end }), "srxrs");
    }

    #[test]
    fn runs_are_cut_from_the_last_to_the_first() {
        let cut = |kinds: &str| {
            let (requests, outcomes) = run(kinds);
            let next = |end: usize| last_run(&requests, &outcomes, end);
            let runs = std::iter::successors(next(requests.len()), |run| next(run.start));
            runs.collect::<Vec<_>>()
        };
        assert_eq!(cut("xssxesxx"), [4..6, 1..3]);
        assert_eq!(cut("sssxs"), [4..5, 0..3]);
        assert_eq!(cut("x"), []);
        assert_eq!(cut(""), []);
        let (mut requests, outcomes) = run("ssss");
        requests[2].slot = Slot::try_new(500);
        assert_eq!(last_run(&requests, &outcomes, 4), Some(3..4));
        assert_eq!(last_run(&requests, &outcomes, 3), Some(2..3));
        assert_eq!(last_run(&requests, &outcomes, 2), Some(0..2));
    }

    #[test]
    fn only_neighbours_in_guest_and_store_make_a_run() {
        let (mut requests, mut outcomes) = run("sess");
        requests[2].slot = Slot::try_new(500);
        return_exceptions(&requests, &mut outcomes, Open::default());
        assert_eq!(outcomes, [DONE, Outcome::Returned, DONE, DONE]);
    }
}
