//! The operations: what a descriptor does to memory, and what its record says of it.
//!
//! They go forward in pieces that no page's end divides, so each piece is there as a whole or not at all, and what is
//! reported as done is exact. (A device may report less than it did; software goes on from there all the same.)

use crate::blocks::blocks;
use crate::dice::Dice;
use crate::lens::{Lens, PAGE_BYTES, done, in_page, length, piece, stopped};
use vmm_dedup_dsa_abi::{
    CompletionRecord, DELTA_DIFFERS, DELTA_ENTRY, DELTA_EQUAL, DELTA_TOO_BIG, Descriptor, DeviceAddress,
    Fault, Opcode, Status, flags,
};

const WORD: u32 = 8;

/// Does a checked descriptor, and says what its record is to be. Batches and drains are not done here.
pub(crate) fn operate(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let record = match descriptor.opcode() {
        Some(Opcode::Memmove) => memmove(descriptor, lens),
        Some(Opcode::Fill) => fill(descriptor, lens),
        Some(Opcode::Compare) => compare(descriptor, lens),
        Some(Opcode::ComparePattern) => compare_pattern(descriptor, lens),
        Some(Opcode::CreateDelta) => create_delta(descriptor, lens),
        Some(Opcode::ApplyDelta) => apply_delta(descriptor, lens),
        Some(Opcode::Dualcast) => dualcast(descriptor, lens),
        Some(Opcode::CrcGenerate) => crc(descriptor, lens, false),
        Some(Opcode::CopyCrc) => crc(descriptor, lens, true),
        Some(
            Opcode::IntegrityCheck
            | Opcode::IntegrityInsert
            | Opcode::IntegrityStrip
            | Opcode::IntegrityUpdate,
        ) => blocks(descriptor, lens),
        Some(Opcode::CacheFlush) => visit(descriptor.destination(), descriptor.size(), lens),
        Some(Opcode::TranslationFetch) => visit(descriptor.source(), descriptor.size(), lens),
        Some(Opcode::Nop | Opcode::Drain | Opcode::Batch) | None => done(0, 0),
    };
    predicate(descriptor, read_back(descriptor, record, lens.dice))
}

/// Reads back what was written, if that is asked for. It always works, but for what the dice say.
fn read_back(descriptor: &Descriptor, record: CompletionRecord, dice: &mut Dice) -> CompletionRecord {
    if record.status() != Some(Ok(Status::Success)) || !descriptor.has(flags::DESTINATION_READBACK) {
        return record;
    }
    if dice.happens(dice.faults.readback_hardware) {
        return record.with_status(Status::ReadbackHardware);
    }
    if dice.happens(dice.faults.readback_faults) {
        let fault = Fault {
            address: DeviceAddress(descriptor.destination()),
            write: false,
            completed: record.completed,
        };
        return record.with_fault(Status::ReadbackFault, fault);
    }
    record
}

/// Compares the result with the expected one, if that is asked for.
fn predicate(descriptor: &Descriptor, record: CompletionRecord) -> CompletionRecord {
    if record.status() != Some(Ok(Status::Success)) || !descriptor.has(flags::CHECK_RESULT) {
        return record;
    }
    let expected = match descriptor.opcode() {
        // A bit for each of the three results.
        Some(Opcode::CreateDelta) => descriptor.expected() >> record.result & 1 != 0,
        _ => descriptor.expected() & 1 == record.result,
    };
    if expected {
        record
    } else {
        record.with_status(Status::FalsePredicate)
    }
}

fn memmove(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let (source, destination, size) = (descriptor.source(), descriptor.destination(), descriptor.size());
    // Between buffers that overlap so that the first bytes written would be the last ones read, it begins at the ends.
    let backwards = destination > source && destination - source < u64::from(size);
    let mut buffer = [0; PAGE_BYTES];
    let mut completed = 0;
    while completed < size {
        let left = size - completed;
        let (from, to, len) = if backwards {
            let ends = [source + u64::from(left), destination + u64::from(left)];
            let before = ends.map(|end| in_page(end - 1) + 1);
            let len = before[0].min(before[1]).min(left as usize);
            (ends[0] - len as u64, ends[1] - len as u64, len)
        } else {
            let at = [source + u64::from(completed), destination + u64::from(completed)];
            (at[0], at[1], piece(left, &at))
        };
        let moved = lens
            .read(from, &mut buffer[..len])
            .and_then(|()| lens.write(to, &buffer[..len]));
        if let Err(stop) = moved {
            // The result tells that what is left lies before what is done.
            return stopped(stop, lens.blocks, completed).with_result(u8::from(backwards), completed);
        }
        completed += length(len);
    }
    done(0, size)
}

fn fill(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let pattern = descriptor.source().to_le_bytes();
    let (destination, size) = (descriptor.destination(), descriptor.size());
    let mut completed = 0;
    while completed < size {
        let at = destination + u64::from(completed);
        let len = piece(size - completed, &[at]);
        let mut buffer = [0; PAGE_BYTES];
        let bytes = pattern.iter().cycle().skip(completed as usize % 8);
        buffer[..len]
            .iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        if let Err(stop) = lens.write(at, &buffer[..len]) {
            return stopped(stop, lens.blocks, completed);
        }
        completed += length(len);
    }
    done(0, size)
}

fn compare(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let (a, b, size) = (descriptor.source(), descriptor.destination(), descriptor.size());
    let (mut left, mut right) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    let mut completed = 0;
    while completed < size {
        let at = [a, b].map(|start| start + u64::from(completed));
        let len = piece(size - completed, &at);
        let read = lens
            .read(at[0], &mut left[..len])
            .and_then(|()| lens.read(at[1], &mut right[..len]));
        if let Err(stop) = read {
            return stopped(stop, lens.blocks, completed);
        }
        if left[..len] != right[..len] {
            let first = left.iter().zip(&right).position(|(a, b)| a != b);
            return done(1, completed + length(first.unwrap_or(0)));
        }
        completed += length(len);
    }
    done(0, size)
}

fn compare_pattern(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let pattern = descriptor.destination().to_le_bytes();
    let (source, size) = (descriptor.source(), descriptor.size());
    let mut buffer = [0; PAGE_BYTES];
    let mut completed = 0;
    while completed < size {
        let at = source + u64::from(completed);
        let len = piece(size - completed, &[at]);
        if let Err(stop) = lens.read(at, &mut buffer[..len]) {
            return stopped(stop, lens.blocks, completed);
        }
        let expected = pattern.iter().cycle().skip(completed as usize % 8);
        if let Some(first) = buffer[..len].iter().zip(expected).position(|(a, b)| a != b) {
            return done(1, completed + length(first));
        }
        completed += length(len);
    }
    done(0, size)
}

fn create_delta(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let (a, b, size) = (descriptor.source(), descriptor.destination(), descriptor.size());
    let space = descriptor.delta_space();
    let (mut left, mut right) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    let (mut completed, mut noted) = (0, 0);
    while completed < size {
        let at = [a, b].map(|start| start + u64::from(completed));
        let len = piece(size - completed, &at);
        let read = lens
            .read(at[0], &mut left[..len])
            .and_then(|()| lens.read(at[1], &mut right[..len]));
        if let Err(stop) = read {
            return stopped(stop, lens.blocks, completed).with_value(noted);
        }
        for (old, new) in left[..len].chunks_exact(8).zip(right[..len].chunks_exact(8)) {
            if old != new {
                if noted + DELTA_ENTRY > space.max_bytes {
                    return done(DELTA_TOO_BIG, completed).with_value(noted);
                }
                let mut entry = [0; DELTA_ENTRY as usize];
                #[allow(clippy::cast_possible_truncation)] // below 2^16, since sizes are at most 512 KiB
                let index = (completed / WORD) as u16;
                entry[..2].copy_from_slice(&index.to_le_bytes());
                entry[2..].copy_from_slice(new);
                if let Err(stop) = lens.write_across(space.address.0 + u64::from(noted), &entry) {
                    return stopped(stop, lens.blocks, completed).with_value(noted);
                }
                noted += DELTA_ENTRY;
            }
            completed += WORD;
        }
    }
    let result = if noted == 0 { DELTA_EQUAL } else { DELTA_DIFFERS };
    done(result, size).with_value(noted)
}

fn apply_delta(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let (record, destination) = (descriptor.source(), descriptor.destination());
    let (size, bytes) = (descriptor.size(), descriptor.delta_bytes());
    let mut completed = 0;
    let mut last: Option<u16> = None;
    while completed < bytes {
        let entry: [u8; DELTA_ENTRY as usize] = match lens.read_across(record + u64::from(completed)) {
            Ok(entry) => entry,
            Err(stop) => return stopped(stop, lens.blocks, completed),
        };
        let [low, high, word @ ..] = entry;
        let index = u16::from_le_bytes([low, high]);
        let failed = |status| CompletionRecord::new(status).with_result(0, completed);
        if last.is_some_and(|last| last >= index) {
            return failed(Status::DeltaOrder);
        }
        let offset = u32::from(index) * WORD;
        if offset >= size {
            return failed(Status::DeltaRange);
        }
        // Words do not cross pages: the destination is aligned to them.
        if let Err(stop) = lens.write(destination + u64::from(offset), &word) {
            return stopped(stop, lens.blocks, completed);
        }
        last = Some(index);
        completed += DELTA_ENTRY;
    }
    done(0, completed)
}

fn dualcast(descriptor: &Descriptor, lens: &mut Lens<'_>) -> CompletionRecord {
    let (source, size) = (descriptor.source(), descriptor.size());
    let destinations = [descriptor.destination(), descriptor.destination_2()];
    let mut buffer = [0; PAGE_BYTES];
    let mut completed = 0;
    while completed < size {
        let from = source + u64::from(completed);
        let to = destinations.map(|start| start + u64::from(completed));
        let len = piece(size - completed, &[from, to[0], to[1]]);
        // Both or neither are written.
        let cast = lens
            .read(from, &mut buffer[..len])
            .and_then(|()| lens.look(to[0], true))
            .and_then(|()| lens.look(to[1], true))
            .and_then(|()| lens.write(to[0], &buffer[..len]))
            .and_then(|()| lens.write(to[1], &buffer[..len]));
        if let Err(stop) = cast {
            return stopped(stop, lens.blocks, completed);
        }
        completed += length(len);
    }
    done(0, size)
}

/// A CRC, with a copy or without. Inside, it is that of reflected bits without inversion.
fn crc(descriptor: &Descriptor, lens: &mut Lens<'_>, copy: bool) -> CompletionRecord {
    let plain = descriptor.has(flags::BYPASS_CRC_INVERSION);
    let turn = descriptor.has(flags::BYPASS_DATA_REFLECTION);
    let seed = if descriptor.has(flags::READ_CRC_SEED) {
        match lens.read_across(descriptor.crc_seed_address().0) {
            Ok(bytes) => u32::from_le_bytes(bytes),
            Err(stop) => return stopped(stop, lens.blocks, 0),
        }
    } else {
        descriptor.crc_seed()
    };
    let shown = |state: u32| if plain { state.reverse_bits() } else { !state };
    let mut state = if plain { seed.reverse_bits() } else { !seed };
    let mut buffer = [0; PAGE_BYTES];
    let (mut completed, size) = (0, descriptor.size());
    while completed < size {
        let from = descriptor.source() + u64::from(completed);
        let to = descriptor.destination().wrapping_add(completed.into());
        let len = if copy {
            piece(size - completed, &[from, to])
        } else {
            piece(size - completed, &[from])
        };
        let read = lens.read(from, &mut buffer[..len]).and_then(|()| {
            if copy {
                lens.write(to, &buffer[..len])
            } else {
                Ok(())
            }
        });
        if let Err(stop) = read {
            return stopped(stop, lens.blocks, completed).with_value(shown(state));
        }
        if turn {
            buffer[..len]
                .iter_mut()
                .for_each(|byte| *byte = byte.reverse_bits());
        }
        state = !crc32c::crc32c_append(!state, &buffer[..len]);
        completed += length(len);
    }
    done(0, size).with_value(shown(state))
}

/// Looks at pages: what cache flushes and translation fetches come to here.
fn visit(address: u64, size: u32, lens: &mut Lens<'_>) -> CompletionRecord {
    let mut completed = 0;
    while completed < size {
        let at = address + u64::from(completed);
        if let Err(stop) = lens.look(at, false) {
            return stopped(stop, lens.blocks, completed);
        }
        completed += length(piece(size - completed, &[at]));
    }
    done(0, size)
}
