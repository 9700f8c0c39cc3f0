//! Guest memory that comes, goes, or is lent to somebody else while the service runs.

use crate::error::Error;
use crate::memory::layout::{HostRange, Memory, Page};
use crate::scan::control::Change;
use crate::scan::pass::Pass;
use crate::scan::standby::First;
use crate::sys::late_log;
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
        if let Err(error) = self.space.register(&range.addresses()) {
            self.end_half_registered(&range.addresses(), &error);
            return Err(error);
        }
        self.set_memory(memory);
        // Sightings and references of the new pages may only follow when the store knows of them.
        self.fill_stats();
        if let Err(error) = self.session.report(&self.account.stats) {
            self.lose_store(&error);
        }
        Ok(())
    }

    /// For want of memory or mappings the kernel may have registered a part of what it could not register. What is another
    /// userfaultfd's it refuses as a whole; ending that registration would be worse than any of ours.
    fn end_half_registered(&self, range: &Range<usize>, why: &Error) {
        if is_taken(why) {
            return;
        }
        if let Err(error) = self.space.uffd.unregister(range.start, range.len()) {
            late_log::note(
                "ending registrations of memory that was not added",
                &error,
                "they end with the service, or when that memory is added later",
            );
        }
    }

    fn remove(&mut self, gone: &Range<usize>) {
        self.note_breaks();
        let discards = self.space.discards.clone();
        self.space.note_discards(&mut discards.lock(), &mut self.map);
        let within = self.map.memory().within(gone);
        self.space.bring_all_back(&mut self.map, &within);
        self.space.give_up_packed(gone);
        for pages in within {
            self.space.breaker.let_go(&pages);
            self.map.unsay(pages.clone());
            self.map.forget(pages);
        }
        self.set_memory(self.map.memory().without(gone));
        let memory = self.map.memory().clone();
        self.drop_work(|page| memory.has(page));
    }

    /// Whole chunks: a chunk is worked on or not.
    fn release(&mut self, range: &Range<usize>) -> Result<(), Error> {
        let mut result = Ok(());
        self.note_breaks();
        let within = self.map.memory().within(range).into_iter();
        let chunks: Vec<usize> = within
            .flat_map(|pages| self.map.chunk_of(pages.start)..=self.map.chunk_of(pages.end - 1))
            .collect();
        chunks.iter().for_each(|at| self.map.lend(*at));
        let pages = |at: &usize| self.map.chunk_at(*at).pages.clone();
        let all: Vec<Range<Page>> = chunks.iter().map(pages).collect();
        self.space.bring_all_back(&mut self.map, &all);
        for pages in all {
            let made_private = self.make_shared_private(pages.clone(), First::Asker);
            let unregistered = self.unregister(pages);
            result = result.and(made_private).and(unregistered);
        }
        let memory = self.map.memory().clone();
        let lent: Vec<bool> = self.map.chunks().iter().map(|chunk| chunk.lent).collect();
        self.drop_work(|page| !lent[memory.chunk_of(page)]);
        result
    }

    /// All or nothing: whoever borrowed the memory may have a part of it still, and must not meet our registration of another.
    fn resume(&mut self, range: &Range<usize>) -> Result<(), Error> {
        let within = self.map.memory().within(range);
        self.space.bring_all_back(&mut self.map, &within);
        let chunks: Vec<usize> = within
            .into_iter()
            .flat_map(|pages| self.map.chunk_of(pages.start)..=self.map.chunk_of(pages.end - 1))
            .collect();
        let mut registered: Vec<Range<Page>> = Vec::new();
        for at in &chunks {
            for run in self.runs_by_mapping(self.map.chunk_at(*at).pages.clone()) {
                let backing = self.map.backing(run.start);
                // What the kernel copied stays as it is. What the packer has still is registered with it, until its place goes home.
                if backing.in_file_mapping() || backing.is_with_packer() {
                    continue;
                }
                let done = self.space.register(&self.map.memory().addresses(&run));
                // Memory that somebody else has is refused as a whole; ending his registration would be worse than any of ours.
                if !done.as_ref().is_err_and(is_taken) {
                    registered.push(run);
                }
                if let Err(error) = done {
                    registered.retain(|run| self.map.chunk(self.map.chunk_of(run.start)).lent);
                    for run in registered {
                        if let Err(Error::Register { source, .. }) = self.unregister(run) {
                            late_log::note(
                                "ending registrations of memory that is lent",
                                &source,
                                "the next release tries it again",
                            );
                        }
                    }
                    return Err(error);
                }
            }
        }
        chunks.into_iter().for_each(|at| self.map.take_back(at));
        Ok(())
    }

    /// From now on the memory is this one. Pages that stay have the numbers that they had.
    fn set_memory(&mut self, memory: Memory) {
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        let memory = Arc::new(memory);
        self.map.set_memory(memory.clone());
        self.heard.set_memory(memory.guest_end());
        discards.set_memory(memory.clone(), self.map.in_file());
        if let Some(packer) = &self.space.packer {
            packer.set_memory(memory.clone());
        }
        self.space.breaker.set_memory(memory);
    }
}

/// Whether the memory is registered with another userfaultfd.
fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Register { source, .. } if source.raw_os_error() == Some(libc::EBUSY))
}
