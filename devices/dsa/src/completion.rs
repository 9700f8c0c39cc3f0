//! Completion records.

use crate::descriptor::DeviceAddress;
use std::mem::offset_of;

const STATUS_MASK: u8 = 0x7f;
const FAULT_WAS_WRITE: u8 = 0x80;

/// How a descriptor ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Success,
    /// Done, and the result is not the expected one.
    FalsePredicate,
    /// Ended early at a page that is not there; see [`CompletionRecord::fault`].
    PageFault,
    /// A member of the batch failed.
    BatchFailed,
    /// The batch's list itself faulted.
    BatchListFault,
    /// Any other code: the descriptor is wrong.
    Rejected(u8),
}

/// Result of a `COMPARE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// All bytes are equal.
    Equal,
    /// The first difference.
    DiffersAt(u32),
}

/// A copy of the 32 bytes that the device wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(32))]
pub struct CompletionRecord {
    status: u8,
    result: u8,
    reserved: [u8; 2],
    completed: u32,
    fault_address: u64,
    specific: [u8; 16],
}

const _: () = assert!(size_of::<CompletionRecord>() == 32 && align_of::<CompletionRecord>() == 32);
const _: () =
    assert!(offset_of!(CompletionRecord, result) == 1 && offset_of!(CompletionRecord, completed) == 4);
const _: () =
    assert!(offset_of!(CompletionRecord, fault_address) == 8 && offset_of!(CompletionRecord, specific) == 16);

impl CompletionRecord {
    /// From the bytes of a record, copied after its status was seen to be non-zero.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        let [status, result, r0, r1, c0, c1, c2, c3, rest @ ..] = bytes;
        let [f0, f1, f2, f3, f4, f5, f6, f7, specific @ ..] = rest;
        Self {
            status,
            result,
            reserved: [r0, r1],
            completed: u32::from_le_bytes([c0, c1, c2, c3]),
            fault_address: u64::from_le_bytes([f0, f1, f2, f3, f4, f5, f6, f7]),
            specific,
        }
    }

    /// How the descriptor ended; `None` while it has not.
    pub fn status(&self) -> Option<Status> {
        Some(match self.status & STATUS_MASK {
            0 => return None,
            1 => Status::Success,
            2 => Status::FalsePredicate,
            3 => Status::PageFault,
            5 => Status::BatchFailed,
            6 => Status::BatchListFault,
            code => Status::Rejected(code),
        })
    }

    /// What a finished `COMPARE` found; `None` if it did not finish.
    pub fn comparison(&self) -> Option<Comparison> {
        match self.status()? {
            Status::Success | Status::FalsePredicate if self.result == 0 => Some(Comparison::Equal),
            Status::Success | Status::FalsePredicate => Some(Comparison::DiffersAt(self.completed)),
            _ => None,
        }
    }

    /// The CRC of a finished `CRC_GENERATE`.
    pub fn crc(&self) -> Option<u32> {
        let [a, b, c, d, ..] = self.specific;
        (self.status()? == Status::Success).then(|| u32::from_le_bytes([a, b, c, d]))
    }

    /// After a page fault: `(address, whether the device wanted to write, bytes done before)`.
    pub fn fault(&self) -> Option<(DeviceAddress, bool, u32)> {
        let write = self.status & FAULT_WAS_WRITE != 0;
        (self.status()? == Status::PageFault).then_some((
            DeviceAddress(self.fault_address),
            write,
            self.completed,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fields: &[(usize, u8)]) -> CompletionRecord {
        let mut bytes = [0; 32];
        fields.iter().for_each(|(at, value)| bytes[*at] = *value);
        CompletionRecord::from_bytes(bytes)
    }

    #[test]
    fn a_record_that_was_not_written_has_no_status() {
        assert_eq!(record(&[]).status(), None);
        assert_eq!(record(&[(1, 1)]).comparison(), None);
    }

    #[test]
    fn a_comparison_names_the_first_difference() {
        assert_eq!(record(&[(0, 1)]).comparison(), Some(Comparison::Equal));
        let differs = record(&[(0, 1), (1, 1), (4, 0x34), (5, 0x02)]);
        assert_eq!(differs.comparison(), Some(Comparison::DiffersAt(0x234)));
    }

    #[test]
    fn a_fault_tells_where_to_go_on() {
        let faulted = record(&[(0, 0x83), (5, 0x08), (9, 0x10)]);
        assert_eq!(faulted.status(), Some(Status::PageFault));
        assert_eq!(faulted.fault(), Some((DeviceAddress(0x1000), true, 0x800)));
        assert_eq!(faulted.comparison(), None);
    }

    #[test]
    fn a_crc_is_read_behind_the_fault_address() {
        assert_eq!(record(&[(0, 1), (16, 0x78), (17, 0x56)]).crc(), Some(0x5678));
        assert_eq!(record(&[(0, 0x10), (16, 1)]).crc(), None);
    }

    #[test]
    fn unknown_codes_are_kept() {
        assert_eq!(record(&[(0, 0x13)]).status(), Some(Status::Rejected(0x13)));
    }
}
