//! Work descriptors.

use crate::error::Error;
use crate::integrity::{INTEGRITY_FIELD, Integrity, Tags};
use crate::operation::{Opcode, flags};
use crate::sizes::{DELTA_ENTRY, MAX_DELTA_SOURCE, MIN_BATCH, MIN_DELTA_SPACE};
use std::mem::offset_of;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An address as the device sees it: virtual with a PASID, else an IOVA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The address so many bytes further on; `None` beyond the last one.
    #[must_use]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

/// A process's address space, as the IOMMU knows it (20 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pasid(u32);

impl Pasid {
    /// Bits of a PASID.
    pub const BITS: u32 = 20;

    /// The PASID in the 20 low bits of a word.
    #[must_use]
    pub fn from_low_bits(word: u32) -> Self {
        Self(word & ((1 << Self::BITS) - 1))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

const OPCODE_SHIFT: u32 = 24;
const FLAGS_MASK: u32 = (1 << OPCODE_SHIFT) - 1;
const PRIVILEGED: u32 = 1 << 31;

/// Where a `CREATE_DELTA` puts its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpace {
    /// Address of the record.
    pub address: DeviceAddress,
    /// Most bytes it may take.
    pub max_bytes: u32,
}

/// A descriptor as submitted: 64 bytes, aligned to that (uapi/linux/idxd.h, `struct dsa_hw_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
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

/// Places within the operation's own bytes, from byte 40 of the descriptor on.
mod specific {
    pub(super) const EXPECTED_RESULT: usize = 0;
    pub(super) const DELTA_ADDRESS: usize = 0;
    pub(super) const DELTA_MAX_BYTES: usize = 8;
    pub(super) const DELTA_EXPECTED_MASK: usize = 16;
    pub(super) const DELTA_BYTES: usize = 0;
    pub(super) const DESTINATION_2: usize = 0;
    pub(super) const CRC_SEED: usize = 0;
    pub(super) const CRC_SEED_ADDRESS: usize = 8;
    pub(super) const STRIDE: usize = 8;
    pub(super) const INTEGRITY_FLAGS: usize = 0;
    pub(super) const SOURCE_TAGS: usize = 8;
    pub(super) const DESTINATION_TAGS: usize = 16;
}

/// Making descriptors that a device accepts.
impl Descriptor {
    #[inline]
    fn new(opcode: Opcode, source: u64, destination: u64, size: u32) -> Self {
        Self {
            pasid_and_privilege: 0,
            flags_and_opcode: u32::from(opcode as u8) << OPCODE_SHIFT,
            completion: 0,
            source,
            destination,
            size,
            interrupt_handle: 0,
            reserved: 0,
            specific: [0; 24],
        }
    }

    /// Does nothing.
    #[must_use]
    pub fn nop() -> Self {
        Self::new(Opcode::Nop, 0, 0, 0)
    }

    /// Waits for all descriptors that were submitted before.
    #[must_use]
    pub fn drain() -> Self {
        Self::new(Opcode::Drain, 0, 0, 0)
    }

    /// Runs the descriptors of a list.
    ///
    /// # Errors
    /// [`Error::Batch`], [`Error::ListAddress`].
    pub fn batch(list: DeviceAddress, members: u32) -> Result<Self, Error> {
        if members < MIN_BATCH {
            return Err(Error::Batch(members));
        }
        if !list.0.is_multiple_of(size_of::<Self>() as u64) {
            return Err(Error::ListAddress(list.0));
        }
        Ok(Self::new(Opcode::Batch, list.0, 0, members))
    }

    /// Copies `size` bytes.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn memmove(from: DeviceAddress, to: DeviceAddress, size: u32) -> Result<Self, Error> {
        Ok(Self::new(Opcode::Memmove, from.0, to.0, not_empty(size)?))
    }

    /// Fills `size` bytes with a pattern.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn fill(pattern: u64, to: DeviceAddress, size: u32) -> Result<Self, Error> {
        Ok(Self::new(Opcode::Fill, pattern, to.0, not_empty(size)?))
    }

    /// Compares `size` bytes of two buffers.
    ///
    /// # Errors
    /// [`Error::Empty`].
    #[inline]
    pub fn compare(a: DeviceAddress, b: DeviceAddress, size: u32) -> Result<Self, Error> {
        Ok(Self::new(Opcode::Compare, a.0, b.0, not_empty(size)?))
    }

    /// Compares `size` bytes with a pattern.
    ///
    /// # Errors
    /// [`Error::Empty`].
    #[inline]
    pub fn compare_pattern(source: DeviceAddress, pattern: u64, size: u32) -> Result<Self, Error> {
        Ok(Self::new(
            Opcode::ComparePattern,
            source.0,
            pattern,
            not_empty(size)?,
        ))
    }

    /// CRC32C of `size` bytes. A seed of 0 gives the usual value.
    ///
    /// # Errors
    /// [`Error::Empty`].
    #[inline]
    pub fn crc(source: DeviceAddress, size: u32, seed: u32) -> Result<Self, Error> {
        let descriptor = Self::new(Opcode::CrcGenerate, source.0, 0, not_empty(size)?);
        Ok(descriptor.with_specific(specific::CRC_SEED, seed.to_le_bytes()))
    }

    /// Copies `size` bytes, and makes their CRC32C.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn copy_crc(from: DeviceAddress, to: DeviceAddress, size: u32, seed: u32) -> Result<Self, Error> {
        let descriptor = Self::new(Opcode::CopyCrc, from.0, to.0, not_empty(size)?);
        Ok(descriptor.with_specific(specific::CRC_SEED, seed.to_le_bytes()))
    }

    /// Copies `size` bytes to two places.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::Dualcast`].
    pub fn dualcast(from: DeviceAddress, to: [DeviceAddress; 2], size: u32) -> Result<Self, Error> {
        let [first, second] = to;
        if (first.0 ^ second.0) & 0xfff != 0 {
            return Err(Error::Dualcast(first.0, second.0));
        }
        let descriptor = Self::new(Opcode::Dualcast, from.0, first.0, not_empty(size)?);
        Ok(descriptor.with_specific(specific::DESTINATION_2, second.0.to_le_bytes()))
    }

    /// Notes the words of `changed` that differ from `base`.
    ///
    /// # Errors
    /// Addresses and sizes must be multiples of 8, `size` at most [`MAX_DELTA_SOURCE`], the space at least
    /// [`MIN_DELTA_SPACE`].
    pub fn create_delta(
        base: DeviceAddress,
        changed: DeviceAddress,
        size: u32,
        space: DeltaSpace,
    ) -> Result<Self, Error> {
        let operands = [
            ("base", base.0),
            ("changed", changed.0),
            ("record address", space.address.0),
        ];
        delta_operands(&operands, size)?;
        if space.max_bytes < MIN_DELTA_SPACE {
            return Err(Error::DeltaSpace(space.max_bytes));
        }
        Ok(Self::new(Opcode::CreateDelta, base.0, changed.0, size)
            .with_specific(specific::DELTA_ADDRESS, space.address.0.to_le_bytes())
            .with_specific(specific::DELTA_MAX_BYTES, space.max_bytes.to_le_bytes()))
    }

    /// Writes the words that a delta record of `record_bytes` bytes notes into a buffer of `size` bytes.
    ///
    /// # Errors
    /// As [`Self::create_delta`]; the record must be made of entries.
    pub fn apply_delta(
        record: DeviceAddress,
        record_bytes: u32,
        to: DeviceAddress,
        size: u32,
    ) -> Result<Self, Error> {
        delta_operands(&[("record address", record.0), ("destination", to.0)], size)?;
        if record_bytes == 0 || !record_bytes.is_multiple_of(DELTA_ENTRY) {
            return Err(Error::DeltaRecord(record_bytes));
        }
        let descriptor = Self::new(Opcode::ApplyDelta, record.0, to.0, size);
        Ok(descriptor.with_specific(specific::DELTA_BYTES, record_bytes.to_le_bytes()))
    }

    /// Checks `size` bytes of blocks with their fields.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::Blocks`].
    pub fn integrity_check(from: DeviceAddress, size: u32, integrity: Integrity) -> Result<Self, Error> {
        Self::of_blocks(Opcode::IntegrityCheck, [from.0, 0], size, integrity)
    }

    /// Copies `size` bytes of blocks, and adds their fields.
    ///
    /// # Errors
    /// As [`Self::integrity_check`].
    pub fn integrity_insert(
        from: DeviceAddress,
        to: DeviceAddress,
        size: u32,
        integrity: Integrity,
    ) -> Result<Self, Error> {
        Self::of_blocks(Opcode::IntegrityInsert, [from.0, to.0], size, integrity)
    }

    /// Checks `size` bytes of blocks with their fields, and copies the blocks.
    ///
    /// # Errors
    /// As [`Self::integrity_check`].
    pub fn integrity_strip(
        from: DeviceAddress,
        to: DeviceAddress,
        size: u32,
        integrity: Integrity,
    ) -> Result<Self, Error> {
        Self::of_blocks(Opcode::IntegrityStrip, [from.0, to.0], size, integrity)
    }

    /// Checks `size` bytes of blocks with their fields, and copies them with other fields.
    ///
    /// # Errors
    /// As [`Self::integrity_check`].
    pub fn integrity_update(
        from: DeviceAddress,
        to: DeviceAddress,
        size: u32,
        integrity: Integrity,
    ) -> Result<Self, Error> {
        Self::of_blocks(Opcode::IntegrityUpdate, [from.0, to.0], size, integrity)
    }

    fn of_blocks(opcode: Opcode, at: [u64; 2], size: u32, integrity: Integrity) -> Result<Self, Error> {
        let descriptor = Self::new(opcode, at[0], at[1], not_empty(size)?).with_integrity(integrity);
        let block = descriptor.source_block();
        if !size.is_multiple_of(block) {
            return Err(Error::Blocks { size, block });
        }
        Ok(descriptor.with_integrity(descriptor.integrity_after(0)))
    }

    /// Writes lines of the CPU's caches back to memory.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn cache_flush(at: DeviceAddress, size: u32) -> Result<Self, Error> {
        Ok(Self::new(Opcode::CacheFlush, 0, at.0, not_empty(size)?))
    }

    /// Brings translations of `size` bytes into the device's cache.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub fn translation_fetch(at: DeviceAddress, size: u32) -> Result<Self, Error> {
        Ok(Self::new(Opcode::TranslationFetch, at.0, 0, not_empty(size)?))
    }

    /// Asks for a completion record.
    ///
    /// # Errors
    /// [`Error::CompletionAddress`] if it is not aligned.
    #[inline]
    pub fn with_completion(mut self, record: DeviceAddress) -> Result<Self, Error> {
        if !record.0.is_multiple_of(32) {
            return Err(Error::CompletionAddress(record.0));
        }
        self.completion = record.0;
        self.flags_and_opcode |= flags::COMPLETION_ADDRESS_VALID | flags::REQUEST_COMPLETION;
        Ok(self)
    }

    /// Asks for an interrupt when it has ended: on a device without handles the number of the vector.
    #[must_use]
    pub fn with_interrupt(mut self, handle: u16) -> Self {
        self.interrupt_handle = handle;
        self.flags_and_opcode |= flags::REQUEST_INTERRUPT;
        self
    }

    /// Sets more [`flags`].
    #[must_use]
    pub fn with_flags(mut self, flags: u32) -> Self {
        self.flags_and_opcode |= flags & FLAGS_MASK;
        self
    }

    /// What the result is compared with if [`flags::CHECK_RESULT`] is set; for `CREATE_DELTA` a bit for each result.
    #[must_use]
    pub fn with_expected(self, result: u8) -> Self {
        let place = if self.opcode() == Some(Opcode::CreateDelta) {
            specific::DELTA_EXPECTED_MASK
        } else {
            specific::EXPECTED_RESULT
        };
        self.with_flags(flags::CHECK_RESULT)
            .with_specific(place, [result])
    }

    /// What is left of it after `done` bytes, as a page fault reports them: `None` if nothing is, or for operations that
    /// cannot go on so. `value` is the record's ([`CompletionRecord::value`](crate::CompletionRecord::value)): the CRC so
    /// far is the seed of the rest. `backwards`: a copy between overlapping buffers began at their ends.
    #[must_use]
    pub fn rest(mut self, done: u32, value: u32, backwards: bool) -> Option<Self> {
        let size = self.size.checked_sub(done).filter(|left| *left > 0)?;
        let forward = |address: u64| address.wrapping_add(u64::from(done));
        match self.opcode()? {
            Opcode::Memmove if backwards => {}
            Opcode::Memmove | Opcode::Compare => {
                (self.source, self.destination) = (forward(self.source), forward(self.destination));
            }
            Opcode::Dualcast => {
                let second = forward(self.destination_2()).to_le_bytes();
                (self.source, self.destination) = (forward(self.source), forward(self.destination));
                self = self.with_specific(specific::DESTINATION_2, second);
            }
            Opcode::ComparePattern => {
                self.source = forward(self.source);
                self.destination = turned(self.destination, done);
            }
            Opcode::Fill => {
                self.source = turned(self.source, done);
                self.destination = forward(self.destination);
            }
            Opcode::CacheFlush => self.destination = forward(self.destination),
            Opcode::TranslationFetch => self.source = forward(self.source),
            opcode @ (Opcode::CrcGenerate | Opcode::CopyCrc) => {
                self.source = forward(self.source);
                if opcode == Opcode::CopyCrc {
                    self.destination = forward(self.destination);
                }
                self.flags_and_opcode &= !flags::READ_CRC_SEED;
                self = self.with_specific(specific::CRC_SEED, value.to_le_bytes());
            }
            Opcode::IntegrityCheck
            | Opcode::IntegrityInsert
            | Opcode::IntegrityStrip
            | Opcode::IntegrityUpdate => {
                let blocks = done / self.source_block();
                let written = u64::from(blocks) * u64::from(self.destination_block());
                self = self.with_integrity(self.integrity_after(blocks));
                self.source = forward(self.source);
                self.destination = self.destination.wrapping_add(written);
            }
            _ => return None,
        }
        self.size = size;
        Some(self)
    }

    fn with_integrity(self, integrity: Integrity) -> Self {
        let flags = [
            integrity.source_flags,
            integrity.destination_flags,
            integrity.flags,
        ];
        self.with_specific(specific::INTEGRITY_FLAGS, flags)
            .with_specific(specific::SOURCE_TAGS, integrity.source.to_bytes())
            .with_specific(specific::DESTINATION_TAGS, integrity.destination.to_bytes())
    }

    #[inline]
    fn with_specific<const N: usize>(mut self, at: usize, bytes: [u8; N]) -> Self {
        self.specific[at..at + N].copy_from_slice(&bytes);
        self
    }
}

/// Reading descriptors, such as the device does: they may be anything.
impl Descriptor {
    /// From its bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 64]) -> Self {
        zerocopy::transmute!(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 64] {
        zerocopy::transmute!(self)
    }

    /// The [`flags`].
    #[must_use]
    pub fn flags(&self) -> u32 {
        self.flags_and_opcode & FLAGS_MASK
    }

    /// Whether it has all of these flags.
    #[must_use]
    pub fn has(&self, flags: u32) -> bool {
        self.flags() & flags == flags
    }

    /// The opcode's number.
    #[must_use]
    pub fn opcode_code(&self) -> u8 {
        let [.., code] = self.flags_and_opcode.to_le_bytes();
        code
    }

    /// The operation, if it is one of those known here.
    #[inline]
    #[must_use]
    pub fn opcode(&self) -> Option<Opcode> {
        Opcode::from_code(self.opcode_code())
    }

    /// The address space that ENQCMD has put in.
    #[must_use]
    pub fn pasid(&self) -> Pasid {
        Pasid::from_low_bits(self.pasid_and_privilege)
    }

    /// Whether it claims to be of the kernel.
    #[must_use]
    pub fn is_privileged(&self) -> bool {
        self.pasid_and_privilege & PRIVILEGED != 0
    }

    /// The address of the record.
    #[must_use]
    pub fn completion(&self) -> DeviceAddress {
        DeviceAddress(self.completion)
    }

    /// The source, the pattern of `FILL`, or the list of `BATCH`.
    #[must_use]
    pub fn source(&self) -> u64 {
        self.source
    }

    /// The destination, the second source, or the pattern to compare with.
    #[must_use]
    pub fn destination(&self) -> u64 {
        self.destination
    }

    /// Bytes, or members of a batch.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Which interrupt it asks for.
    #[must_use]
    pub fn interrupt_handle(&self) -> u16 {
        self.interrupt_handle
    }

    /// The expected result of `COMPARE` and `COMPARE_PATTERN`; of `CREATE_DELTA` a bit for each result.
    #[must_use]
    pub fn expected(&self) -> u8 {
        let place = if self.opcode() == Some(Opcode::CreateDelta) {
            specific::DELTA_EXPECTED_MASK
        } else {
            specific::EXPECTED_RESULT
        };
        self.specific[place]
    }

    /// Where `CREATE_DELTA` puts its record.
    #[must_use]
    pub fn delta_space(&self) -> DeltaSpace {
        DeltaSpace {
            address: DeviceAddress(u64::from_le_bytes(self.specific_bytes(specific::DELTA_ADDRESS))),
            max_bytes: u32::from_le_bytes(self.specific_bytes(specific::DELTA_MAX_BYTES)),
        }
    }

    /// Bytes of the record that `APPLY_DELTA` reads.
    #[must_use]
    pub fn delta_bytes(&self) -> u32 {
        u32::from_le_bytes(self.specific_bytes(specific::DELTA_BYTES))
    }

    /// Bytes that the operation reads, or writes where it does not read: what it moves on the way to memory.
    #[inline]
    #[must_use]
    pub fn traffic(&self) -> u64 {
        let size = u64::from(self.size());
        match self.opcode() {
            Some(Opcode::Compare | Opcode::CreateDelta) => size * 2,
            Some(Opcode::ApplyDelta) => u64::from(self.delta_bytes()) * 2,
            Some(
                Opcode::Memmove
                | Opcode::Fill
                | Opcode::ComparePattern
                | Opcode::Dualcast
                | Opcode::CrcGenerate
                | Opcode::CopyCrc
                | Opcode::IntegrityCheck
                | Opcode::IntegrityInsert
                | Opcode::IntegrityStrip
                | Opcode::IntegrityUpdate
                | Opcode::CacheFlush,
            ) => size,
            Some(Opcode::Nop | Opcode::Drain | Opcode::Batch | Opcode::TranslationFetch) | None => 0,
        }
    }

    /// The second destination of `DUALCAST`.
    #[must_use]
    pub fn destination_2(&self) -> u64 {
        u64::from_le_bytes(self.specific_bytes(specific::DESTINATION_2))
    }

    /// The seed of a CRC.
    #[must_use]
    pub fn crc_seed(&self) -> u32 {
        u32::from_le_bytes(self.specific_bytes(specific::CRC_SEED))
    }

    /// Where the seed is, with [`flags::READ_CRC_SEED`].
    #[must_use]
    pub fn crc_seed_address(&self) -> DeviceAddress {
        DeviceAddress(u64::from_le_bytes(
            self.specific_bytes(specific::CRC_SEED_ADDRESS),
        ))
    }

    /// Bytes from one page to the next that `TRANSLATION_FETCH` is to look at.
    #[must_use]
    pub fn stride(&self) -> u32 {
        u32::from_le_bytes(self.specific_bytes(specific::STRIDE))
    }

    /// How blocks' fields are checked and made.
    #[must_use]
    pub fn integrity(&self) -> Integrity {
        let [source_flags, destination_flags, flags] = self.specific_bytes(specific::INTEGRITY_FLAGS);
        Integrity {
            source_flags,
            destination_flags,
            flags,
            source: Tags::from_bytes(self.specific_bytes(specific::SOURCE_TAGS)),
            destination: Tags::from_bytes(self.specific_bytes(specific::DESTINATION_TAGS)),
        }
    }

    /// The same from the block so many further on; what the operation does not look at is zero.
    #[must_use]
    pub fn integrity_after(&self, blocks: u32) -> Integrity {
        let after = self.integrity().after(blocks);
        match self.opcode() {
            Some(Opcode::IntegrityInsert) => Integrity {
                source_flags: 0,
                source: Tags::default(),
                ..after
            },
            Some(Opcode::IntegrityCheck | Opcode::IntegrityStrip) => Integrity {
                destination_flags: 0,
                destination: Tags::default(),
                ..after
            },
            _ => after,
        }
    }

    /// Bytes of a block in the source, with its field if it has one there.
    #[must_use]
    pub fn source_block(&self) -> u32 {
        let has_field = self.opcode() != Some(Opcode::IntegrityInsert);
        self.integrity().block() + if has_field { INTEGRITY_FIELD } else { 0 }
    }

    /// Bytes of a block in the destination, with its field if it gets one; 0 if none is written.
    #[must_use]
    pub fn destination_block(&self) -> u32 {
        match self.opcode() {
            Some(Opcode::IntegrityInsert | Opcode::IntegrityUpdate) => {
                self.integrity().block() + INTEGRITY_FIELD
            }
            Some(Opcode::IntegrityStrip) => self.integrity().block(),
            _ => 0,
        }
    }

    /// Whether a field is not zero that every operation reserves.
    #[must_use]
    pub fn has_reserved_bits(&self) -> bool {
        let pasid_bits = (1 << Pasid::BITS) - 1;
        self.reserved != 0 || self.pasid_and_privilege & !(PRIVILEGED | pasid_bits) != 0
    }

    fn specific_bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|byte| self.specific[at + byte])
    }
}

/// A pattern that goes on where `done` bytes of it end.
fn turned(pattern: u64, done: u32) -> u64 {
    pattern.rotate_right(done % 8 * 8)
}

fn not_empty(size: u32) -> Result<u32, Error> {
    if size == 0 { Err(Error::Empty) } else { Ok(size) }
}

fn delta_operands(addresses: &[(&'static str, u64)], size: u32) -> Result<(), Error> {
    let operands = addresses.iter().copied().chain([("size", u64::from(size))]);
    if let Some((field, value)) = { operands }.find(|(_, value)| !value.is_multiple_of(8)) {
        return Err(Error::Unaligned { field, value });
    }
    if size > MAX_DELTA_SOURCE {
        return Err(Error::DeltaTooLong(size));
    }
    not_empty(size).map(drop)
}

#[cfg(test)]
mod tests;
