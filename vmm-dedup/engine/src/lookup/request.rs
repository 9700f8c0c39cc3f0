//! Pages on their way from stage to stage: keyed, and with a twin.

use crate::memory::layout::Page;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// Pages that were read.
#[derive(Debug, Default)]
pub(crate) struct Keyed {
    /// All of them are zero.
    pub(crate) zeros: Vec<Page>,
    /// The others, with their line keys.
    pub(crate) keys: Vec<(Page, Key)>,
}

/// A page that should become shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MergeRequest {
    pub(crate) page: Page,
    /// The slot to map; `None` for the zero page, and where no slot is mapped.
    pub(crate) slot: Option<Slot>,
    pub(crate) role: Role,
}

/// What a request is in its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Shares the slot, for which the store already counts a reference: it was just published.
    Publisher,
    /// Shares the slot, or becomes the zero page.
    Twin,
    /// Shares the slot, as an engine proposed.
    Proposed,
    /// Stays private in a mapping that shows the slot at its place to nobody
    /// ([`bridged_runs`](mod@crate::merge::bridged_runs)).
    Exception,
    /// Maps a slot whose page has moved to this one.
    Moved,
    /// Stays private, and leaves the mapping of a store file that it lies in.
    MovedOut,
}

impl MergeRequest {
    /// A page whose twin is in a slot already.
    pub(crate) fn twin_of(page: Page, slot: Slot) -> Self {
        Self {
            page,
            slot: Some(slot),
            role: Role::Twin,
        }
    }

    /// A page that was just published.
    pub(crate) fn published(page: Page, slot: Slot) -> Self {
        Self {
            role: Role::Publisher,
            ..Self::twin_of(page, slot)
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
            role: Role::Exception,
            ..Self::twin_of(page, place)
        }
    }

    /// A page that maps a slot whose page has moved to another.
    pub(crate) fn moved(page: Page, slot: Slot) -> Self {
        Self {
            role: Role::Moved,
            ..Self::twin_of(page, slot)
        }
    }

    /// A copy that is to lie in memory of its own.
    pub(crate) fn move_out(page: Page) -> Self {
        Self {
            role: Role::MovedOut,
            ..Self::zero(page)
        }
    }

    /// A page of zeros.
    pub(crate) fn zero(page: Page) -> Self {
        Self {
            page,
            slot: None,
            role: Role::Twin,
        }
    }

    /// The slot for which the store already counts a reference.
    pub(crate) fn publisher_ref(&self) -> Option<Slot> {
        self.slot.filter(|_| self.role == Role::Publisher)
    }
}

/// Sorts what was found by pages. The second part is what more was found for the same pages: a page may have been published
/// twice, with two contents.
pub(crate) fn in_page_order(mut found: Vec<MergeRequest>) -> (Vec<MergeRequest>, Vec<MergeRequest>) {
    found.sort_by_key(|request| (request.page, request.publisher_ref().is_none()));
    let mut twice = Vec::new();
    found.dedup_by(|again, kept| {
        let same = again.page == kept.page;
        if same {
            twice.push(*again);
        }
        same
    });
    (found, twice)
}
