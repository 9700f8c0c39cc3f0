//! Operations on blocks with data integrity fields. A block is done as a whole or not at all.

use crate::lens::{Lens, Stop, done, piece, stopped};
use vmm_dedup_dsa_abi::{
    CompletionRecord, Descriptor, INTEGRITY_FIELD, Integrity, Opcode, Status, destination_flags, guard_flags,
    mismatch, source_flags,
};

/// Largest block with its field.
const MOST: usize = 4104 + FIELD;
const FIELD: usize = INTEGRITY_FIELD as usize;

/// Checks blocks, or makes their fields, or both.
pub(crate) fn blocks(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let (from, to) = (descriptor.source_block(), descriptor.destination_block());
    let mut bytes = [0; MOST];
    for block in 0..descriptor.size() / from {
        let now = descriptor.integrity_after(block);
        let completed = block * from;
        let source = descriptor.source() + u64::from(completed);
        if let Err(stop) = read(lens, source, &mut bytes[..from as usize]) {
            return stopped(stop, lens.blocks, completed).with_tags(&now);
        }
        let (data, field) = bytes.split_at_mut(now.block() as usize);
        if descriptor.opcode() != Some(Opcode::IntegrityInsert) {
            let wrong = wrong_with(data, &field[..FIELD], &now);
            if wrong != 0 {
                return CompletionRecord::new(Status::IntegrityField)
                    .with_result(wrong, completed)
                    .with_tags(&now);
            }
        }
        if to > now.block() {
            make(data, &mut field[..FIELD], &now, descriptor.opcode());
        }
        let destination = descriptor.destination() + u64::from(block) * u64::from(to);
        if let Err(stop) = write(lens, destination, &bytes[..to as usize]) {
            return stopped(stop, lens.blocks, completed).with_tags(&now);
        }
    }
    let next = descriptor.integrity_after(descriptor.size() / from);
    done(0, descriptor.size()).with_tags(&next)
}

/// CRC-16 with T10's polynomial, as a field has it.
fn guard(data: &[u8], flags: u8) -> u16 {
    const POLYNOMIAL: u16 = 0x8bb7;
    const TABLE: [u16; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            #[allow(clippy::cast_possible_truncation)] // below 256
            let mut crc = (byte as u16) << 8;
            let mut bit = 0;
            while bit < 8 {
                let carry = crc & 0x8000 != 0;
                crc = crc << 1 ^ if carry { POLYNOMIAL } else { 0 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    let seed = if flags & guard_flags::INVERT_SEED != 0 {
        u16::MAX
    } else {
        0
    };
    let crc = data.iter().fold(seed, |crc: u16, byte| {
        let [high, _] = crc.to_be_bytes();
        crc << 8 ^ TABLE[usize::from(high ^ byte)]
    });
    if flags & guard_flags::INVERT_RESULT != 0 {
        !crc
    } else {
        crc
    }
}

/// A field's guard, application tag and reference tag.
fn parts(field: &[u8]) -> (u16, u16, u32) {
    let byte = |at: usize| field.get(at).copied().unwrap_or(0);
    (
        u16::from_be_bytes([byte(0), byte(1)]),
        u16::from_be_bytes([byte(2), byte(3)]),
        u32::from_be_bytes([byte(4), byte(5), byte(6), byte(7)]),
    )
}

/// What is wrong with a block, by [`mismatch`].
fn wrong_with(data: &[u8], field: &[u8], integrity: &Integrity) -> u8 {
    let has = |flag: u8| integrity.source_flags & flag != 0;
    let (crc, application, reference) = parts(field);
    let all_f = [application, crc] == [u16::MAX; 2] && reference == u32::MAX;
    if all_f && has(source_flags::ALL_F) {
        return if has(source_flags::ALL_F_IS_ERROR) {
            mismatch::ALL_F
        } else {
            0
        };
    }
    let both = application == u16::MAX && reference == u32::MAX;
    if has(source_flags::APPLICATION_F) && application == u16::MAX || has(source_flags::BOTH_TAGS_F) && both {
        return 0;
    }
    let tags = integrity.source;
    let mut wrong = 0;
    if !has(source_flags::NO_GUARD) && crc != guard(data, integrity.flags) {
        wrong |= mismatch::GUARD;
    }
    if (application ^ tags.application) & !tags.mask != 0 {
        wrong |= mismatch::APPLICATION;
    }
    if !has(source_flags::NO_REFERENCE) && reference != tags.reference {
        wrong |= mismatch::REFERENCE;
    }
    wrong
}

/// Makes a block's field; parts of the one that it has may be taken over by an update.
fn make(data: &[u8], field: &mut [u8], integrity: &Integrity, opcode: Option<Opcode>) {
    let passes =
        |flag: u8| opcode == Some(Opcode::IntegrityUpdate) && integrity.destination_flags & flag != 0;
    let tags = integrity.destination;
    if !passes(destination_flags::PASS_GUARD) {
        field[..2].copy_from_slice(&guard(data, integrity.flags).to_be_bytes());
    }
    if !passes(destination_flags::PASS_APPLICATION) {
        field[2..4].copy_from_slice(&(tags.application & !tags.mask).to_be_bytes());
    }
    if !passes(destination_flags::PASS_REFERENCE) {
        field[4..].copy_from_slice(&tags.reference.to_be_bytes());
    }
}

fn read(lens: &mut Lens<'_>, address: u64, into: &mut [u8]) -> Result<(), Stop> {
    for (at, range) in pieces(address, into.len()) {
        lens.read(at, &mut into[range])?;
    }
    Ok(())
}

/// All pages are looked at before the first is written.
fn write(lens: &mut Lens<'_>, address: u64, from: &[u8]) -> Result<(), Stop> {
    for (at, _) in pieces(address, from.len()) {
        lens.look(at, true)?;
    }
    for (at, range) in pieces(address, from.len()) {
        lens.write(at, &from[range])?;
    }
    Ok(())
}

/// The parts of a buffer, cut at the ends of pages.
fn pieces(address: u64, len: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut begin = 0;
    std::iter::from_fn(move || {
        let at = address + begin as u64;
        let left = u32::try_from(len - begin).unwrap_or(0);
        let range = begin..begin + piece(left, &[at]);
        begin = range.end;
        (left > 0).then_some((at, range))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_is_t10s_crc() {
        // The check value of CRC-16/T10-DIF.
        assert_eq!(guard(b"123456789", 0), 0xd0db);
        let inverted = guard(b"123456789", guard_flags::INVERT_RESULT);
        assert_eq!(inverted, !0xd0db);
    }
}
