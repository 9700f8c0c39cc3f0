//! How long a fork of this process holds up its faults.

use crate::memory::page_map::PageMap;
use crate::sys::proc;

/// Of itself, for each mapping of the process, and for each page of memory that the child gets, nanoseconds. (The kernel copies an
/// entry of the page tables for each small page, and counts it once more.)
const NS: u64 = 300_000;
const NS_PER_MAPPING: u64 = 500;
const NS_PER_PAGE: u64 = 150;

/// Told beforehand, and learned from forks that were made.
#[derive(Debug, Default)]
pub(crate) struct ForkCost {
    /// The pass in which it was told last.
    pass: u64,
    /// As can be told without forking.
    told_ns: u64,
    /// By how much the last forks took longer.
    more_ns: u64,
}

impl ForkCost {
    /// How long the next fork takes at least, nanoseconds. What was measured is forgotten from pass to pass.
    pub(crate) fn predict(&mut self, map: &PageMap, pass: u64) -> u64 {
        if self.pass != pass || self.told_ns == 0 {
            self.pass = pass;
            self.more_ns -= self.more_ns.div_ceil(8);
            self.told_ns = NS + NS_PER_MAPPING * map.mappings();
            let guest: u64 = map.memory().pages() as u64;
            // What is not the guest's, at least.
            let others = proc::anonymous_pages().saturating_sub(guest);
            self.told_ns += NS_PER_PAGE * others;
        }
        self.told_ns + self.more_ns
    }

    /// One was made since, and took so long.
    pub(crate) fn learn(&mut self, took_ns: u64) {
        self.more_ns = self.more_ns.max(took_ns.saturating_sub(self.told_ns));
    }
}
