//! What pages hold, as flat arrays of bytes: one for each page and version. Nothing of the model is used here.

use std::collections::BTreeMap;
use std::rc::Rc;
use vmm_dedup_page_overlays::{Contents, PAGE_BYTES, Promotion};

type Bytes = [u8; PAGE_BYTES];

/// A page of a process: `(process, page number)`.
pub(crate) type Name = (u16, u64);

#[derive(Clone)]
struct Page {
    now: Box<Bytes>,
    /// What the page was when it was shared; with those that share it. `None`: the page is its process's own.
    base: Option<Rc<Bytes>>,
    /// Writes go to the overlay.
    versions: bool,
    /// The lines in the overlay.
    lines: u64,
    metadata: Option<Box<Bytes>>,
}

/// All pages.
pub(crate) struct Oracle {
    pages: BTreeMap<Name, Page>,
    zeros: [Rc<Bytes>; 3],
    overlay_on_write: bool,
    promote_at: Option<u32>,
}

impl Oracle {
    pub(crate) fn new(overlay_on_write: bool, promote_at: Option<u32>) -> Self {
        let zeros = Rc::new([0; PAGE_BYTES]);
        Self {
            pages: BTreeMap::new(),
            // The page of zeros belongs to nobody: it never has one owner only.
            zeros: [Rc::clone(&zeros), Rc::clone(&zeros), zeros],
            overlay_on_write,
            promote_at,
        }
    }

    pub(crate) fn map(&mut self, name: Name, contents: Contents) {
        let zeros = contents == Contents::Zeros;
        let page = Page {
            now: Box::new([0; PAGE_BYTES]),
            base: zeros.then(|| Rc::clone(&self.zeros[0])),
            versions: zeros && self.overlay_on_write,
            lines: 0,
            metadata: (contents == Contents::WithMetadata).then(|| Box::new([0; PAGE_BYTES])),
        };
        assert!(self.pages.insert(name, page).is_none());
    }

    pub(crate) fn names(&self) -> Vec<Name> {
        self.pages.keys().copied().collect()
    }

    pub(crate) fn has_metadata(&self, name: Name) -> bool {
        self.pages[&name].metadata.is_some()
    }

    pub(crate) fn read(&self, name: Name, at: usize, bytes: usize) -> &[u8] {
        &self.pages[&name].now[at..at + bytes]
    }

    pub(crate) fn write(&mut self, name: Name, at: usize, bytes: &[u8]) {
        let page = self.pages.get_mut(&name).unwrap();
        page.now[at..at + bytes.len()].copy_from_slice(bytes);
        if page.versions {
            let new = page.lines >> (at / 64) & 1 == 0;
            page.lines |= 1 << (at / 64);
            if new
                && self
                    .promote_at
                    .is_some_and(|most| page.lines.count_ones() >= most)
            {
                page.become_own();
            }
        } else {
            page.base = None;
        }
    }

    pub(crate) fn read_metadata(&self, name: Name, at: usize, bytes: usize) -> Option<&[u8]> {
        let metadata = self.pages[&name].metadata.as_ref()?;
        Some(&metadata[at..at + bytes])
    }

    pub(crate) fn write_metadata(&mut self, name: Name, at: usize, bytes: &[u8]) -> bool {
        let page = self.pages.get_mut(&name).unwrap();
        let Some(metadata) = &mut page.metadata else {
            return false;
        };
        metadata[at..at + bytes.len()].copy_from_slice(bytes);
        page.lines |= 1 << (at / 64);
        true
    }

    pub(crate) fn fork(&mut self, parent: u16, child: u16) {
        let mut copies = Vec::new();
        for ((_, number), page) in self.pages.range_mut((parent, 0)..=(parent, u64::MAX)) {
            page.share();
            page.versions |= page.metadata.is_none() && self.overlay_on_write;
            copies.push(((child, *number), page.clone()));
        }
        self.pages.extend(copies);
    }

    pub(crate) fn speculate(&mut self, pid: u16) {
        for (_, page) in self.pages.range_mut((pid, 0)..=(pid, u64::MAX)) {
            if page.metadata.is_none() {
                page.share();
                page.versions = true;
            }
        }
    }

    pub(crate) fn exit(&mut self, pid: u16) {
        self.pages.retain(|(other, _), _| *other != pid);
    }

    /// `false`: it must be refused.
    pub(crate) fn promote(&mut self, name: Name, how: Promotion) -> bool {
        let page = self.pages.get_mut(&name).unwrap();
        let sole = page.base.as_ref().is_some_and(|base| Rc::strong_count(base) == 1);
        if !page.versions || how == Promotion::Commit && !sole {
            return false;
        }
        match how {
            Promotion::Discard => {
                let base = page.base.clone().unwrap();
                page.now.copy_from_slice(&*base);
                page.lines = 0;
                if sole {
                    page.become_own();
                }
            }
            Promotion::CopyAndCommit | Promotion::Commit => page.become_own(),
        }
        true
    }

    /// Bytes of all lines in overlays.
    pub(crate) fn overlay_bytes(&self) -> u64 {
        self.pages
            .values()
            .map(|page| u64::from(page.lines.count_ones()) * 64)
            .sum()
    }
}

impl Page {
    fn share(&mut self) {
        self.base.get_or_insert_with(|| Rc::new(*self.now));
    }

    fn become_own(&mut self) {
        self.base = None;
        self.versions = false;
        self.lines = 0;
    }
}
