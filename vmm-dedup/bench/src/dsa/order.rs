//! Where the pages lie that are looked at one after the other.
//!
//! A content is laid out page behind page, so that the CPU fetches the next page while it reads one. On a host that has run for
//! a while the pages of a guest, of 4 KiB each, lie anywhere: each one's first lines, and its translation, are waited for.

use clap::ValueEnum;
use serde::Serialize;
use vmm_dedup::compare::{Arena, PageId, PageView, Pages};

/// Where neighbouring pages lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// One behind the other.
    Memory,
    /// Anywhere.
    Anywhere,
}

impl Order {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Memory => "one behind the other",
            Self::Anywhere => "anywhere",
        }
    }
}

/// An arena's pages in an order.
pub(super) struct Placed<'a> {
    arena: &'a Arena,
    places: Vec<u32>,
}

impl<'a> Placed<'a> {
    pub(super) fn new(arena: &'a Arena, order: Order) -> Self {
        let mut places: Vec<u32> = (0u32..).take(arena.pages()).collect();
        if order == Order::Anywhere {
            // Sorted by a mix of their numbers: the same in each run.
            places.sort_unstable_by_key(|place| mix(u64::from(*place)));
        }
        Self { arena, places }
    }
}

impl Pages for Placed<'_> {
    fn view(&self, page: PageId) -> Option<&PageView> {
        let place = self.places.get(usize::try_from(page.0).ok()?)?;
        self.arena.view(PageId(u64::from(*place)))
    }
}

fn mix(number: u64) -> u64 {
    let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_page_is_there_once_and_few_have_their_neighbours() {
        const PAGES: usize = 1000;
        let arena = Arena::new(PAGES).unwrap();
        let at = |placed: &Placed<'_>, page: usize| {
            std::ptr::from_ref(placed.view(PageId(page as u64)).unwrap()) as usize
        };
        for (order, most) in [(Order::Memory, PAGES), (Order::Anywhere, PAGES / 20)] {
            let placed = Placed::new(&arena, order);
            let all: BTreeSet<usize> = (0..PAGES).map(|page| at(&placed, page)).collect();
            assert_eq!(all.len(), PAGES);
            let together = (1..PAGES).filter(|page| at(&placed, *page) == at(&placed, page - 1) + 4096);
            assert!(together.count() < most, "{order:?}");
            assert!(placed.view(PageId(PAGES as u64)).is_none());
        }
    }
}
