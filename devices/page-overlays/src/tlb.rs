//! TLBs whose entries hold the `OBitVector` (section 4.3).

use crate::account::TlbCounters;
use crate::address::Page;
use crate::config::TlbConfig;
use crate::lru::LruTable;
use crate::obits::OBitVector;

/// What a page's overlay holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OverlayUse {
    /// The page has none.
    None,
    /// Lines that take the place of the page's own.
    Versions,
    /// Metadata of the page's own lines (section 5.3.4).
    Metadata,
}

/// What is known of a virtual page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Translation {
    pub(crate) frame: u64,
    /// Others may map the frame: it is not written.
    pub(crate) shared: bool,
    pub(crate) overlay: OverlayUse,
    pub(crate) obits: OBitVector,
}

/// A core's two levels.
#[derive(Debug)]
pub(crate) struct Tlb {
    l1: LruTable<Translation>,
    l2: LruTable<Translation>,
    l2_cycles: u64,
    pub(crate) counters: TlbCounters,
}

impl Tlb {
    pub(crate) fn new(config: TlbConfig) -> Self {
        Self {
            l1: LruTable::new(config.l1_entries, config.l1_ways),
            l2: LruTable::new(config.l2_entries, config.l2_ways),
            l2_cycles: config.l2_cycles,
            counters: TlbCounters::default(),
        }
    }

    /// A page's translation, and the cycles that it took beyond those of a hit in the first level, which go with the L1's.
    pub(crate) fn look_up(&mut self, page: Page) -> Option<(Translation, u64)> {
        if let Some(entry) = self.l1.get(page.number()) {
            self.counters.l1_hits += 1;
            return Some((*entry, 0));
        }
        if let Some(entry) = self.l2.get(page.number()) {
            self.counters.l2_hits += 1;
            let entry = *entry;
            self.l1.insert(page.number(), entry);
            return Some((entry, self.l2_cycles));
        }
        self.counters.misses += 1;
        None
    }

    /// Enters the translation of a page that was not found.
    pub(crate) fn insert(&mut self, page: Page, translation: Translation) {
        self.l1.insert(page.number(), translation);
        self.l2.insert(page.number(), translation);
    }

    /// An overlaying read-exclusive message: sets a line's bit if the page is here (section 4.3.3).
    pub(crate) fn overlaying(&mut self, page: Page, line: usize) {
        for level in [&mut self.l1, &mut self.l2] {
            if let Some(entry) = level.peek(page.number()) {
                entry.obits.insert(line);
                self.counters.bits_set_by_messages += 1;
            }
        }
    }

    /// Forgets a page.
    pub(crate) fn remove(&mut self, page: Page) {
        self.l1.remove(page.number());
        self.l2.remove(page.number());
    }

    /// Forgets pages.
    pub(crate) fn remove_all(&mut self, wanted: impl Fn(Page) -> bool) {
        self.l1.remove_all(|key| wanted(Page::from_number(key)));
        self.l2.remove_all(|key| wanted(Page::from_number(key)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Pid;
    use crate::config::{Config, OnWrite};

    fn page(number: u64) -> Page {
        Page::of(Pid::try_new(1).unwrap(), number * 4096).unwrap()
    }

    #[test]
    fn a_message_reaches_both_levels() {
        let mut tlb = Tlb::new(Config::table_2(OnWrite::Overlay).tlb);
        let translation = Translation {
            frame: 1,
            shared: true,
            overlay: OverlayUse::Versions,
            obits: OBitVector::EMPTY,
        };
        tlb.insert(page(0), translation);
        tlb.overlaying(page(0), 9);
        tlb.overlaying(page(1), 9);
        assert_eq!(tlb.counters.bits_set_by_messages, 2);
        // 16 sets of 4 ways: four more pages of its set push it out of the first level.
        for number in 1..5 {
            tlb.insert(page(number * 16), translation);
        }
        let (found, cycles) = tlb.look_up(page(0)).unwrap();
        assert!(found.obits.has(9));
        assert_eq!(cycles, 10);
    }
}
