//! Ends of descriptors that are yet to come, by time.

use crate::queue::Job;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use vmm_dedup_dsa_abi::CompletionRecord;

/// A descriptor's end, which is yet to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending {
    pub(crate) at: u64,
    /// Among those of the same time, in the order in which they were made.
    order: u64,
    pub(crate) job: Job,
    pub(crate) record: CompletionRecord,
    /// The record is written.
    pub(crate) told: bool,
    /// It ends what has the job's number: not so for members of a batch.
    pub(crate) ends: bool,
}

impl PartialEq for Ending {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Ending {}

impl PartialOrd for Ending {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ending {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Endings {
    heap: BinaryHeap<Reverse<Ending>>,
    orders: u64,
}

impl Endings {
    /// One more. `told`: its record is written; `ends`: it ends what has the job's number.
    pub(crate) fn push(&mut self, at: u64, job: Job, record: CompletionRecord, told: bool, ends: bool) {
        self.orders += 1;
        self.heap.push(Reverse(Ending {
            at,
            order: self.orders,
            job,
            record,
            told,
            ends,
        }));
    }

    /// When the next one comes.
    pub(crate) fn next(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(ending)| ending.at)
    }

    /// Takes the next one.
    pub(crate) fn pop(&mut self) -> Option<Ending> {
        self.heap.pop().map(|Reverse(ending)| ending)
    }

    /// None comes any more.
    pub(crate) fn clear(&mut self) {
        self.heap.clear();
    }
}
