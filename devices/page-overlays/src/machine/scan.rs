//! Computing on overlays only (section 5.2).
//!
//! Software asks for the next line of a range that an overlay has. Hardware knows which those are: it runs ahead over the
//! overlays of the range, fetches their entries of the OMT and their lines into the L3, and hands out lines in order. A line
//! has its overlay address without translation, so the TLB is not asked.

use super::state::{Machine, MachineError};
use crate::address::{LineAddress, Page, Pid};
use crate::obits::OBitVector;
use crate::pipeline::Issue;
use crate::sizes::{LINE_BYTES, LineBytes, PAGE_BYTES, number};
use std::collections::VecDeque;

/// A walk over the overlays of a range.
#[derive(Debug)]
pub struct Scan {
    core: usize,
    pid: Pid,
    /// The pages not looked at yet, by address.
    next: u64,
    end: u64,
    /// The page being looked at, and its lines that are not in `ahead` yet.
    page: Option<(Page, OBitVector)>,
    /// Lines that were fetched ahead.
    ahead: VecDeque<(Page, usize)>,
}

impl Machine {
    /// Begins a walk over the overlays of `pages` pages.
    ///
    /// # Errors
    /// [`MachineError`] if there is no such core, or a page is not mapped.
    pub fn scan(&self, core: usize, pid: Pid, address: u64, pages: u64) -> Result<Scan, MachineError> {
        let end = address + pages * number(PAGE_BYTES);
        for at in (address..end).step_by(PAGE_BYTES) {
            self.place(core, pid, at, 1)?;
        }
        Ok(Scan {
            core,
            pid,
            next: address,
            end,
            page: None,
            ahead: VecDeque::with_capacity(self.config.prefetch.overlay_lines + 1),
        })
    }

    /// Loads the next line that an overlay has; returns its virtual address and bytes. `None`: there is none left.
    ///
    /// # Errors
    /// [`MachineError::Address`] if an address cannot be.
    pub fn next_overlay_line(&mut self, scan: &mut Scan) -> Result<Option<(u64, LineBytes)>, MachineError> {
        while scan.ahead.len() <= self.config.prefetch.overlay_lines {
            let Some((page, line)) = self.line_ahead(scan)? else {
                break;
            };
            let now = self.cores[scan.core].pipeline.now();
            self.hierarchy.prefetch(LineAddress::overlay(page, line), now);
            scan.ahead.push_back((page, line));
        }
        let Some((page, line)) = scan.ahead.pop_front() else {
            return Ok(None);
        };
        let start = self.cores[scan.core].pipeline.access(Issue::Free);
        let (bytes, done) = self
            .hierarchy
            .read(scan.core, LineAddress::overlay(page, line), start);
        self.cores[scan.core].pipeline.load(done);
        Ok(Some((page.address() + number(line * LINE_BYTES), bytes)))
    }

    /// The next line that the walk meets.
    fn line_ahead(&mut self, scan: &mut Scan) -> Result<Option<(Page, usize)>, MachineError> {
        loop {
            if let Some((page, lines)) = &mut scan.page {
                let line = lines.lines().next();
                if let Some(line) = line {
                    *lines = OBitVector::from_bits(lines.bits() & (lines.bits() - 1));
                    return Ok(Some((*page, line)));
                }
            }
            if scan.next == scan.end {
                return Ok(None);
            }
            let page = Page::of(scan.pid, scan.next)?;
            scan.next += number(PAGE_BYTES);
            scan.page = Some((page, self.hierarchy.controller.known_obits(page)));
        }
    }
}
