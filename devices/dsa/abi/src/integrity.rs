//! Blocks with a data integrity field: 8 bytes behind the block's own, as disks keep them (SCSI's T10 DIF).
//!
//! ```text
//!  block: 512, 520, 4,096 or 4,104 bytes | guard: CRC-16 of them | application tag | reference tag
//!                                          2 bytes                 2                 4, all big-endian
//! ```
//!
//! Places: uapi/linux/idxd.h, `struct dsa_hw_desc`. Flags and what they do: Intel DML, specific_flags.hpp and dml_dif.c; bits
//! of a mask that are set are those that do not count (SPDK, idxd_user and accel_dsa).

/// Bytes of the field behind a block.
pub const INTEGRITY_FIELD: u32 = 8;

/// What [`Integrity::source_flags`] can say.
pub mod source_flags {
    /// With [`ALL_F`]: such a block is an error.
    pub const ALL_F_IS_ERROR: u8 = 0x01;
    /// A block whose field is all ones is not checked.
    pub const ALL_F: u8 = 0x02;
    /// Nor is one whose application tag is.
    pub const APPLICATION_F: u8 = 0x04;
    /// Nor one of which both tags are.
    pub const BOTH_TAGS_F: u8 = 0x08;
    /// The application tag grows by one with each block.
    pub const APPLICATION_GROWS: u8 = 0x10;
    /// The guard is not checked.
    pub const NO_GUARD: u8 = 0x20;
    /// The reference tag is not checked.
    pub const NO_REFERENCE: u8 = 0x40;
    /// The reference tag does not grow by one with each block.
    pub const REFERENCE_STAYS: u8 = 0x80;
}

/// What [`Integrity::destination_flags`] can say.
pub mod destination_flags {
    /// The source's application tag is taken over.
    pub const PASS_APPLICATION: u8 = 0x08;
    /// The application tag grows by one with each block.
    pub const APPLICATION_GROWS: u8 = 0x10;
    /// The source's guard is taken over.
    pub const PASS_GUARD: u8 = 0x20;
    /// The source's reference tag is taken over.
    pub const PASS_REFERENCE: u8 = 0x40;
    /// The reference tag does not grow by one with each block.
    pub const REFERENCE_STAYS: u8 = 0x80;
}

/// What [`Integrity::flags`] can say, besides the block's size in the two lowest bits.
pub mod guard_flags {
    /// A CRC begins with all ones.
    pub const INVERT_SEED: u8 = 0x04;
    /// And is inverted at its end.
    pub const INVERT_RESULT: u8 = 0x08;
}

/// What a check found ([`crate::CompletionRecord::result`] after [`crate::Status::IntegrityField`]).
pub mod mismatch {
    /// The guard is not the block's.
    pub const GUARD: u8 = 0x01;
    /// The application tag is another one.
    pub const APPLICATION: u8 = 0x02;
    /// The reference tag is another one.
    pub const REFERENCE: u8 = 0x04;
    /// The field is all ones, which was to be an error.
    pub const ALL_F: u8 = 0x08;
}

/// Tags of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tags {
    /// The reference tag.
    pub reference: u32,
    /// Bits of the application tag that do not count.
    pub mask: u16,
    /// The application tag.
    pub application: u16,
}

impl Tags {
    /// As descriptors and records have them.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        let [a, b, c, d] = self.reference.to_le_bytes();
        let ([e, f], [g, h]) = (self.mask.to_le_bytes(), self.application.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// From such bytes.
    #[must_use]
    pub fn from_bytes([a, b, c, d, e, f, g, h]: [u8; 8]) -> Self {
        Self {
            reference: u32::from_le_bytes([a, b, c, d]),
            mask: u16::from_le_bytes([e, f]),
            application: u16::from_le_bytes([g, h]),
        }
    }

    /// Those of the block so many further on.
    #[must_use]
    fn after(self, blocks: u32, application_grows: bool, reference_stays: bool) -> Self {
        let [low, high, ..] = blocks.to_le_bytes();
        let grown = u16::from_le_bytes([low, high]);
        let application = if application_grows { grown } else { 0 };
        let reference = if reference_stays { 0 } else { blocks };
        Self {
            reference: self.reference.wrapping_add(reference),
            application: self.application.wrapping_add(application),
            ..self
        }
    }
}

/// How fields are checked and made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Integrity {
    /// [`source_flags`].
    pub source_flags: u8,
    /// [`destination_flags`].
    pub destination_flags: u8,
    /// Size of a block, and [`guard_flags`].
    pub flags: u8,
    /// What the first block's field is to be.
    pub source: Tags,
    /// What it is made.
    pub destination: Tags,
}

impl Integrity {
    const BLOCKS: [u32; 4] = [512, 520, 4096, 4104];

    /// Bytes of a block, without its field.
    #[must_use]
    pub fn block(&self) -> u32 {
        Self::BLOCKS[usize::from(self.flags & 3)]
    }

    /// The same from the block so many further on.
    #[must_use]
    pub fn after(self, blocks: u32) -> Self {
        use {destination_flags as to, source_flags as from};
        let (source, destination) = (self.source_flags, self.destination_flags);
        let has = |flags: u8, flag: u8| flags & flag != 0;
        Self {
            source: self.source.after(
                blocks,
                has(source, from::APPLICATION_GROWS),
                has(source, from::REFERENCE_STAYS),
            ),
            destination: self.destination.after(
                blocks,
                has(destination, to::APPLICATION_GROWS),
                has(destination, to::REFERENCE_STAYS),
            ),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_grow_or_stay_from_block_to_block() {
        let tags = Tags {
            reference: u32::MAX,
            mask: 0xff,
            application: 7,
        };
        let integrity = Integrity {
            source_flags: source_flags::APPLICATION_GROWS,
            destination_flags: destination_flags::REFERENCE_STAYS,
            flags: 3,
            source: tags,
            destination: tags,
        };
        let later = integrity.after(3);
        assert_eq!((later.source.reference, later.source.application), (2, 10));
        assert_eq!(later.destination, tags);
        assert_eq!(later.block(), 4104);
        assert_eq!(Tags::from_bytes(tags.to_bytes()), tags);
    }
}
