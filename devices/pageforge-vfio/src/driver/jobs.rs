//! Jobs for the device.

use crate::scan_table::{Candidate, Pointer, Ppn};
use crate::window::Job;
use vmm_dedup::compare::{Answer, Error, PageId};

/// An invalid entry, where a search ends at once: to make a key only, or after a single comparison.
pub(super) const NOWHERE: u8 = 31;

/// The number of a page, as the device has it.
pub(super) fn ppn_of(page: PageId) -> Answer<Ppn> {
    Ppn::try_new(page.0).map_err(|_| Error::Fault(page))
}

/// A job that begins at an entry of a table. `last_refill`: the key is made with it.
pub(super) fn job(candidate: Ppn, table: u32, ptr: u8, last_refill: bool) -> Job {
    let candidate = Candidate {
        ppn: candidate,
        last_refill,
        ptr: Pointer::new(ptr),
    };
    Job { candidate, table }
}
