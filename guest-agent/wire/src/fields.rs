//! The numbers that messages are made of.

use crate::malformed::Malformed;

/// Reads numbers from the front of a payload.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.take::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_le_bytes)
    }

    pub(crate) fn bool(&mut self, field: &'static str) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Malformed::Field {
                field,
                value: u64::from(other),
            }),
        }
    }

    /// So many bytes that are zero.
    pub(crate) fn zeros<const N: usize>(&mut self) -> Result<(), Malformed> {
        match self.take::<N>()?.iter().find(|byte| **byte != 0) {
            None => Ok(()),
            Some(byte) => Err(Malformed::Field {
                field: "reserved",
                value: u64::from(*byte),
            }),
        }
    }

    pub(crate) fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            let overflows = shift == 63 && bits > 1;
            let is_longer_than_needed = byte == 0 && shift > 0;
            if overflows || is_longer_than_needed {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed::Field {
            field: "varint",
            value,
        })
    }

    pub(crate) fn end(self) -> Result<(), Malformed> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Malformed::Trailing),
        }
    }
}

/// Appends a number in groups of seven bits, the lowest first.
#[allow(clippy::cast_possible_truncation)] // seven bits each
pub(crate) fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
