//! Registrations of guest memory with userfaultfds while the service runs, and their end.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_state::Registrar;
use crate::scan::pass::Pass;
use crate::sys::inject::{AnotherWay, Call};
use crate::sys::late_log;
use crate::sys::relocate;
use std::io;
use std::ops::Range;

impl Pass {
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
            let range = self.map.memory().addresses(&run);
            if self.map.backing(run.start).registrar() != Registrar::Tracker {
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
                let pages = pages[0]..pages[pages.len() - 1] + 1;
                // The kernel passes over mappings of the store that nobody has registered: one call does for all. What is packed is
                // the packer's.
                let all = self.map.memory().addresses(&pages);
                let ours = !self.space.breaker.managed() && self.map.counts().packed == 0;
                if ours && self.end_all_at_once(&all) {
                    continue;
                }
                for run in self.runs_by_mapping(pages) {
                    if let Err(error) = self.end_registration(&run) {
                        late_log::note("ending registrations", &error, "they end with their descriptors");
                    }
                }
            }
        }
    }

    fn end_all_at_once(&self, range: &Range<usize>) -> bool {
        let _one_mapping_after_the_other = AnotherWay::of(Call::Unregister);
        self.space.uffd.unregister(range.start, range.len()).is_ok()
    }

    /// Of neighbours that one userfaultfd has.
    fn end_registration(&self, run: &Range<Page>) -> io::Result<()> {
        let range = self.map.memory().addresses(run);
        match self.map.backing(run.start).registrar() {
            Registrar::Breaker => self.space.breaker.unregister(&range),
            Registrar::Tracker => self.space.uffd.unregister(range.start, range.len()),
            // It ends that when it has brought everything back.
            Registrar::Packer => Ok(()),
        }
    }

    /// Ends all registrations of some pages.
    pub(super) fn unregister(&mut self, pages: Range<Page>) -> Result<(), Error> {
        for run in self.runs_by_mapping(pages) {
            self.end_registration(&run).map_err(|source| Error::Register {
                address: self.map.memory().address(run.start),
                source,
            })?;
            // Not tracked from here on: whatever was known of its content may become wrong.
            if self.map.backing(run.start).registrar() == Registrar::Tracker {
                self.map.forget(run);
            }
        }
        Ok(())
    }

    /// Neighbours that one userfaultfd has: of which all or none lie in mappings of store files, or are packed.
    pub(super) fn runs_by_mapping(&self, pages: Range<Page>) -> Vec<Range<Page>> {
        let by = |page: Page| self.map.backing(page).registrar();
        let mut runs: Vec<Range<Page>> = Vec::new();
        for page in pages {
            match runs.last_mut() {
                Some(run) if by(run.start) == by(page) => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }
}
