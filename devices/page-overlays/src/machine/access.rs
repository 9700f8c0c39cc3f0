//! What instructions do (sections 4.3.1 to 4.3.3, 5.3.4).

use super::os::Promotion;
use super::state::{Machine, MachineError, Place};
use crate::address::{LineAddress, Pid};
use crate::pipeline::Issue;
use crate::sizes::LINE_BYTES;
use crate::tlb::{OverlayUse, Translation};

/// What a store meets.
enum Target {
    /// A line that may be written.
    Line(LineAddress),
    /// A line that is put into the overlay first, from this line of the page.
    Overlaying(LineAddress),
    /// A page that is copied first.
    Copied,
}

impl Machine {
    /// Loads bytes that are within one line (section 4.3.1).
    ///
    /// # Errors
    /// [`MachineError`] if there is no such core or page, or if the bytes are not within one line.
    pub fn read(
        &mut self,
        core: usize,
        pid: Pid,
        address: u64,
        bytes: &mut [u8],
        issue: Issue,
    ) -> Result<(), MachineError> {
        let place = self.place(core, pid, address, bytes.len())?;
        let start = self.cores[core].pipeline.access(issue);
        let (translation, at) = self.translate(core, place.page, start);
        let line = version(place, translation);
        let (data, done) = self.hierarchy.read(core, line, at);
        bytes.copy_from_slice(&data[place.at..place.at + bytes.len()]);
        self.cores[core].pipeline.load(done);
        Ok(())
    }

    /// Stores bytes that are within one line (sections 4.3.2 and 4.3.3).
    ///
    /// # Errors
    /// [`MachineError`] if there is no such core or page, or if the bytes are not within one line.
    pub fn write(
        &mut self,
        core: usize,
        pid: Pid,
        address: u64,
        bytes: &[u8],
        issue: Issue,
    ) -> Result<(), MachineError> {
        let place = self.place(core, pid, address, bytes.len())?;
        let start = self.cores[core].pipeline.access(issue);
        let (translation, at) = self.translate(core, place.page, start);
        match target(place, translation) {
            Target::Line(line) => {
                let overlay = line.in_overlay().is_some();
                self.events.simple_overlay_writes += u64::from(overlay);
                let done = self.hierarchy.write(core, line, place.at, bytes, at);
                self.cores[core].pipeline.store(at, done);
            }
            Target::Overlaying(from) => {
                self.events.overlaying_writes += 1;
                let to = LineAddress::overlay(place.page, place.line);
                let there = self.hierarchy.retag(core, from, to, at);
                let mapped = self.overlaying_read_exclusive(place.page, place.line, at);
                let done = self.hierarchy.write(core, to, place.at, bytes, there.max(mapped));
                self.cores[core].pipeline.store(at, done);
                let lines = translation.obits.count() + 1;
                if self.config.os.promote_at.is_some_and(|most| lines >= most) {
                    self.make_page(core, place.page, Promotion::CopyAndCommit);
                }
            }
            Target::Copied => {
                self.copy_on_write(core, place.page);
                // The store is tried again.
                let now = self.cores[core].pipeline.now();
                let (translation, at) = self.translate(core, place.page, now);
                let line = LineAddress::physical(translation.frame, place.line);
                let done = self.hierarchy.write(core, line, place.at, bytes, at);
                self.cores[core].pipeline.store(at, done);
            }
        }
        Ok(())
    }

    /// Loads metadata: as a load, but from the overlay (section 5.3.4). Zeros where no overlay has a line.
    ///
    /// # Errors
    /// As [`Machine::read`], and [`MachineError::NoMetadata`] if the page was not mapped with metadata.
    pub fn read_metadata(
        &mut self,
        core: usize,
        pid: Pid,
        address: u64,
        bytes: &mut [u8],
        issue: Issue,
    ) -> Result<(), MachineError> {
        let place = self.metadata_place(core, pid, address, bytes.len())?;
        self.events.metadata_loads += 1;
        let start = self.cores[core].pipeline.access(issue);
        let (translation, at) = self.translate(core, place.page, start);
        if translation.obits.has(place.line) {
            let line = LineAddress::overlay(place.page, place.line);
            let (data, done) = self.hierarchy.read(core, line, at);
            bytes.copy_from_slice(&data[place.at..place.at + bytes.len()]);
            self.cores[core].pipeline.load(done);
        } else {
            self.events.metadata_loads_absent += 1;
            bytes.fill(0);
            self.cores[core].pipeline.load(at + 1);
        }
        Ok(())
    }

    /// Stores metadata: as a store, but to the overlay (section 5.3.4).
    ///
    /// # Errors
    /// As [`Machine::write`], and [`MachineError::NoMetadata`] if the page was not mapped with metadata.
    pub fn write_metadata(
        &mut self,
        core: usize,
        pid: Pid,
        address: u64,
        bytes: &[u8],
        issue: Issue,
    ) -> Result<(), MachineError> {
        let place = self.metadata_place(core, pid, address, bytes.len())?;
        self.events.metadata_stores += 1;
        let start = self.cores[core].pipeline.access(issue);
        let (translation, at) = self.translate(core, place.page, start);
        let line = LineAddress::overlay(place.page, place.line);
        let mut ready = at;
        if !translation.obits.has(place.line) {
            // There is no line to start from: a new one holds zeros.
            ready = self.overlaying_read_exclusive(place.page, place.line, at);
            self.hierarchy.create(core, line, [0; LINE_BYTES], ready);
        }
        let done = self.hierarchy.write(core, line, place.at, bytes, ready);
        self.cores[core].pipeline.store(at, done);
        Ok(())
    }

    fn metadata_place(
        &self,
        core: usize,
        pid: Pid,
        address: u64,
        bytes: usize,
    ) -> Result<Place, MachineError> {
        let place = self.place(core, pid, address, bytes)?;
        match self.processes.get(place.page).map(|mapping| mapping.overlay) {
            Some(OverlayUse::Metadata) => Ok(place),
            _ => Err(MachineError::NoMetadata {
                pid: pid.get(),
                address,
            }),
        }
    }
}

/// The line that a load meets.
fn version(place: Place, translation: Translation) -> LineAddress {
    if translation.overlay == OverlayUse::Versions && translation.obits.has(place.line) {
        LineAddress::overlay(place.page, place.line)
    } else {
        LineAddress::physical(translation.frame, place.line)
    }
}

fn target(place: Place, translation: Translation) -> Target {
    let line = version(place, translation);
    match translation.overlay {
        _ if line.in_overlay().is_some() || !translation.shared => Target::Line(line),
        OverlayUse::Versions => Target::Overlaying(line),
        OverlayUse::None | OverlayUse::Metadata => Target::Copied,
    }
}
