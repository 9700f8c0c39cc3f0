//! The Overlay Mapping Table (sections 4.2 and 4.4.4): for each overlay page its `OBitVector` and its segment.
//!
//! The table is a tree, as page tables are: an entry of 16 bytes (OBitVector, OMSaddr), 256 of them in a leaf of 4 KiB,
//! and 512 pointers in each node above. An overlay page number has 51 bits: 8 for the leaf, and 9, 9, 9, 9 and 7 above.

use crate::address::Page;
use crate::obits::OBitVector;
use crate::segment::Segment;
use crate::sizes::{PAGE_BYTES, number};
use std::collections::BTreeMap;

/// An entry of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) obits: OBitVector,
    pub(crate) segment: Option<Segment>,
}

/// Bits of an overlay page number that a leaf resolves.
const LEAF_BITS: u32 = 8;
/// Bits that each node above resolves, from the leaves up.
const NODE_BITS: [u32; 5] = [9, 9, 9, 9, 7];

const _: () = assert!(LEAF_BITS + 9 * 4 + 7 == 51);

/// The table. Entries are kept by page, and nodes are counted by what they cover.
#[derive(Debug, Default)]
pub(crate) struct Omt {
    entries: BTreeMap<Page, Entry>,
    /// Entries or nodes below each node, by level and the number's upper bits.
    nodes: BTreeMap<(u32, u64), u32>,
}

impl Omt {
    pub(crate) fn get(&self, page: Page) -> Entry {
        self.entries.get(&page).copied().unwrap_or_default()
    }

    /// Replaces an entry. An empty one takes no place.
    pub(crate) fn set(&mut self, page: Page, entry: Entry) {
        if entry == Entry::default() {
            if self.entries.remove(&page).is_some() {
                self.leave(page);
            }
        } else if self.entries.insert(page, entry).is_none() {
            self.enter(page);
        }
    }

    fn enter(&mut self, page: Page) {
        for node in path(page) {
            let below = self.nodes.entry(node).or_default();
            *below += 1;
            if *below > 1 {
                return;
            }
        }
    }

    fn leave(&mut self, page: Page) {
        for node in path(page) {
            let Some(below) = self.nodes.get_mut(&node) else {
                return;
            };
            *below -= 1;
            if *below > 0 {
                return;
            }
            self.nodes.remove(&node);
        }
    }

    /// Bytes of the table's nodes.
    pub(crate) fn bytes(&self) -> u64 {
        number(self.nodes.len() * PAGE_BYTES)
    }

    /// All entries.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Page, Entry)> {
        self.entries.iter().map(|(page, entry)| (*page, *entry))
    }
}

/// The nodes above a page's entry, from its leaf up.
fn path(page: Page) -> impl Iterator<Item = (u32, u64)> {
    let shifts = std::iter::once(LEAF_BITS)
        .chain(NODE_BITS)
        .scan(0, |shift, bits| {
            *shift += bits;
            Some(*shift)
        });
    shifts.map(move |shift| (shift, page.number() >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Pid;

    fn page(number: u64) -> Page {
        Page::of(Pid::try_new(1).unwrap(), number * 4096).unwrap()
    }

    #[test]
    fn neighbours_share_the_nodes_above_them() {
        let mut omt = Omt::default();
        let entry = Entry {
            obits: OBitVector::from_bits(1),
            segment: None,
        };
        for number in 0..256 {
            omt.set(page(number), entry);
        }
        assert_eq!(omt.bytes(), 6 * 4096);
        omt.set(page(256), entry);
        assert_eq!(omt.bytes(), 7 * 4096);
        for number in 0..257 {
            assert_eq!(omt.get(page(number)), entry);
            omt.set(page(number), Entry::default());
        }
        assert_eq!((omt.bytes(), omt.entries().count()), (0, 0));
    }
}
