//! What the process has mapped, as far as it may be guest memory. Of fixed size, since it is changed inside mmap().

use std::ops::Range;

/// Smaller mappings are not worth a look (firmware, devices, stacks).
pub(crate) const SMALLEST: usize = 1 << 20;
/// Mappings remembered.
const MOST: usize = 256;

/// A mapping that can be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// A memory slot of KVM refers to it.
    pub(crate) guest: bool,
    /// Where the guest sees its first page, if all slots agree.
    pub(crate) guest_address: Option<u64>,
}

impl Mapping {
    pub(crate) fn overlaps(&self, range: &Range<usize>) -> bool {
        self.start < range.end && range.start < self.end
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// All of them, in no order, without overlaps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mappings {
    entries: [Option<Mapping>; MOST],
}

impl Mappings {
    pub(crate) const fn new() -> Self {
        Self {
            entries: [None; MOST],
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.entries.iter().flatten()
    }

    /// Whether guest memory lies in a range.
    pub(crate) fn has_guest(&self, range: &Range<usize>) -> bool {
        self.iter().any(|m| m.guest && m.overlaps(range))
    }

    /// Something was mapped; whatever was there is gone. If there is no room it is not remembered, and its memory is
    /// refused later.
    pub(crate) fn add(&mut self, mapping: Mapping) {
        self.remove(&mapping.range());
        self.insert(mapping);
    }

    /// Something was unmapped.
    pub(crate) fn remove(&mut self, gone: &Range<usize>) {
        for at in 0..MOST {
            let Some(old) = self.entries[at].filter(|m| m.overlaps(gone)) else {
                continue;
            };
            self.entries[at] = None;
            self.insert(Mapping {
                end: gone.start.max(old.start),
                ..old
            });
            let behind = gone.end.min(old.end).max(old.start);
            self.insert(Mapping {
                start: behind,
                guest_address: old.guest_address.map(|at| at + (behind - old.start) as u64),
                ..old
            });
        }
    }

    fn insert(&mut self, mapping: Mapping) {
        let free = self.entries.iter_mut().find(|e| e.is_none());
        if let (Some(free), true) = (free, mapping.start < mapping.end) {
            *free = Some(mapping);
        }
    }

    /// A memory slot refers to a range, which the guest sees at an address; returns whether that is known memory.
    pub(crate) fn mark_guest(&mut self, slot: &Range<usize>, guest_address: u64) -> bool {
        let mut known = false;
        for mapping in self.entries.iter_mut().flatten().filter(|m| m.overlaps(slot)) {
            known = true;
            // Slots of one mapping may lie in two places (memory below and above 4 GiB): then none is right for all.
            let offset = (slot.start as u64).wrapping_sub(mapping.start as u64);
            let address = guest_address.checked_sub(offset);
            mapping.guest_address = if mapping.guest {
                mapping.guest_address.filter(|at| Some(*at) == address)
            } else {
                address
            };
            mapping.guest = true;
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: usize, end: usize) -> Mapping {
        Mapping {
            start,
            end,
            guest: false,
            guest_address: None,
        }
    }

    fn ranges(mappings: &Mappings) -> Vec<Range<usize>> {
        let mut ranges: Vec<_> = mappings.iter().map(Mapping::range).collect();
        ranges.sort_by_key(|r| r.start);
        ranges
    }

    #[test]
    fn mapping_over_a_part_replaces_that_part() {
        let mut mappings = Mappings::new();
        mappings.add(mapping(0, 100));
        assert!(mappings.mark_guest(&(10..20), 1010) && mappings.mark_guest(&(30..40), 1030));
        mappings.add(mapping(40, 60));
        assert_eq!(ranges(&mappings), [0..40, 40..60, 60..100]);
        assert!(mappings.has_guest(&(99..200)) && !mappings.has_guest(&(40..60)));
        mappings.remove(&(20..80));
        assert_eq!(ranges(&mappings), [0..20, 80..100]);
        let addresses = || mappings.iter().filter_map(|m| m.guest_address);
        assert_eq!(addresses().min().zip(addresses().max()), Some((1000, 1080)));
        assert!(mappings.mark_guest(&(0..20), 5000));
        assert_eq!(mappings.iter().filter(|m| m.guest_address.is_some()).count(), 1);
        mappings.remove(&(0..1000));
        assert_eq!(ranges(&mappings), []);
        assert!(!mappings.mark_guest(&(0..10), 0));
    }

    #[test]
    fn what_there_is_no_room_for_is_not_remembered() {
        let mut mappings = Mappings::new();
        (0..MOST + 10).for_each(|n| mappings.add(mapping(n * 10, n * 10 + 5)));
        assert_eq!(ranges(&mappings).len(), MOST);
        mappings.remove(&(0..5));
        mappings.add(mapping(1_000_000, 1_000_005));
        assert_eq!(ranges(&mappings).last(), Some(&(1_000_000..1_000_005)));
    }
}
