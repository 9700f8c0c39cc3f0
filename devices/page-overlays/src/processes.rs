//! Page tables and the owners of frames: the operating system's knowledge.

use crate::address::{Page, Pid};
use crate::memory::{MainMemory, ZERO_FRAME};
use crate::sizes::{PAGE_BYTES, number};
use crate::tlb::OverlayUse;
use std::collections::BTreeMap;

/// A page table's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) frame: u64,
    /// The frame is not written through this mapping.
    pub(crate) shared: bool,
    pub(crate) overlay: OverlayUse,
}

/// All page tables.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    pages: BTreeMap<Page, Mapping>,
    owners: BTreeMap<u64, u32>,
}

impl Processes {
    pub(crate) fn get(&self, page: Page) -> Option<Mapping> {
        self.pages.get(&page).copied()
    }

    /// Enters a page, or changes it; its frame has one owner more, and the one it had before one less. Returns a frame that
    /// nobody owns any more.
    pub(crate) fn set(&mut self, page: Page, mapping: Mapping) -> Option<u64> {
        if mapping.frame != ZERO_FRAME {
            *self.owners.entry(mapping.frame).or_default() += 1;
        }
        let old = self.pages.insert(page, mapping)?;
        self.disown(old.frame)
    }

    /// Takes a page out; returns a frame that nobody owns any more.
    pub(crate) fn remove(&mut self, page: Page) -> Option<u64> {
        let old = self.pages.remove(&page)?;
        self.disown(old.frame)
    }

    fn disown(&mut self, frame: u64) -> Option<u64> {
        let owners = self.owners.get_mut(&frame)?;
        *owners -= 1;
        if *owners > 0 {
            return None;
        }
        self.owners.remove(&frame);
        Some(frame)
    }

    /// Number of pages that map a frame. The frame of zeros belongs to nobody.
    pub(crate) fn owners(&self, frame: u64) -> u32 {
        self.owners.get(&frame).copied().unwrap_or(0)
    }

    /// A process's pages.
    pub(crate) fn of(&self, pid: Pid) -> Vec<(Page, Mapping)> {
        self.pages
            .range(Page::all_of(pid))
            .map(|(page, mapping)| (*page, *mapping))
            .collect()
    }

    /// Bytes of all frames that processes own.
    pub(crate) fn bytes(&self) -> u64 {
        number(self.owners.len() * PAGE_BYTES)
    }
}

/// A frame of zeros for a mapping that owns it alone.
pub(crate) fn own(memory: &mut MainMemory, overlay: OverlayUse) -> Mapping {
    Mapping {
        frame: memory.allocate(),
        shared: false,
        overlay,
    }
}
