//! One descriptor, and what becomes of it when it has ended.
#![allow(unsafe_code)] // touches pages by address

use super::item::ItemError;
use crate::area::Addresses;
use vmm_dedup::compare::DeviceWork;
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, Opcode, Status};
use vmm_dedup_protocol::PAGE_SIZE;

/// Times that one descriptor is submitted.
const TRIES: u8 = 24;

/// Where a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It is to be submitted alone.
    ToDo,
    /// The device has it.
    Submitted,
    /// The caller has been told.
    Done,
}

/// What the device's addresses are.
pub(super) enum Reach<'a> {
    /// This process's.
    Process,
    /// Those that it was given.
    Given(&'a Addresses),
}

/// A descriptor in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// What is left of it.
    pub(super) descriptor: Descriptor,
    /// The caller's number.
    pub(super) tag: u64,
    pub(super) state: State,
    /// Bytes of it that were done before.
    done: u32,
    tries: u8,
}

impl Member {
    /// It is to be done.
    pub(super) fn new(descriptor: Descriptor, tag: u64) -> Self {
        Self {
            descriptor,
            tag,
            state: State::ToDo,
            done: 0,
            tries: 0,
        }
    }

    /// The device has it.
    pub(super) fn submitted(&mut self, work: &mut DeviceWork) {
        self.state = State::Submitted;
        self.tries += 1;
        work.requests += 1;
        work.bytes += self.descriptor.traffic();
    }

    /// It has ended, or was not begun (`None`). Returns what the caller is told; if that is nothing it is to be submitted
    /// once more.
    pub(super) fn ended(
        &mut self,
        record: Option<CompletionRecord>,
        abandoned: bool,
        reach: &Reach<'_>,
        work: &mut DeviceWork,
    ) -> Option<Result<CompletionRecord, ItemError>> {
        match record {
            Some(record) if record.is_done() && !abandoned => {
                self.state = State::Done;
                let completed = record.completed.saturating_add(self.done);
                Some(Ok(record.with_result(record.result, completed)))
            }
            _ => self.ended_otherwise(record, abandoned, reach, work),
        }
    }

    /// It did not end well.
    fn ended_otherwise(
        &mut self,
        record: Option<CompletionRecord>,
        abandoned: bool,
        reach: &Reach<'_>,
        work: &mut DeviceWork,
    ) -> Option<Result<CompletionRecord, ItemError>> {
        let outcome = match record.map(|record| (record, record.status())) {
            _ if abandoned => Some(Err(ItemError::Abandoned)),
            _ if self.tries >= TRIES => Some(Err(last_error(record))),
            Some((record, Some(Ok(Status::PageFault)))) => {
                let went_on = self.go_on(&record, reach);
                work.faults += u64::from(went_on.is_ok());
                went_on.err().map(Err)
            }
            // Not begun; or failed in a way that may pass.
            None | Some((_, Some(Ok(Status::Hardware | Status::Translation | Status::PageResponse)))) => {
                work.again += 1;
                None
            }
            Some(_) => Some(Err(last_error(record))),
        };
        match &outcome {
            Some(Err(ItemError::Fault(_))) => work.unreadable += 1,
            Some(Err(ItemError::Refused(_))) => work.refused += 1,
            Some(Ok(_) | Err(ItemError::Abandoned)) | None => {}
        }
        self.state = if outcome.is_some() {
            State::Done
        } else {
            State::ToDo
        };
        outcome
    }

    /// Makes it what is left of it behind a page fault, and touches the page.
    fn go_on(&mut self, record: &CompletionRecord, reach: &Reach<'_>) -> Result<(), ItemError> {
        let Some(fault) = record.fault() else {
            return Err(ItemError::Refused(record.status));
        };
        let wrong = Err(ItemError::Fault(fault.address));
        let left = self.descriptor;
        if fault.write || !reads(&left, fault.address.0) {
            return wrong;
        }
        match reach {
            // SAFETY: the address is in a page of an operand that the descriptor reads, which the caller keeps readable
            // until it is told of its end or abandons it: neither has happened.
            Reach::Process => unsafe { touch(fault.address.0) },
            Reach::Given(space) if !space.has(fault.address.0) => return wrong,
            Reach::Given(_) => {}
        }
        let Some(rest) = left.rest(fault.completed, record.value(), record.result != 0) else {
            return wrong;
        };
        self.done += fault.completed;
        self.descriptor = rest;
        Ok(())
    }
}

fn last_error(record: Option<CompletionRecord>) -> ItemError {
    match record {
        Some(record) => match record.fault() {
            Some(fault) => ItemError::Fault(fault.address),
            None => ItemError::Refused(record.status),
        },
        None => ItemError::Refused(0),
    }
}

/// Whether an address lies in a page that a descriptor reads.
fn reads(descriptor: &Descriptor, address: u64) -> bool {
    let page = PAGE_SIZE as u64;
    let size = u64::from(descriptor.size());
    let within = |start: u64| {
        let (first, end) = (start / page, start.saturating_add(size).div_ceil(page));
        (first..end).contains(&(address / page))
    };
    match descriptor.opcode() {
        Some(Opcode::Compare) => within(descriptor.source()) || within(descriptor.destination()),
        Some(Opcode::ComparePattern | Opcode::CrcGenerate) => within(descriptor.source()),
        _ => false,
    }
}

/// Has the kernel bring the page of an address.
///
/// # Safety
/// It must be readable.
unsafe fn touch(address: u64) {
    let byte = usize::try_from(address).unwrap_or(0) as *const u8;
    // SAFETY: as promised by the caller; volatile, so that it is not left out.
    unsafe { byte.read_volatile() };
}
