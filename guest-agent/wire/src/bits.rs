//! Bits in bytes, the lowest first.

use crate::malformed::Malformed;

/// Appends bits to bytes.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    held: u64,
    used: u32,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Self {
        Self {
            out,
            held: 0,
            used: 0,
        }
    }

    /// Appends the lowest `count` bits, at most 32.
    pub(crate) fn put(&mut self, value: u32, count: u32) {
        self.held |= u64::from(value) << self.used;
        self.used += count;
        while self.used >= 8 {
            self.put_byte();
        }
    }

    #[allow(clippy::cast_possible_truncation)] // the lowest byte is meant
    fn put_byte(&mut self) {
        self.out.push(self.held as u8);
        self.held >>= 8;
        self.used = self.used.saturating_sub(8);
    }

    /// So many ones, and a zero.
    pub(crate) fn put_unary(&mut self, ones: u32) {
        (0..ones).for_each(|_| self.put(1, 1));
        self.put(0, 1);
    }

    /// A number above zero, in Elias' gamma code: as many zeros as it has bits behind its first, then its bits, highest first.
    pub(crate) fn put_gamma(&mut self, number: u32) {
        let more = number.ilog2();
        self.put(0, more);
        (0..=more).rev().for_each(|bit| self.put(number >> bit & 1, 1));
    }

    /// Fills the last byte with zeros.
    pub(crate) fn end(mut self) {
        if self.used > 0 {
            self.put_byte();
        }
    }
}

/// Takes bits from bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn bit(&mut self) -> Result<u32, Malformed> {
        let byte = self.bytes.get(self.at / 8).ok_or(Malformed::Short)?;
        let bit = byte >> (self.at % 8) & 1;
        self.at += 1;
        Ok(u32::from(bit))
    }

    /// At most 32 bits.
    pub(crate) fn take(&mut self, count: u32) -> Result<u32, Malformed> {
        (0..count).try_fold(0, |value, at| Ok(value | self.bit()? << at))
    }

    /// How many ones come before a zero; after `most` there is none.
    pub(crate) fn unary(&mut self, most: u32) -> Result<u32, Malformed> {
        let mut ones = 0;
        while ones < most && self.bit()? == 1 {
            ones += 1;
        }
        Ok(ones)
    }

    /// A number of Elias' gamma code with at most `most` bits behind its first.
    pub(crate) fn gamma(&mut self, most: u32) -> Result<u32, Malformed> {
        let mut more = 0;
        while self.bit()? == 0 {
            more += 1;
            if more > most {
                return Err(Malformed::Block);
            }
        }
        (0..more).try_fold(1, |value, _| Ok(value << 1 | self.bit()?))
    }

    /// The bytes that were taken, if all bits of the last one that were not are zero.
    pub(crate) fn end(mut self) -> Result<usize, Malformed> {
        while !self.at.is_multiple_of(8) {
            if self.bit()? != 0 {
                return Err(Malformed::Block);
            }
        }
        Ok(self.at / 8)
    }
}
