//! Guest memory that comes, goes, or is lent to somebody else while the service runs.

use crate::error::Error;
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{HostRange, Memory, Page};
use crate::memory::thp_state::HugeState;
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::page_size::bytes;
use crate::sys::uffd::Mode;
use std::ops::Range;
use std::sync::Arc;

/// What may happen to guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It is new.
    Add,
    /// It is about to be unmapped or replaced.
    Remove,
    /// It goes back to anonymous memory, and is left alone.
    Release,
    /// It may be worked on again.
    Resume,
}

impl Scanner {
    pub(crate) fn change(&mut self, change: Change, range: HostRange) -> Result<(), Error> {
        match change {
            Change::Add => self.add(range),
            Change::Remove => self.remove(&range.addresses()),
            Change::Release => self.release_range(&range.addresses()),
            Change::Resume => self.resume(&range.addresses()),
        }
    }

    fn add(&mut self, range: HostRange) -> Result<(), Error> {
        let memory = self.memory.with(range)?;
        self.register(&range.addresses())?;
        self.set_memory(memory);
        // Sightings and references of the new pages may only follow when the store knows of them.
        self.fill_stats();
        if let Some(store) = &mut self.store
            && let Err(error) = store.report(&self.stats)
        {
            self.lose_store(&error);
        }
        Ok(())
    }

    fn remove(&mut self, gone: &Range<usize>) -> Result<(), Error> {
        self.note_breaks();
        let discards = self.discards.clone();
        self.note_discards(&mut discards.lock());
        for pages in self.memory.within(gone) {
            self.forget_pages(pages);
        }
        self.set_memory(self.memory.without(gone));
        let memory = self.memory.clone();
        self.drop_work(|page| memory.has(page));
        Ok(())
    }

    /// Leaves out what was to be done with pages that are not worked on any more.
    fn drop_work(&mut self, keep: impl Fn(Page) -> bool) {
        self.to_hash.retain(|page| keep(*page));
        self.held_twins.retain(|(page, _)| keep(*page));
        let of_kept = |item: &Item| keep(item.page);
        let gone: Vec<Item> = self
            .merges
            .extract_if(.., |item| !of_kept(item))
            .chain(self.held.extract_if(.., |item| !of_kept(item)))
            .collect();
        gone.iter().for_each(|item| self.disown(item));
    }

    /// Whole chunks: a chunk is worked on or not.
    fn release_range(&mut self, range: &Range<usize>) -> Result<(), Error> {
        let mut result = Ok(());
        self.note_breaks();
        for pages in self.memory.within(range) {
            let chunks = self.memory.chunk_of(pages.start)..self.memory.chunk_of(pages.end - 1) + 1;
            for at in chunks {
                self.chunks[at] = ChunkState {
                    released: true,
                    ..ChunkState::default()
                };
                let pages = self.memory.chunks()[at].pages.clone();
                let given_back = self.give_back(pages.clone());
                let unregistered = self.unregister(pages);
                result = result.and(given_back).and(unregistered);
            }
        }
        let (memory, chunks) = (self.memory.clone(), self.chunks.clone());
        self.drop_work(|page| !chunks[memory.chunk_of(page)].released);
        result
    }

    fn resume(&mut self, range: &Range<usize>) -> Result<(), Error> {
        for pages in self.memory.within(range) {
            for at in self.memory.chunk_of(pages.start)..=self.memory.chunk_of(pages.end - 1) {
                let chunk = self.memory.chunks()[at].clone();
                for run in self.runs_by_mapping(chunk.pages) {
                    // What the kernel copied stays as it is, see State::Private.
                    if !self.table.get(run.start).in_file_mapping() {
                        self.register(&self.addresses(&run))?;
                    }
                }
                self.chunks[at].released = false;
                self.chunks[at].pending = true;
            }
        }
        Ok(())
    }

    fn register(&self, range: &Range<usize>) -> Result<(), Error> {
        self.tracker
            .register(range.start, range.len(), Mode::Wp)
            .map_err(|source| Error::Register {
                address: range.start,
                source,
            })
    }

    /// Ends all registrations of some pages.
    fn unregister(&mut self, pages: Range<Page>) -> Result<(), Error> {
        for run in self.runs_by_mapping(pages) {
            let range = self.addresses(&run);
            let ended = if self.table.get(run.start).in_file_mapping() {
                self.breaker.unregister(&range)
            } else {
                self.tracker.unregister(range.start, range.len())
            };
            ended.map_err(|source| Error::Register {
                address: range.start,
                source,
            })?;
            // Not tracked from here on: whatever was known of its content may become wrong.
            if !self.table.get(run.start).in_file_mapping() {
                self.forget_pages(run);
            }
        }
        Ok(())
    }

    fn addresses(&self, pages: &Range<Page>) -> Range<usize> {
        let start = self.memory.address(pages.start);
        start..start + bytes(pages.len())
    }

    /// Neighbours of which all or none lie in mappings of store files.
    fn runs_by_mapping(&self, pages: Range<Page>) -> Vec<Range<Page>> {
        let in_file = |page: Page| self.table.get(page).in_file_mapping();
        let mut runs: Vec<Range<Page>> = Vec::new();
        for page in pages {
            match runs.last_mut() {
                Some(run) if in_file(run.start) == in_file(page) => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }

    /// From now on the memory is this one. Pages that stay have the numbers that they had.
    fn set_memory(&mut self, memory: Memory) {
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards);
        let state_of = |chunk: &crate::memory::layout::Chunk| {
            let there = self.memory.has(chunk.pages.start);
            let Some(at) = there.then(|| self.memory.chunk_of(chunk.pages.start)) else {
                return ChunkState {
                    pending: true,
                    ..ChunkState::default()
                };
            };
            let mut old = self.chunks[at];
            if self.memory.chunks()[at].pages != chunk.pages {
                // Not the 2 MiB any more that were watched.
                old.mixed = HugeState::default();
                old.forget_twins();
            }
            old
        };
        self.chunks = memory.chunks().iter().map(state_of).collect();
        let memory = Arc::new(memory);
        self.table.grow(memory.end());
        discards.set_memory(memory.clone(), self.table.in_file());
        self.breaker.set_memory(memory.clone());
        self.memory = memory;
    }
}
