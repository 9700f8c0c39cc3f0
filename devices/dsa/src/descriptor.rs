//! Work descriptors.

use crate::{Error, MAX_DELTA_SOURCE};
use std::mem::offset_of;

/// An address as the device sees it: virtual with a PASID, else an IOVA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAddress(pub u64);

/// Operations that the engine uses, of those that the device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Does nothing.
    Nop = 0x00,
    /// Runs a list of descriptors.
    Batch = 0x01,
    /// Waits for earlier ones.
    Drain = 0x02,
    /// Copies.
    Memmove = 0x03,
    /// Compares two buffers.
    Compare = 0x05,
    /// Compares a buffer with an 8-byte pattern, such as zero.
    ComparePattern = 0x06,
    /// Notes the words in which two buffers differ.
    CreateDelta = 0x07,
    /// Applies such notes.
    ApplyDelta = 0x08,
    /// Makes a CRC32C.
    CrcGenerate = 0x10,
}

/// Bits of [`Descriptor::flags`].
pub mod flags {
    /// Start only when earlier members of the batch are done.
    pub const FENCE: u32 = 0x01;
    /// Wait for page faults to be served instead of ending.
    pub const BLOCK_ON_FAULT: u32 = 0x02;
    /// The completion address is valid.
    pub const COMPLETION_ADDRESS_VALID: u32 = 0x04;
    /// Write a completion record, also on success.
    pub const REQUEST_COMPLETION: u32 = 0x08;
    /// Raise an interrupt.
    pub const REQUEST_INTERRUPT: u32 = 0x10;
    /// Compare the result with the expected one; a difference is [`crate::Status::FalsePredicate`].
    pub const CHECK_RESULT: u32 = 0x80;
    /// Leave what was written in the cache.
    pub const CACHE_CONTROL: u32 = 0x100;
}

const OPCODE_SHIFT: u32 = 24;
const FLAGS_MASK: u32 = (1 << OPCODE_SHIFT) - 1;

/// Where a `CREATE_DELTA` puts its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpace {
    /// Address of the record.
    pub address: DeviceAddress,
    /// Most bytes it may take.
    pub max_bytes: u32,
}

/// A descriptor as submitted: 64 bytes, aligned to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    pasid_and_privilege: u32,
    flags_and_opcode: u32,
    completion: u64,
    source: u64,
    destination: u64,
    size: u32,
    interrupt_handle: u16,
    reserved: u16,
    specific: [u8; 24],
}

const _: () = assert!(size_of::<Descriptor>() == 64 && align_of::<Descriptor>() == 64);
const _: () =
    assert!(offset_of!(Descriptor, flags_and_opcode) == 4 && offset_of!(Descriptor, completion) == 8);
const _: () = assert!(offset_of!(Descriptor, source) == 16 && offset_of!(Descriptor, destination) == 24);
const _: () = assert!(offset_of!(Descriptor, size) == 32 && offset_of!(Descriptor, interrupt_handle) == 36);
const _: () = assert!(offset_of!(Descriptor, specific) == 40);

impl Descriptor {
    fn new(opcode: Opcode, source: u64, destination: u64, size: u32) -> Self {
        Self {
            pasid_and_privilege: 0,
            flags_and_opcode: (opcode as u32) << OPCODE_SHIFT,
            completion: 0,
            source,
            destination,
            size,
            interrupt_handle: 0,
            reserved: 0,
            specific: [0; 24],
        }
    }

    /// Compares `size` bytes of two buffers.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn compare(a: DeviceAddress, b: DeviceAddress, size: u32) -> Result<Self, Error> {
        let size = not_empty(size)?;
        Ok(Self::new(Opcode::Compare, a.0, b.0, size))
    }

    /// Compares `size` bytes with zero.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn is_zero(source: DeviceAddress, size: u32) -> Result<Self, Error> {
        let size = not_empty(size)?;
        Ok(Self::new(Opcode::ComparePattern, source.0, 0, size))
    }

    /// CRC32C of `size` bytes. A seed of 0 gives the usual value.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn crc(source: DeviceAddress, size: u32, seed: u32) -> Result<Self, Error> {
        let mut descriptor = Self::new(Opcode::CrcGenerate, source.0, 0, not_empty(size)?);
        descriptor.specific[..4].copy_from_slice(&seed.to_le_bytes());
        Ok(descriptor)
    }

    /// Notes the words of `changed` that differ from `base`.
    ///
    /// # Errors
    /// Addresses and sizes must be multiples of 8, and `size` at most [`MAX_DELTA_SOURCE`].
    pub fn create_delta(
        base: DeviceAddress,
        changed: DeviceAddress,
        size: u32,
        space: DeltaSpace,
    ) -> Result<Self, Error> {
        let operands = [
            ("base", base.0),
            ("changed", changed.0),
            ("size", u64::from(size)),
            ("record address", space.address.0),
        ];
        if let Some((field, value)) = operands.into_iter().find(|(_, v)| !v.is_multiple_of(8)) {
            return Err(Error::Unaligned { field, value });
        }
        if size > MAX_DELTA_SOURCE {
            return Err(Error::DeltaTooLong(size));
        }
        let mut descriptor = Self::new(Opcode::CreateDelta, base.0, changed.0, not_empty(size)?);
        descriptor.specific[..8].copy_from_slice(&space.address.0.to_le_bytes());
        descriptor.specific[8..12].copy_from_slice(&space.max_bytes.to_le_bytes());
        Ok(descriptor)
    }

    /// Asks for a completion record.
    ///
    /// # Errors
    /// [`Error::CompletionAddress`] if it is not aligned.
    pub fn with_completion(mut self, record: DeviceAddress) -> Result<Self, Error> {
        if !record.0.is_multiple_of(32) {
            return Err(Error::CompletionAddress(record.0));
        }
        self.completion = record.0;
        self.flags_and_opcode |= flags::COMPLETION_ADDRESS_VALID | flags::REQUEST_COMPLETION;
        Ok(self)
    }

    /// Sets more [`flags`].
    pub fn with_flags(mut self, flags: u32) -> Self {
        self.flags_and_opcode |= flags & FLAGS_MASK;
        self
    }

    /// The [`flags`].
    pub fn flags(&self) -> u32 {
        self.flags_and_opcode & FLAGS_MASK
    }

    /// The opcode's number.
    pub fn opcode(&self) -> u32 {
        self.flags_and_opcode >> OPCODE_SHIFT
    }
}

fn not_empty(size: u32) -> Result<u32, Error> {
    if size == 0 { Err(Error::Empty) } else { Ok(size) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: DeviceAddress = DeviceAddress(0x1000);
    const B: DeviceAddress = DeviceAddress(0x2000);

    #[test]
    fn opcode_and_flags_share_a_word() {
        let compare = Descriptor::compare(A, B, 4096).unwrap().with_flags(u32::MAX);
        assert_eq!((compare.opcode(), compare.flags()), (5, 0x00ff_ffff));
    }

    #[test]
    fn a_completion_record_has_to_be_aligned() {
        let compare = Descriptor::compare(A, B, 4096).unwrap();
        assert_eq!(
            compare.with_completion(DeviceAddress(0x20)).unwrap().flags(),
            0x0c
        );
        assert_eq!(
            compare.with_completion(DeviceAddress(0x10)),
            Err(Error::CompletionAddress(0x10))
        );
    }

    #[test]
    fn the_seed_and_the_delta_space_lie_where_the_device_looks() {
        let crc = Descriptor::crc(A, 256, 0x0102_0304).unwrap();
        assert_eq!(crc.specific[..5], [4, 3, 2, 1, 0]);
        let space = DeltaSpace {
            address: DeviceAddress(0x3000),
            max_bytes: 640,
        };
        let delta = Descriptor::create_delta(A, B, 4096, space).unwrap();
        assert_eq!(delta.specific[..2], [0, 0x30]);
        assert_eq!(delta.specific[8..12], 640u32.to_le_bytes());
    }

    #[test]
    fn operands_out_of_range_are_refused() {
        let space = DeltaSpace {
            address: DeviceAddress(0x3004),
            max_bytes: 640,
        };
        let error = Descriptor::create_delta(A, B, 4096, space).unwrap_err();
        assert_eq!(
            error.to_string(),
            "record address is 0x3004, which is not a multiple of 8"
        );
        let space = DeltaSpace { address: B, ..space };
        let too_long = Descriptor::create_delta(A, B, MAX_DELTA_SOURCE + 8, space);
        assert_eq!(too_long, Err(Error::DeltaTooLong(MAX_DELTA_SOURCE + 8)));
        assert_eq!(Descriptor::compare(A, B, 0), Err(Error::Empty));
    }
}
