//! How long a fork of this process holds up its faults.

use crate::memory::page_map::PageMap;
use crate::sys::proc;

/// Of itself, for each mapping of the process, and for each page of memory that the child gets, nanoseconds. (The kernel copies an
/// entry of the page tables for each small page, and counts it once more. In a virtual machine that takes several times as long,
/// which is learned.)
const NS: u64 = 300_000;
const NS_PER_MAPPING: u64 = 500;
const NS_PER_PAGE: u64 = 50;

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
            let counts = map.counts();
            let guest = (map.memory().pages() as u64).saturating_sub(counts.slots + counts.zero);
            // At least so much is not the guest's, from whom it is not known how much of his private memory is there.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::Memory;
    use std::sync::Arc;

    #[test]
    fn what_a_fork_took_is_forgotten_once_a_pass_however_often_it_is_asked() {
        let map = PageMap::new(Arc::new(Memory::made_up(&[])), 1000, 0);
        let mut cost = ForkCost::default();
        let told = cost.predict(&map, 1);
        assert!(told >= NS);
        cost.learn(told + 8_000);
        cost.learn(told);
        assert_eq!([1, 1].map(|pass| cost.predict(&map, pass)), [told + 8_000; 2]);
        cost.predict(&map, 2);
        assert_eq!(cost.more_ns, 7_000);
        cost.predict(&map, 2);
        assert_eq!(cost.more_ns, 7_000);
        for pass in 3..200 {
            cost.predict(&map, pass);
        }
        assert_eq!(cost.more_ns, 0);
    }
}
