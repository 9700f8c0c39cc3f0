//! How long a fork of this process holds up its faults.

use crate::memory::page_map::PageMap;
use crate::sys::page_size::CHUNK_PAGES;
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
            let others = proc::anonymous_pages().saturating_sub(private_pages(map));
            self.told_ns += NS_PER_PAGE * others;
        }
        self.told_ns + self.more_ns
    }

    /// One was made since, and took so long.
    pub(crate) fn learn(&mut self, took_ns: u64) {
        self.more_ns = self.more_ns.max(took_ns.saturating_sub(self.told_ns));
    }
}

/// Private pages of the guest that are known to be there. What was never looked at may not be: then it is the child's, as far as can
/// be told. (Pages of a huge page that were reported as well are counted twice.)
fn private_pages(map: &PageMap) -> u64 {
    let counts = map.counts();
    let most = (map.memory().pages() as u64).saturating_sub(counts.slots + counts.zero + counts.orphaned);
    let small = counts.write_protected + counts.volatile + counts.pinned + counts.candidates + counts.copied;
    let huge = map.chunks().iter().filter(|chunk| chunk.huge).count() * CHUNK_PAGES;
    (small + huge as u64).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::Memory;
    use crate::sys::page_size::bytes;
    use std::sync::Arc;

    #[test]
    fn memory_of_a_guest_that_was_never_there_is_not_taken_for_the_guest_s() {
        let start = 0x7f00_0000_0000;
        let memory = Memory::made_up(std::slice::from_ref(&(start..start + bytes(CHUNK_PAGES))));
        let mut map = PageMap::new(Arc::new(memory), 1000, 0);
        assert_eq!(private_pages(&map), 0);
        (0..3).for_each(|page| assert!(map.note_written(page, false)));
        map.zero(2);
        assert_eq!(private_pages(&map), 2);
        map.found_huge(0);
        assert_eq!(private_pages(&map), CHUNK_PAGES as u64 - 1);
    }

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
