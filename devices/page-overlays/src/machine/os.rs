//! What the operating system does: mapping, fork, copy-on-write, and making pages of overlays (sections 4.3.4 and 5.1).

use super::state::{Contents, Machine, MachineError};
use crate::address::{LineAddress, Page, Pid};
use crate::config::OnWrite;
use crate::memory::ZERO_FRAME;
use crate::processes::{Mapping, own};
use crate::sizes::{LINES, PAGE_BYTES, number};
use crate::tlb::OverlayUse;

/// What becomes of an overlay (section 4.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promotion {
    /// A new page gets the old page's lines and the overlay's.
    CopyAndCommit,
    /// The page gets the overlay's lines. Nobody else may map it.
    Commit,
    /// The overlay's lines are dropped.
    Discard,
}

impl Machine {
    /// Maps `pages` pages of zeros at a virtual address.
    ///
    /// # Errors
    /// [`MachineError::Mapped`] if there is a page already, [`MachineError::Address`] if such an address cannot be. What was
    /// mapped before the error stays.
    pub fn map(
        &mut self,
        pid: Pid,
        address: u64,
        pages: u64,
        contents: Contents,
    ) -> Result<(), MachineError> {
        for number_of_page in 0..pages {
            let at = address.saturating_add(number_of_page.saturating_mul(number(PAGE_BYTES)));
            let page = Page::of(pid, at)?;
            if self.processes.get(page).is_some() {
                return Err(MachineError::Mapped {
                    pid: pid.get(),
                    address: at,
                });
            }
            let memory = &mut self.hierarchy.controller.memory;
            let mapping = match contents {
                Contents::Own => own(memory, OverlayUse::None),
                Contents::WithMetadata => own(memory, OverlayUse::Metadata),
                Contents::Zeros => Mapping {
                    frame: ZERO_FRAME,
                    shared: true,
                    overlay: self.versions(),
                },
            };
            self.processes.set(page, mapping);
        }
        Ok(())
    }

    /// What overlays of shared pages are for.
    fn versions(&self) -> OverlayUse {
        match self.config.os.on_write {
            OnWrite::Copy => OverlayUse::None,
            OnWrite::Overlay => OverlayUse::Versions,
        }
    }

    /// Makes a child of a process: both share all pages. Overlays are copied, since no two pages share one (section 4.1).
    /// That the tables are copied takes no time here: it would be the same with either way to write.
    ///
    /// # Errors
    /// [`MachineError::Child`] if the child has pages.
    pub fn fork(&mut self, core: usize, parent: Pid, child: Pid) -> Result<(), MachineError> {
        self.check_core(core)?;
        if !self.processes.of(child).is_empty() {
            return Err(MachineError::Child(child.get()));
        }
        for (page, mapping) in self.processes.of(parent) {
            let shared = Mapping {
                frame: mapping.frame,
                shared: true,
                overlay: match mapping.overlay {
                    OverlayUse::None => self.versions(),
                    other => other,
                },
            };
            let copy = page.in_process(child);
            self.processes.set(copy, shared);
            self.processes.set(page, shared);
            let obits = self.hierarchy.controller.known_obits(page);
            for line in obits.lines() {
                let bytes = self.load_line(core, LineAddress::overlay(page, line));
                let now = self.cores[core].pipeline.now();
                self.overlaying_read_exclusive(copy, line, now);
                self.hierarchy
                    .create(core, LineAddress::overlay(copy, line), bytes, now);
            }
        }
        for core in &mut self.cores {
            core.tlb.remove_all(|page| Page::all_of(parent).contains(&page));
        }
        Ok(())
    }

    /// Ends a process: its pages and overlays are gone.
    pub fn exit(&mut self, pid: Pid) {
        let now = self
            .cores
            .iter()
            .map(|core| core.pipeline.now())
            .max()
            .unwrap_or(0);
        for (page, _) in self.processes.of(pid) {
            self.clear_overlay(page, now);
            let free = self.processes.remove(page);
            self.free_frame(free);
        }
        for core in &mut self.cores {
            core.tlb.remove_all(|page| Page::all_of(pid).contains(&page));
        }
    }

    fn free_frame(&mut self, frame: Option<u64>) {
        if let Some(frame) = frame {
            self.hierarchy.drop_frame(frame);
            self.hierarchy.controller.memory.release(frame);
        }
    }

    /// Lets hardware keep all further writes to a process's own pages in overlays, until they are committed or discarded
    /// (section 5.3.3). Pages that are shared do so anyway; those with metadata in their overlays cannot.
    ///
    /// # Errors
    /// [`MachineError::Core`] if there is no such core.
    pub fn speculate(&mut self, core: usize, pid: Pid) -> Result<(), MachineError> {
        self.check_core(core)?;
        for (page, mapping) in self.processes.of(pid) {
            if mapping.overlay == OverlayUse::None {
                let speculative = Mapping {
                    shared: true,
                    overlay: OverlayUse::Versions,
                    ..mapping
                };
                self.remap(core, page, speculative);
            }
        }
        Ok(())
    }

    /// Changes a mapping, and lets all TLBs forget the page.
    fn remap(&mut self, core: usize, page: Page, mapping: Mapping) {
        let free = self.processes.set(page, mapping);
        for core in &mut self.cores {
            core.tlb.remove(page);
        }
        self.free_frame(free);
        self.cores[core].pipeline.trap(self.config.os.shootdown_cycles);
    }

    /// A copy-on-write fault: copies the page through the caches, unless nobody else has it any more, and maps the copy.
    pub(super) fn copy_on_write(&mut self, core: usize, page: Page) {
        self.events.faults += 1;
        self.cores[core].pipeline.trap(self.config.os.trap_cycles);
        let mapping = self.processes.get(page).expect("the page is mapped");
        let mut own_page = Mapping {
            shared: false,
            ..mapping
        };
        if self.processes.owners(mapping.frame) != 1 {
            self.events.pages_copied += 1;
            own_page.frame = self.hierarchy.controller.memory.allocate();
            for line in 0..LINES {
                let from = LineAddress::physical(mapping.frame, line);
                self.copy_line(core, from, LineAddress::physical(own_page.frame, line));
            }
        }
        self.remap(core, page, own_page);
    }

    /// Copies a line as a program would.
    fn copy_line(&mut self, core: usize, from: LineAddress, to: LineAddress) {
        let bytes = self.load_line(core, from);
        self.store_line(core, to, &bytes);
        let others = self.config.core.copy_instructions.saturating_sub(2);
        self.cores[core].pipeline.compute(others);
    }

    /// Makes a page of an overlay, or drops it (section 4.3.4).
    ///
    /// # Errors
    /// [`MachineError::NotMapped`], [`MachineError::NoOverlay`] if the page's overlay is not one of versions,
    /// [`MachineError::Shared`] if a commit would change a page of others.
    pub fn promote(
        &mut self,
        core: usize,
        pid: Pid,
        address: u64,
        how: Promotion,
    ) -> Result<(), MachineError> {
        let page = self.place(core, pid, address, 1)?.page;
        let mapping = self.processes.get(page).expect("the page is mapped");
        let pid = pid.get();
        if mapping.overlay != OverlayUse::Versions {
            return Err(MachineError::NoOverlay { pid, address });
        }
        let owners = self.processes.owners(mapping.frame);
        if how == Promotion::Commit && owners != 1 {
            return Err(MachineError::Shared { pid, address, owners });
        }
        self.make_page(core, page, how);
        Ok(())
    }

    /// Does what [`Machine::promote`] has checked.
    pub(super) fn make_page(&mut self, core: usize, page: Page, how: Promotion) {
        self.cores[core].pipeline.trap(self.config.os.trap_cycles);
        let mapping = self.processes.get(page).expect("the page is mapped");
        let obits = self.hierarchy.controller.known_obits(page);
        let frame = match how {
            Promotion::CopyAndCommit => self.hierarchy.controller.memory.allocate(),
            Promotion::Commit | Promotion::Discard => mapping.frame,
        };
        for line in (0..LINES).filter(|_| how != Promotion::Discard) {
            let to = LineAddress::physical(frame, line);
            if obits.has(line) {
                self.copy_line(core, LineAddress::overlay(page, line), to);
            } else if how == Promotion::CopyAndCommit {
                self.copy_line(core, LineAddress::physical(mapping.frame, line), to);
            }
        }
        match how {
            Promotion::Discard => self.events.discards += 1,
            Promotion::CopyAndCommit | Promotion::Commit => self.events.promotions += 1,
        }
        let now = self.cores[core].pipeline.now();
        self.clear_overlay(page, now);
        // A page that others have stays as it was; one's own is written from now on.
        let stays = how == Promotion::Discard && self.processes.owners(mapping.frame) != 1;
        let after = Mapping {
            frame,
            shared: stays,
            overlay: if stays { mapping.overlay } else { OverlayUse::None },
        };
        self.remap(core, page, after);
    }
}
