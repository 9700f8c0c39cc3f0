//! Guest memory that comes, goes, or is lent to somebody else while the service runs.

use crate::error::Error;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::{HostRange, Memory, Page};
use crate::scan::control::Change;
use crate::scan::pass::Pass;
use crate::sys::late_log;
use crate::sys::page_size::bytes;
use crate::sys::relocate;
use std::io;
use std::ops::Range;
use std::sync::Arc;

impl Pass {
    pub(crate) fn change(&mut self, change: Change, range: HostRange) -> Result<(), Error> {
        match change {
            Change::Add => self.add(range),
            Change::Remove => {
                self.remove(&range.addresses());
                Ok(())
            }
            Change::Release => self.release(&range.addresses()),
            Change::Resume => self.resume(&range.addresses()),
        }
    }

    fn add(&mut self, range: HostRange) -> Result<(), Error> {
        let memory = self.map.memory().with(range)?;
        self.space.register(&range.addresses())?;
        self.set_memory(memory);
        // Sightings and references of the new pages may only follow when the store knows of them.
        self.fill_stats();
        if let Err(error) = self.session.report(&self.account.stats) {
            self.lose_store(&error);
        }
        Ok(())
    }

    fn remove(&mut self, gone: &Range<usize>) {
        self.note_breaks();
        let discards = self.space.discards.clone();
        self.space.note_discards(&mut discards.lock(), &mut self.map);
        for pages in self.map.memory().within(gone) {
            self.map.forget(pages);
        }
        self.set_memory(self.map.memory().without(gone));
        let memory = self.map.memory().clone();
        self.drop_work(|page| memory.has(page));
    }

    /// Leaves out what was to be done with pages that are not worked on any more.
    fn drop_work(&mut self, keep: impl Fn(Page) -> bool) {
        self.finder.retain(&keep);
        let deferred = &mut self.planner.deferred;
        deferred.twins.retain(|(page, _)| keep(*page));
        let gone = |request: &mut MergeRequest| !keep(request.page);
        let found = self.found.extract_if(.., gone);
        for request in found.chain(deferred.published.extract_if(.., gone)) {
            self.map.give_up_published(request.publisher_ref());
        }
    }

    /// Whole chunks: a chunk is worked on or not.
    fn release(&mut self, range: &Range<usize>) -> Result<(), Error> {
        let mut result = Ok(());
        self.note_breaks();
        for pages in self.map.memory().within(range) {
            for at in self.map.chunk_of(pages.start)..=self.map.chunk_of(pages.end - 1) {
                self.map.lend(at);
                let pages = self.map.chunk_at(at).pages.clone();
                let made_private = self.make_private(pages.clone());
                let unregistered = self.unregister(pages);
                result = result.and(made_private).and(unregistered);
            }
        }
        let memory = self.map.memory().clone();
        let lent: Vec<bool> = self.map.chunks().iter().map(|chunk| chunk.lent).collect();
        self.drop_work(|page| !lent[memory.chunk_of(page)]);
        result
    }

    fn resume(&mut self, range: &Range<usize>) -> Result<(), Error> {
        for pages in self.map.memory().within(range) {
            for at in self.map.chunk_of(pages.start)..=self.map.chunk_of(pages.end - 1) {
                let chunk = self.map.chunk_at(at).clone();
                for run in self.runs_by_mapping(chunk.pages) {
                    // What the kernel copied stays as it is.
                    if !self.map.backing(run.start).in_file_mapping() {
                        self.space.register(&self.addresses(&run))?;
                    }
                }
                self.map.take_back(at);
            }
        }
        Ok(())
    }

    /// Tracks writes to memory of which the kernel had refused that. Memory that is lent is somebody else's to register; what
    /// went since is nobody's.
    pub(super) fn track_what_was_lost(&mut self) {
        let lost = self.space.uffd.take_untracked();
        let lost = lost.iter().flat_map(|range| self.map.memory().within(range));
        for pages in lost.collect::<Vec<_>>() {
            for at in self.map.chunk_of(pages.start)..=self.map.chunk_of(pages.end - 1) {
                let chunk = self.map.chunk_at(at).pages.clone();
                if !self.map.chunk(at).lent {
                    self.track(pages.start.max(chunk.start)..pages.end.min(chunk.end));
                    self.map.requeue_chunk(at);
                }
            }
        }
    }

    fn track(&mut self, pages: Range<Page>) {
        for run in self.runs_by_mapping(pages) {
            let range = self.addresses(&run);
            if self.map.backing(run.start).in_file_mapping() {
                continue;
            }
            relocate::track(&self.space.uffd, range, "tracking writes again");
        }
    }

    /// The end: nobody waits for the service any more, and no write is tracked. Memory that is lent may be registered by somebody
    /// else.
    pub(super) fn end_registrations(&mut self) {
        self.space.breaker.end();
        self.note_breaks();
        for pages in self.map.memory().existing(0..Page::MAX) {
            let ours: Vec<Page> = pages.filter(|page| !self.map.is_lent(*page)).collect();
            for pages in ours.chunk_by(|a, b| *b == a + 1) {
                for run in self.runs_by_mapping(pages[0]..pages[0] + Page::try_from(pages.len()).unwrap_or(0))
                {
                    if let Err(error) = self.end_registration(&run) {
                        late_log::note("ending registrations", &error, "they end with their descriptors");
                    }
                }
            }
        }
    }

    /// Of neighbours of which all or none lie in mappings of store files.
    fn end_registration(&self, run: &Range<Page>) -> io::Result<()> {
        let range = self.addresses(run);
        if self.map.backing(run.start).in_file_mapping() {
            self.space.breaker.unregister(&range)
        } else {
            self.space.uffd.unregister(range.start, range.len())
        }
    }

    /// Ends all registrations of some pages.
    fn unregister(&mut self, pages: Range<Page>) -> Result<(), Error> {
        for run in self.runs_by_mapping(pages) {
            self.end_registration(&run).map_err(|source| Error::Register {
                address: self.map.memory().address(run.start),
                source,
            })?;
            // Not tracked from here on: whatever was known of its content may become wrong.
            if !self.map.backing(run.start).in_file_mapping() {
                self.map.forget(run);
            }
        }
        Ok(())
    }

    fn addresses(&self, pages: &Range<Page>) -> Range<usize> {
        let start = self.map.memory().address(pages.start);
        start..start + bytes(pages.len())
    }

    /// Neighbours of which all or none lie in mappings of store files.
    fn runs_by_mapping(&self, pages: Range<Page>) -> Vec<Range<Page>> {
        let in_file = |page: Page| self.map.backing(page).in_file_mapping();
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
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        let memory = Arc::new(memory);
        self.map.set_memory(memory.clone());
        discards.set_memory(memory.clone(), self.map.in_file());
        self.space.breaker.set_memory(memory);
    }
}
