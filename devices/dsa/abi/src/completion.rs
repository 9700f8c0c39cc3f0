//! Completion records.

use crate::descriptor::DeviceAddress;
use crate::integrity::{Integrity, Tags};
use std::mem::offset_of;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const STATUS_MASK: u8 = 0x7f;
const FAULT_WAS_WRITE: u8 = 0x80;

/// How a descriptor ended (uapi/linux/idxd.h, `enum dsa_completion_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Success = 0x01,
    /// Done, and the result is not the expected one.
    FalsePredicate = 0x02,
    /// Ended early at a page that is not there; see [`CompletionRecord::fault`].
    PageFault = 0x03,
    /// Ended early, since whoever serves page faults refused this one.
    PageResponse = 0x04,
    /// A member of the batch failed.
    BatchFailed = 0x05,
    /// The batch's list itself faulted.
    BatchListFault = 0x06,
    /// The entries of a delta record are not in ascending order.
    DeltaOrder = 0x07,
    /// An entry of a delta record names a word beyond the destination.
    DeltaRange = 0x08,
    /// A block's data integrity field is wrong.
    IntegrityField = 0x09,
    /// The device or the queue does not do this operation, or not here.
    Opcode = 0x10,
    /// Flags that the operation does not take; see [`CompletionRecord::invalid_flags`].
    Flags = 0x11,
    /// A reserved field is not zero.
    Reserved = 0x12,
    /// The size is 0, or above what the queue takes, or not a multiple of what the operation wants.
    Size = 0x13,
    /// The number of members is below 2, or above what the queue takes.
    Count = 0x14,
    /// The size of a delta record, or of the space for one.
    DeltaSize = 0x15,
    /// Buffers overlap that must not.
    Overlap = 0x16,
    /// Both destinations of a dualcast must lie alike in their pages.
    Dualcast = 0x17,
    /// The list of a batch is not aligned to 64 bytes.
    ListAlignment = 0x18,
    /// There is no such interrupt.
    InterruptHandle = 0x19,
    /// The completion record's address cannot be translated.
    RecordFault = 0x1a,
    /// The completion record is not aligned to 32 bytes.
    RecordAlignment = 0x1b,
    /// An operand is not aligned as the operation wants.
    AddressAlignment = 0x1c,
    /// The descriptor claims a privilege that the queue does not have.
    Privilege = 0x1d,
    /// Traffic classes of operands and record do not go together.
    TrafficClass = 0x1e,
    /// The address to read back faulted.
    ReadbackFault = 0x1f,
    /// The device failed.
    Hardware = 0x20,
    /// Reading back failed.
    ReadbackHardware = 0x21,
    /// Translating an address failed.
    Translation = 0x22,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 28] = [
        Self::Success,
        Self::FalsePredicate,
        Self::PageFault,
        Self::PageResponse,
        Self::BatchFailed,
        Self::BatchListFault,
        Self::DeltaOrder,
        Self::DeltaRange,
        Self::IntegrityField,
        Self::Opcode,
        Self::Flags,
        Self::Reserved,
        Self::Size,
        Self::Count,
        Self::DeltaSize,
        Self::Overlap,
        Self::Dualcast,
        Self::ListAlignment,
        Self::InterruptHandle,
        Self::RecordFault,
        Self::RecordAlignment,
        Self::AddressAlignment,
        Self::Privilege,
        Self::TrafficClass,
        Self::ReadbackFault,
        Self::Hardware,
        Self::ReadbackHardware,
        Self::Translation,
    ];

    /// The status of this number, if there is one.
    #[inline]
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        BY_CODE[usize::from(code)]
    }

    /// Whether the descriptor did all that it was to do.
    #[inline]
    #[must_use]
    pub fn is_done(self) -> bool {
        matches!(self, Self::Success | Self::FalsePredicate)
    }
}

static BY_CODE: [Option<Status>; 256] = {
    let mut by_code = [None; 256];
    let mut at = 0;
    while at < Status::ALL.len() {
        by_code[Status::ALL[at] as usize] = Some(Status::ALL[at]);
        at += 1;
    }
    by_code
};

/// Result of a `COMPARE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// All bytes are equal.
    Equal,
    /// The first difference.
    DiffersAt(u32),
}

/// The result of `CREATE_DELTA`: both buffers are equal.
pub const DELTA_EQUAL: u8 = 0;
/// They differ, and the record says how.
pub const DELTA_DIFFERS: u8 = 1;
/// They differ in more words than there is room for.
pub const DELTA_TOO_BIG: u8 = 2;

/// A page that was not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub address: DeviceAddress,
    /// Whether the device wanted to write there.
    pub write: bool,
    /// Bytes (of a batch: descriptors) that were done before.
    pub completed: u32,
}

/// The 32 bytes that the device writes (uapi/linux/idxd.h, `struct dsa_completion_record`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(32))]
pub struct CompletionRecord {
    /// How it ended: [`Status`], and in the highest bit whether a fault was a write; 0 until then.
    pub status: u8,
    /// What the operation found.
    pub result: u8,
    reserved: [u8; 2],
    /// Bytes that are done (of a batch: descriptors); the offset of the first difference.
    pub completed: u32,
    /// Where a page was missing.
    pub fault_address: u64,
    specific: [u8; 16],
}

const _: () = assert!(size_of::<CompletionRecord>() == 32 && align_of::<CompletionRecord>() == 32);
const _: () =
    assert!(offset_of!(CompletionRecord, result) == 1 && offset_of!(CompletionRecord, completed) == 4);
const _: () =
    assert!(offset_of!(CompletionRecord, fault_address) == 8 && offset_of!(CompletionRecord, specific) == 16);

impl CompletionRecord {
    /// That of a descriptor that ended so.
    #[must_use]
    pub fn new(status: Status) -> Self {
        Self {
            status: status as u8,
            ..Self::default()
        }
    }

    /// Says what was found, and how much is done.
    #[inline]
    #[must_use]
    pub fn with_result(self, result: u8, completed: u32) -> Self {
        Self {
            result,
            completed,
            ..self
        }
    }

    /// Ends in another way.
    #[must_use]
    pub fn with_status(self, status: Status) -> Self {
        Self {
            status: status as u8,
            ..self
        }
    }

    /// Adds a page fault with this [`Status`].
    #[must_use]
    pub fn with_fault(self, status: Status, fault: Fault) -> Self {
        Self {
            status: status as u8 | if fault.write { FAULT_WAS_WRITE } else { 0 },
            completed: fault.completed,
            fault_address: fault.address.0,
            ..self
        }
    }

    /// Puts a number where CRCs, sizes of delta records and invalid flags are.
    #[must_use]
    pub fn with_value(mut self, value: u32) -> Self {
        self.specific[..4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Puts in the tags that the block behind those that are done is to have, and to get.
    #[must_use]
    pub fn with_tags(mut self, next: &Integrity) -> Self {
        self.specific[..8].copy_from_slice(&next.source.to_bytes());
        self.specific[8..].copy_from_slice(&next.destination.to_bytes());
        self
    }

    /// Of operations on blocks: the tags that the next block is to have, and to get.
    #[must_use]
    pub fn tags(&self) -> [Tags; 2] {
        [0, 8].map(|at| Tags::from_bytes(std::array::from_fn(|byte| self.specific[at + byte])))
    }

    /// From the bytes of a record, copied after its status was seen to be non-zero.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        zerocopy::transmute!(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        zerocopy::transmute!(self)
    }

    /// How the descriptor ended; `None` while it has not.
    ///
    /// # Errors
    /// The number of a status that is not known.
    #[inline]
    pub fn status(&self) -> Option<Result<Status, u8>> {
        let code = self.status & STATUS_MASK;
        (code != 0).then(|| Status::from_code(code).ok_or(code))
    }

    /// What a finished `COMPARE` found; `None` if it did not finish.
    #[inline]
    #[must_use]
    pub fn comparison(&self) -> Option<Comparison> {
        match (self.is_done(), self.result) {
            (false, _) => None,
            (true, 0) => Some(Comparison::Equal),
            (true, _) => Some(Comparison::DiffersAt(self.completed)),
        }
    }

    /// The CRC of a finished `CRC_GENERATE` or `COPY_CRC`.
    #[inline]
    #[must_use]
    pub fn crc(&self) -> Option<u32> {
        self.is_done().then(|| self.value())
    }

    /// What a finished `CREATE_DELTA` found ([`DELTA_EQUAL`] and following), and bytes of the record.
    #[must_use]
    pub fn delta(&self) -> Option<(u8, u32)> {
        self.is_done().then(|| (self.result, self.value()))
    }

    /// After [`Status::PageFault`], [`Status::PageResponse`] or [`Status::BatchListFault`]: where and what for.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        let faulted = matches!(
            self.status(),
            Some(Ok(Status::PageFault
                | Status::PageResponse
                | Status::BatchListFault))
        );
        faulted.then_some(Fault {
            address: DeviceAddress(self.fault_address),
            write: self.status & FAULT_WAS_WRITE != 0,
            completed: self.completed,
        })
    }

    /// After [`Status::Flags`]: which.
    #[must_use]
    pub fn invalid_flags(&self) -> u32 {
        self.value()
    }

    /// The CRC, the size of a delta record or the invalid flags, by the descriptor's operation. After a page fault: the
    /// CRC so far, or the size of the delta record so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        let [a, b, c, d, ..] = self.specific;
        u32::from_le_bytes([a, b, c, d])
    }

    /// Whether the operation was done to its end.
    #[inline]
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.status(), Some(Ok(status)) if status.is_done())
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
        let fault = Fault {
            address: DeviceAddress(0x1000),
            write: true,
            completed: 0x800,
        };
        assert_eq!(faulted.status(), Some(Ok(Status::PageFault)));
        assert_eq!(faulted.fault(), Some(fault));
        assert_eq!(faulted.comparison(), None);
        assert_eq!(
            CompletionRecord::default().with_fault(Status::PageFault, fault),
            faulted
        );
    }

    #[test]
    fn a_crc_is_read_behind_the_fault_address() {
        let done = record(&[(0, 1), (16, 0x78), (17, 0x56)]);
        assert_eq!(done.crc(), Some(0x5678));
        assert_eq!(done, CompletionRecord::new(Status::Success).with_value(0x5678));
        assert_eq!(record(&[(0, 0x10), (16, 1)]).crc(), None);
    }

    #[test]
    fn every_status_has_its_number_and_unknown_ones_are_kept() {
        for status in Status::ALL {
            assert_eq!(record(&[(0, status as u8)]).status(), Some(Ok(status)));
        }
        assert_eq!(record(&[(0, 0x3f)]).status(), Some(Err(0x3f)));
    }

    #[test]
    fn bytes_go_there_and_back() {
        let record = CompletionRecord::new(Status::Flags).with_value(0x1234_5678);
        assert_eq!(CompletionRecord::from_bytes(record.to_bytes()), record);
    }
}
