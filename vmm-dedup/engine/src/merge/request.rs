//! A page on its way into a run, and what became of it.

use crate::memory::layout::Page;
use crate::merge::bridged_runs::is_worth_it;
use vmm_dedup_protocol::Slot;

/// A page that should become shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) page: Page,
    /// The slot to map; `None` for the zero page.
    pub(crate) slot: Option<Slot>,
    pub(crate) role: Role,
}

/// What an item is in its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Shares the slot, for which the store already counts a reference: it was just published.
    Publisher,
    /// Shares the slot, or becomes the zero page.
    Twin,
    /// Shares the slot, as an engine proposed.
    Proposed,
    /// Stays private in a mapping that shows the slot at its place to nobody ([`crate::merge::bridged_runs`]).
    Exception,
}

impl Item {
    /// A page whose twin is in a slot already.
    pub(crate) fn twin_of(page: Page, slot: Slot) -> Self {
        Self {
            page,
            slot: Some(slot),
            role: Role::Twin,
        }
    }

    /// A page whose twin an engine has found.
    pub(crate) fn proposed(page: Page, slot: Slot) -> Self {
        Self {
            role: Role::Proposed,
            ..Self::twin_of(page, slot)
        }
    }

    /// A private page among shared ones.
    pub(crate) fn exception(page: Page, place: Slot) -> Self {
        Self {
            page,
            slot: Some(place),
            role: Role::Exception,
        }
    }

    /// Whether the store already counts a reference for it.
    pub(crate) fn owned(&self) -> bool {
        self.role == Role::Publisher
    }

    /// A page of zeros.
    pub(crate) fn zero(page: Page) -> Self {
        Self {
            page,
            slot: None,
            role: Role::Twin,
        }
    }
}

/// What became of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It maps the slot, or the zero page.
    Merged,
    /// Its content was another one; it is where it was.
    Different,
    /// It is pinned or shared with another process.
    Pinned,
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
    Wanted,
}

impl Outcome {
    /// Whether the page was taken and is to go back.
    pub(crate) fn is_held(self) -> bool {
        matches!(
            self,
            Self::Different | Self::Refused | Self::NoVma | Self::Returned
        )
    }

    /// Whether the page was taken, whatever became of it.
    pub(crate) fn was_taken(self) -> bool {
        self.is_held() || self == Self::Merged
    }
}

/// Whether a window's first and last run go on in the windows beside it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Open {
    pub(crate) start: bool,
    pub(crate) end: bool,
}

/// Whether two items can go into one run: neighbours in the guest and in the store, or two zero pages.
pub(crate) fn continues(a: &Item, b: &Item) -> bool {
    b.page == a.page + 1
        && match (a.slot, b.slot) {
            (None, None) => true,
            (Some(a), Some(b)) => a.checked_add_in_segment(1) == Some(b),
            _ => false,
        }
}

/// Gives up exceptions that are at the end of a run, or too many, since pages around them could not be merged.
pub(crate) fn return_exceptions(items: &[Item], outcomes: &mut [Outcome], open: Open) {
    let is_exception = |at: usize| items[at].role == Role::Exception;
    let mut start = 0;
    while start < items.len() {
        let goes_on = |at: usize, outcomes: &[Outcome]| {
            outcomes[at] == Outcome::Merged
                && outcomes[at + 1] == Outcome::Merged
                && continues(&items[at], &items[at + 1])
        };
        let end = (start..items.len() - 1)
            .find(|at| !goes_on(*at, outcomes))
            .map_or(items.len(), |at| at + 1);
        let (open_start, open_end) = (open.start && start == 0, open.end && end == items.len());
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

    const DONE: Outcome = Outcome::Merged;

    /// A run from page and slot 100 on: `s` shared, `e` an exception, `x` shared and not taken.
    fn run(kinds: &str) -> (Vec<Item>, Vec<Outcome>) {
        let item = |(n, kind): (u32, char)| {
            let slot = Slot::try_new(100 + n).unwrap();
            let item = match kind {
                'e' => Item::exception(100 + n, slot),
                _ => Item::twin_of(100 + n, slot),
            };
            (item, if kind == 'x' { Outcome::Pinned } else { DONE })
        };
        (0..).zip(kinds.chars()).map(item).unzip()
    }

    fn kept(kinds: &str, open: Open) -> String {
        let (items, mut outcomes) = run(kinds);
        return_exceptions(&items, &mut outcomes, open);
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
    fn only_neighbours_in_guest_and_store_make_a_run() {
        let (mut items, mut outcomes) = run("sess");
        items[2].slot = Slot::try_new(500);
        return_exceptions(&items, &mut outcomes, Open::default());
        assert_eq!(outcomes, [DONE, Outcome::Returned, DONE, DONE]);
    }
}
