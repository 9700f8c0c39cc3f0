//! Batches that are being worked on.

use crate::queue::Job;
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, DeviceAddress, Fault, Status, flags};

/// A batch whose members are being dispatched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub(crate) job: Job,
    /// When its next member may begin, fences aside.
    pub(crate) ready: u64,
    /// When the last of its members ends that were dispatched.
    pub(crate) last_end: u64,
    /// The member that comes next; `None` after the last one.
    pub(crate) next: Option<Descriptor>,
    /// Members that were dispatched.
    pub(crate) dispatched: u32,
    /// One of them did not succeed.
    pub(crate) failed: bool,
    /// Reading the list failed here.
    pub(crate) list_fault: Option<u64>,
}

impl Batch {
    pub(crate) fn new(job: Job, ready: u64) -> Self {
        Self {
            job,
            ready,
            last_end: ready,
            next: None,
            dispatched: 0,
            failed: false,
            list_fault: None,
        }
    }

    /// The address of the member that comes next, if there is one.
    pub(crate) fn next_address(&self) -> Option<u64> {
        let left = self.dispatched < self.job.descriptor.size() && self.list_fault.is_none();
        left.then(|| self.job.descriptor.source() + u64::from(self.dispatched) * 64)
    }

    /// When the next member may begin: a fence waits for all before it.
    pub(crate) fn begins(&self) -> u64 {
        match self.next {
            Some(next) if next.has(flags::FENCE) => self.last_end.max(self.ready),
            _ => self.ready,
        }
    }

    /// Whether the next member is given up, and all behind it.
    pub(crate) fn is_fenced_off(&self) -> bool {
        self.failed && self.next.is_some_and(|next| next.has(flags::FENCE))
    }

    /// The batch's own record.
    pub(crate) fn record(&self) -> CompletionRecord {
        let completed = self.dispatched;
        let result = u8::from(self.failed);
        let record = match self.list_fault {
            Some(address) => CompletionRecord::default().with_fault(
                Status::BatchListFault,
                Fault {
                    address: DeviceAddress(address),
                    write: false,
                    completed,
                },
            ),
            None if self.failed => CompletionRecord::new(Status::BatchFailed),
            None => CompletionRecord::new(Status::Success),
        };
        record.with_result(result, completed)
    }
}
