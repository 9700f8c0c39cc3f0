//! Memory that holds what guests hold: it is in no core dump and in no child.
#![allow(unsafe_code)] // raw memory of our own

use crate::sys::late_log;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::vma::Anonymous;
use std::io;
use vmm_dedup_packed::Page as PageBytes;
use vmm_dedup_packed::segments::{Memory, NoMemory, Source};

fn hidden(pages: usize) -> io::Result<Anonymous> {
    let area = Anonymous::new(pages)?;
    area.hide();
    area.populate()?;
    Ok(area)
}

/// Pages to work in.
#[derive(Debug)]
pub(super) struct Buffers(Anonymous);

impl Buffers {
    pub(super) fn new(pages: usize) -> io::Result<Self> {
        hidden(pages).map(Self)
    }

    /// Address of one.
    pub(super) fn address(&self, number: usize) -> usize {
        assert!(number < self.0.pages());
        self.0.base() + bytes(number)
    }

    pub(super) fn page(&self, number: usize) -> &PageBytes {
        // SAFETY: mapped, populated, aligned, and written through `&mut self` only.
        unsafe { &*(self.address(number) as *const PageBytes) }
    }

    pub(super) fn page_mut(&mut self, number: usize) -> &mut PageBytes {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { &mut *(self.address(number) as *mut PageBytes) }
    }
}

/// A segment's memory.
#[derive(Debug)]
pub(super) struct Hidden(Anonymous);

impl Hidden {
    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, populated, and written through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.0.base() as *const u8, bytes(self.0.pages())) }
    }
}

impl Memory for Hidden {
    fn store(&mut self, at: usize, bytes: &[u8]) {
        let len = self.bytes().len();
        // SAFETY: as above; the borrow is exclusive.
        let all = unsafe { std::slice::from_raw_parts_mut(self.0.base() as *mut u8, len) };
        all[at..][..bytes.len()].copy_from_slice(bytes);
    }

    fn load(&self, at: usize, length: usize) -> &[u8] {
        &self.bytes()[at..][..length]
    }
}

/// Gives segments the memory that was made ready for them, so that none is allocated while somebody waits.
#[derive(Debug, Default)]
pub(super) struct Ready {
    next: Option<Hidden>,
    /// Bytes that segments have.
    given: u64,
}

impl Ready {
    /// Memory for a segment, for [`Self::set`].
    pub(super) fn make(segment_bytes: usize) -> Option<Hidden> {
        let made = hidden(segment_bytes / PAGE_SIZE);
        made.inspect_err(|error| {
            late_log::note("getting memory for packed pages", error, "pages stay as they are");
        })
        .ok()
        .map(Hidden)
    }

    pub(super) fn is_set(&self) -> bool {
        self.next.is_some()
    }

    pub(super) fn set(&mut self, memory: Hidden) {
        self.next = Some(memory);
    }

    /// Bytes that segments have.
    pub(super) fn given(&self) -> u64 {
        self.given
    }
}

impl Source for Ready {
    type Memory = Hidden;

    fn take(&mut self, bytes: usize) -> Result<Hidden, NoMemory> {
        let fits = |memory: &Hidden| memory.bytes().len() == bytes;
        let memory = self.next.take().filter(fits).ok_or(NoMemory)?;
        self.given += bytes as u64;
        Ok(memory)
    }

    fn give_back(&mut self, memory: Hidden) {
        self.given -= memory.bytes().len() as u64;
    }
}
