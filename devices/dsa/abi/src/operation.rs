//! Operations and their flags.

/// Operations (uapi/linux/idxd.h, `enum dsa_opcode`; 0x0a: idxd-config, accfg/idxd.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// Does nothing.
    Nop = 0x00,
    /// Runs a list of descriptors.
    Batch = 0x01,
    /// Waits for earlier ones.
    Drain = 0x02,
    /// Copies; the buffers may overlap.
    Memmove = 0x03,
    /// Fills with a pattern of 8 bytes.
    Fill = 0x04,
    /// Compares two buffers.
    Compare = 0x05,
    /// Compares a buffer with a pattern of 8 bytes, such as zero.
    ComparePattern = 0x06,
    /// Notes the words in which two buffers differ.
    CreateDelta = 0x07,
    /// Applies such notes.
    ApplyDelta = 0x08,
    /// Copies to two places.
    Dualcast = 0x09,
    /// Brings translations of addresses into the device's cache.
    TranslationFetch = 0x0a,
    /// Makes a CRC32C.
    CrcGenerate = 0x10,
    /// Copies, and makes a CRC32C.
    CopyCrc = 0x11,
    /// Checks blocks with [data integrity fields](crate::Integrity).
    IntegrityCheck = 0x12,
    /// Copies blocks, and adds fields.
    IntegrityInsert = 0x13,
    /// Checks blocks, and copies them without their fields.
    IntegrityStrip = 0x14,
    /// Checks blocks, and copies them with other fields.
    IntegrityUpdate = 0x15,
    /// Writes lines of the CPU's caches back.
    CacheFlush = 0x20,
}

impl Opcode {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::Nop,
        Self::Batch,
        Self::Drain,
        Self::Memmove,
        Self::Fill,
        Self::Compare,
        Self::ComparePattern,
        Self::CreateDelta,
        Self::ApplyDelta,
        Self::Dualcast,
        Self::TranslationFetch,
        Self::CrcGenerate,
        Self::CopyCrc,
        Self::IntegrityCheck,
        Self::IntegrityInsert,
        Self::IntegrityStrip,
        Self::IntegrityUpdate,
        Self::CacheFlush,
    ];

    /// The operation of this number, if it is one of those above.
    #[inline]
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        BY_CODE[usize::from(code)]
    }

    /// The operation's bit in words of 64, as OPCAP and the work queues' tables have them: word and bit.
    #[must_use]
    pub const fn capability(self) -> (usize, u32) {
        let code = self as u8;
        ((code / 64) as usize, (code % 64) as u32)
    }

    /// The [`flags`] that it takes; others must be zero (DML, flags.hpp).
    #[must_use]
    pub const fn allowed_flags(self) -> u32 {
        use flags::{
            ADDRESS_1_CLASS as A1, ADDRESS_2_CLASS as A2, ADDRESS_3_CLASS as A3, BLOCK_ON_FAULT as BOF,
            BYPASS_CRC_INVERSION, BYPASS_DATA_REFLECTION, CACHE_CONTROL as CC, CHECK_RESULT as CR,
            COMPLETION, DESTINATION_READBACK as DR, FENCE, READ_CRC_SEED, STEERING as ST, STRICT_ORDER as SO,
        };
        const WRITES: u32 = CC | SO | DR | ST;
        const CRC: u32 = READ_CRC_SEED | BYPASS_CRC_INVERSION | BYPASS_DATA_REFLECTION;
        COMPLETION
            | match self {
                Self::Nop => FENCE,
                Self::Batch => A1,
                Self::Drain => A1 | A2,
                Self::Memmove
                | Self::ApplyDelta
                | Self::IntegrityInsert
                | Self::IntegrityStrip
                | Self::IntegrityUpdate => FENCE | BOF | A1 | A2 | WRITES,
                Self::Fill | Self::CacheFlush => FENCE | BOF | A2 | WRITES,
                Self::Compare => FENCE | BOF | CR | A1 | A2,
                Self::ComparePattern => FENCE | BOF | CR | A1,
                Self::CreateDelta => FENCE | BOF | CR | A1 | A2 | A3 | WRITES,
                Self::Dualcast => FENCE | BOF | A1 | A2 | A3 | WRITES,
                Self::TranslationFetch | Self::IntegrityCheck => FENCE | BOF | A1,
                Self::CrcGenerate => FENCE | BOF | A1 | A3 | CRC,
                Self::CopyCrc => FENCE | BOF | A1 | A2 | A3 | WRITES | CRC,
            }
    }
}

static BY_CODE: [Option<Opcode>; 256] = {
    let mut by_code = [None; 256];
    let mut at = 0;
    while at < Opcode::ALL.len() {
        by_code[Opcode::ALL[at] as usize] = Some(Opcode::ALL[at]);
        at += 1;
    }
    by_code
};

/// Bits of a descriptor's flags (uapi/linux/idxd.h, `IDXD_OP_FLAG_*`; those of CRC operations: idxd-config, test/dsa.c).
pub mod flags {
    /// Start only when earlier members of the batch are done, and not at all if one of them has failed.
    pub const FENCE: u32 = 0x01;
    /// Wait for page faults to be served instead of ending.
    pub const BLOCK_ON_FAULT: u32 = 0x02;
    /// The completion address is valid.
    pub const COMPLETION_ADDRESS_VALID: u32 = 0x04;
    /// Write a completion record, also on success.
    pub const REQUEST_COMPLETION: u32 = 0x08;
    /// Raise an interrupt.
    pub const REQUEST_INTERRUPT: u32 = 0x10;
    /// Which steering tag the record's write has.
    pub const COMPLETION_STEERING: u32 = 0x20;
    /// Compare the result with the expected one; a difference is [`crate::Status::FalsePredicate`].
    pub const CHECK_RESULT: u32 = 0x80;
    /// Leave what was written in the cache.
    pub const CACHE_CONTROL: u32 = 0x100;
    /// Traffic class of the first operand.
    pub const ADDRESS_1_CLASS: u32 = 0x200;
    /// Traffic class of the second operand.
    pub const ADDRESS_2_CLASS: u32 = 0x400;
    /// Traffic class of the third operand.
    pub const ADDRESS_3_CLASS: u32 = 0x800;
    /// Traffic class of the record.
    pub const COMPLETION_CLASS: u32 = 0x1000;
    /// Write in order.
    pub const STRICT_ORDER: u32 = 0x2000;
    /// Read back what was written before completing.
    pub const DESTINATION_READBACK: u32 = 0x4000;
    /// Which steering tag writes have.
    pub const STEERING: u32 = 0x8000;
    /// Take the seed from memory.
    pub const READ_CRC_SEED: u32 = 0x1_0000;
    /// Neither invert nor reflect seed and result.
    pub const BYPASS_CRC_INVERSION: u32 = 0x2_0000;
    /// Do not reflect the data's bytes.
    pub const BYPASS_DATA_REFLECTION: u32 = 0x4_0000;

    /// Those of the record and of the interrupt, which every operation takes.
    pub const COMPLETION: u32 = COMPLETION_ADDRESS_VALID
        | REQUEST_COMPLETION
        | REQUEST_INTERRUPT
        | COMPLETION_STEERING
        | COMPLETION_CLASS;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_name_operations_and_nothing_else() {
        let known: Vec<u8> = (0..=u8::MAX)
            .filter(|code| Opcode::from_code(*code).is_some())
            .collect();
        let codes = Opcode::ALL.map(|opcode| opcode as u8);
        assert_eq!(known, codes);
    }

    #[test]
    fn capabilities_are_bits_of_words() {
        assert_eq!(Opcode::CacheFlush.capability(), (0, 0x20));
        assert_eq!(Opcode::Nop.capability(), (0, 0));
    }

    #[test]
    fn a_batch_takes_neither_fence_nor_block_on_fault() {
        let taken = Opcode::Batch.allowed_flags() & (flags::FENCE | flags::BLOCK_ON_FAULT);
        assert_eq!(taken, 0);
    }
}
