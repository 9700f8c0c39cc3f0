//! What an engine's device was given to do.

use super::histogram::Histogram;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What an engine gave its device to do, and what became of that. All are totals, and zero where there is no device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DeviceWork {
    /// Requests that the device was given, those in batches included.
    pub requests: u64,
    /// Batches of several requests.
    pub batches: u64,
    /// Bytes that the requests were to read.
    pub bytes: u64,
    /// Times that a full queue turned a request or a batch away.
    pub full: u64,
    /// Page faults after which a request went on.
    pub faults: u64,
    /// Requests given once more for other reasons.
    pub again: u64,
    /// Requests that ended at memory that the device cannot read.
    pub unreadable: u64,
    /// Requests that the device refused, or failed at each time.
    pub refused: u64,
    /// Times that no answer came in time.
    pub late: u64,
    /// Resets of a device.
    pub resets: u64,
    /// Queues that were given up.
    pub queues_lost: u64,
    /// Pages left to the CPU because it is likely to be sooner.
    pub cpu_sooner: u64,
    /// Pages left to the CPU because the device had no room for them, or gave no answer.
    pub cpu_instead: u64,
    /// How long requests and batches took, from when they were given until their end was seen.
    pub latency: Histogram,
}

impl DeviceWork {
    /// What ended in another way than an answer, by what happened.
    pub fn errors(&self) -> [(&'static str, u64); 5] {
        [
            ("unreadable", self.unreadable),
            ("refused", self.refused),
            ("late", self.late),
            ("reset", self.resets),
            ("queue_lost", self.queues_lost),
        ]
    }

    /// Pages left to the CPU, by the reason.
    pub fn left_to_cpu(&self) -> [(&'static str, u64); 2] {
        [("sooner", self.cpu_sooner), ("instead", self.cpu_instead)]
    }

    /// Both together.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        let Self {
            requests,
            batches,
            bytes,
            full,
            faults,
            again,
            unreadable,
            refused,
            late,
            resets,
            queues_lost,
            cpu_sooner,
            cpu_instead,
            latency,
        } = other;
        for (to, more) in [
            (&mut self.requests, requests),
            (&mut self.batches, batches),
            (&mut self.bytes, bytes),
            (&mut self.full, full),
            (&mut self.faults, faults),
            (&mut self.again, again),
            (&mut self.unreadable, unreadable),
            (&mut self.refused, refused),
            (&mut self.late, late),
            (&mut self.resets, resets),
            (&mut self.queues_lost, queues_lost),
            (&mut self.cpu_sooner, cpu_sooner),
            (&mut self.cpu_instead, cpu_instead),
        ] {
            *to = to.saturating_add(*more);
        }
        self.latency = self.latency.and(latency);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_of_each_number_and_do_not_overflow() {
        const WORDS: usize = size_of::<DeviceWork>() / 8;
        let numbers: [u64; WORDS] = std::array::from_fn(|at| at as u64 + 1);
        let work = DeviceWork::read_from_bytes(numbers.as_bytes()).expect("a record of 64-bit numbers");
        let sum = work.and(&work);
        let sums = <[u64; WORDS]>::read_from_bytes(sum.as_bytes()).expect("the same");
        for (at, (sum, number)) in sums.into_iter().zip(numbers).enumerate() {
            // The last number is the longest time.
            let wanted = if at + 1 == WORDS { number } else { 2 * number };
            assert_eq!(sum, wanted, "number {at}");
        }
        let most = DeviceWork::read_from_bytes([u64::MAX; WORDS].as_bytes()).expect("the same");
        assert_eq!(most.and(&work), most);
    }
}
