//! The oracle: what the documentation of descriptors says, one byte after the other. It shares no code with the model but
//! the places of fields.

use super::{BASE, BATCH_SHIFT, PAGES, TRANSFER_SHIFT};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup_dsa_abi::{Descriptor, Opcode, flags};

const BYTES: usize = PAGES * 4096;
const VECTORS: u16 = 9;

/// What else a descriptor does.
#[derive(Debug, Default)]
pub(crate) struct Expected {
    pub(crate) interrupts: Vec<u16>,
    pub(crate) errors: Vec<u8>,
}

/// What a record says.
#[derive(Clone, Copy, Debug, Default)]
struct Says {
    status: u8,
    result: u8,
    completed: u32,
    address: u64,
    value: u32,
    /// What follows.
    more: [u32; 3],
}

/// Words by their places.
type Words = Vec<(usize, u64)>;

/// A byte that cannot be accessed.
struct Gone {
    address: u64,
    write: bool,
}

pub(crate) struct Oracle {
    bytes: Vec<u8>,
    rights: [u64; PAGES],
    block_on_fault: bool,
    /// The descriptor at hand waits for pages.
    blocks: bool,
    of_byte: Vec<u16>,
    /// Operations and how they ended, of all so far.
    pub(crate) seen: BTreeSet<(u8, u8)>,
}

impl Oracle {
    pub(crate) fn new(block_on_fault: bool) -> Self {
        Self {
            bytes: vec![0; BYTES],
            rights: [3; PAGES],
            block_on_fault,
            blocks: false,
            of_byte: of_byte(),
            seen: BTreeSet::new(),
        }
    }

    pub(crate) fn fill_page(&mut self, page: usize, content: &[u8; 4096]) {
        self.rights[page] = 3;
        self.bytes[page * 4096..(page + 1) * 4096].copy_from_slice(content);
    }

    pub(crate) fn set_rights(&mut self, page: usize, rights: u64) {
        self.rights[page] = rights;
    }

    pub(crate) fn rights(&self, page: usize) -> u64 {
        self.rights[page]
    }

    pub(crate) fn poke(&mut self, address: u64, bytes: &[u8]) {
        let at = usize::try_from(address - BASE).unwrap();
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The first page that is not as it should be.
    pub(crate) fn differs(&self, words: &[AtomicU64]) -> Option<usize> {
        let should = self.bytes.chunks_exact(8);
        let same = |(word, bytes): (&AtomicU64, &[u8])| word.load(Ordering::Relaxed).to_le_bytes() == *bytes;
        words
            .iter()
            .zip(should)
            .position(|pair| !same(pair))
            .map(|word| word / 512)
    }

    /// The words of a page that differ.
    pub(crate) fn show(&self, page: usize, words: &[AtomicU64]) -> (Words, Words) {
        let range = page * 512..(page + 1) * 512;
        let should = |word: usize| u64::from_le_bytes(self.bytes[word * 8..word * 8 + 8].try_into().unwrap());
        range
            .map(|word| ((word, words[word].load(Ordering::Relaxed)), (word, should(word))))
            .filter(|(is, should)| is != should)
            .take(8)
            .unzip()
    }

    /// Does a descriptor.
    pub(crate) fn run(&mut self, descriptor: &Descriptor) -> Expected {
        let mut expected = Expected::default();
        self.one(descriptor, false, &mut expected);
        expected
    }

    /// Does one, and returns whether it succeeded.
    fn one(&mut self, d: &Descriptor, member: bool, expected: &mut Expected) -> bool {
        let bits = d.flags();
        let place = (bits & 0x4 != 0).then(|| d.completion().0);
        if let Some(place) = place {
            if place % 32 != 0 {
                expected.errors.push(0x1b);
                return false;
            }
            self.blocks = bits & 0x2 != 0;
            if self.rights_at(place) & 2 == 0 {
                expected.errors.push(0x1a);
                return false;
            }
        }
        self.blocks = bits & 0x2 != 0;
        let says = match self.wrong(d, member) {
            Some((status, value)) => Says {
                status,
                value,
                ..Says::default()
            },
            None if d.opcode() == Some(Opcode::Batch) => self.batch(d, expected),
            None => self.effect(d),
        };
        self.seen.insert((d.opcode_code(), says.status & 0x7f));
        let success = says.status == 1;
        match place {
            Some(place) if bits & 0x8 != 0 || !success => self.record(place, &says),
            None if says.status > 2 => expected.errors.push(says.status & 0x7f),
            _ => {}
        }
        if bits & 0x10 != 0 && d.interrupt_handle() < VECTORS {
            expected.interrupts.push(d.interrupt_handle());
        }
        success
    }

    fn record(&mut self, place: u64, says: &Says) {
        let mut bytes = [0; 32];
        bytes[0] = says.status;
        bytes[1] = says.result;
        bytes[4..8].copy_from_slice(&says.completed.to_le_bytes());
        bytes[8..16].copy_from_slice(&says.address.to_le_bytes());
        bytes[16..20].copy_from_slice(&says.value.to_le_bytes());
        for (to, word) in bytes[20..].chunks_exact_mut(4).zip(says.more) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        self.poke(place, &bytes);
    }

    fn batch(&mut self, d: &Descriptor, expected: &mut Expected) -> Says {
        let (mut failed, mut completed) = (false, 0);
        for at in 0..d.size() {
            let address = d.source() + u64::from(at) * 64;
            let mut bytes = [0; 64];
            for (byte, to) in (address..).zip(&mut bytes) {
                match self.peek(byte) {
                    Ok(value) => *to = value,
                    Err(gone) => {
                        return Says {
                            status: 6,
                            result: failed.into(),
                            completed,
                            address: gone.address,
                            ..Says::default()
                        };
                    }
                }
            }
            let member = Descriptor::from_bytes(bytes);
            if failed && member.flags() & 1 != 0 {
                break;
            }
            failed |= !self.one(&member, true, expected);
            self.blocks = false;
            completed += 1;
        }
        Says {
            status: if failed { 5 } else { 1 },
            result: failed.into(),
            completed,
            ..Says::default()
        }
    }

    /// What is wrong: status, and which flags.
    fn wrong(&self, d: &Descriptor, member: bool) -> Option<(u8, u32)> {
        let Some(opcode) = d.opcode() else {
            return Some((0x10, 0));
        };
        if member && matches!(opcode, Opcode::Batch | Opcode::Drain) {
            return Some((0x10, 0));
        }
        let mut bad = d.flags() & !opcode.allowed_flags();
        if !self.block_on_fault {
            bad |= d.flags() & 2;
        }
        if d.flags() & 0xc == 0x8 {
            bad |= 8;
        }
        if bad != 0 {
            return Some((0x11, bad));
        }
        let raw = d.to_bytes();
        if raw[38] | raw[39] != 0 || raw[2] & 0xf0 != 0 || raw[3] & 0x7f != 0 {
            return Some((0x12, 0));
        }
        let (a, b, size) = (d.source(), d.destination(), u64::from(d.size()));
        let handle = d.flags() & 0x10 != 0 && d.interrupt_handle() >= VECTORS;
        let status = match opcode {
            Opcode::Nop | Opcode::Drain => None,
            Opcode::Batch if !(2..=1 << BATCH_SHIFT).contains(&size) => Some(0x14),
            Opcode::Batch if a % 64 != 0 => Some(0x18),
            Opcode::Batch => first_of(&[(beyond(a, size * 64), 0x22)]),
            _ if size == 0 || size > 1 << TRANSFER_SHIFT => Some(0x13),
            Opcode::CreateDelta => {
                let space = d.delta_space();
                let (at, room) = (space.address.0, u64::from(space.max_bytes));
                first_of(&[
                    (size % 8 != 0, 0x13),
                    (room < 80, 0x15),
                    (a % 8 + b % 8 + at % 8 != 0, 0x1c),
                    (beyond(a, size) || beyond(b, size) || beyond(at, room), 0x22),
                    (near(at, room, a, size) || near(at, room, b, size), 0x16),
                ])
            }
            Opcode::ApplyDelta => {
                let bytes = u64::from(d.delta_bytes());
                first_of(&[
                    (size % 8 != 0, 0x13),
                    (bytes == 0 || bytes % 10 != 0, 0x15),
                    (a % 8 + b % 8 != 0, 0x1c),
                    (beyond(a, bytes) || beyond(b, size), 0x22),
                    (near(a, bytes, b, size), 0x16),
                ])
            }
            Opcode::Dualcast => {
                let c = d.destination_2();
                let overlap = near(a, size, b, size) || near(a, size, c, size) || near(b, size, c, size);
                first_of(&[
                    (b % 4096 != c % 4096, 0x17),
                    (beyond(a, size) || beyond(b, size) || beyond(c, size), 0x22),
                    (overlap, 0x16),
                ])
            }
            Opcode::CrcGenerate | Opcode::CopyCrc => {
                let seed = d.has(flags::READ_CRC_SEED) && d.crc_seed_address().0 & 3 != 0;
                let copy = opcode == Opcode::CopyCrc;
                first_of(&[
                    (seed, 0x1c),
                    (beyond(a, size) || copy && beyond(b, size), 0x22),
                    (copy && near(a, size, b, size), 0x16),
                ])
            }
            Opcode::IntegrityCheck
            | Opcode::IntegrityInsert
            | Opcode::IntegrityStrip
            | Opcode::IntegrityUpdate => {
                let (from, to) = block_sizes(d);
                let written = size / from * to;
                first_of(&[
                    (size % from != 0, 0x13),
                    (beyond(a, size) || to > 0 && beyond(b, written), 0x22),
                    (to > 0 && near(a, size, b, written), 0x16),
                ])
            }
            Opcode::Memmove | Opcode::Compare => first_of(&[(beyond(a, size) || beyond(b, size), 0x22)]),
            Opcode::Fill | Opcode::CacheFlush => first_of(&[(beyond(b, size), 0x22)]),
            Opcode::ComparePattern | Opcode::TranslationFetch => first_of(&[(beyond(a, size), 0x22)]),
        };
        let bit = |at: u32| d.flags() >> at & 1;
        let written = match opcode {
            Opcode::CreateDelta => vec![bit(11)],
            Opcode::Dualcast => vec![bit(10), bit(11)],
            _ => vec![bit(10)],
        };
        let classes = bit(13) == 1 && written.iter().any(|class| *class != bit(12));
        let status = status.or(handle.then_some(0x19)).or(classes.then_some(0x1e));
        status.map(|status| (status, 0))
    }

    /// A page may be brought for those that wait.
    fn rights_at(&mut self, address: u64) -> u64 {
        let page = address
            .checked_sub(BASE)
            .map(|offset| usize::try_from(offset / 4096).unwrap());
        let Some(rights) = page.and_then(|page| self.rights.get_mut(page)) else {
            return 0;
        };
        if *rights == 0 && self.blocks {
            *rights = 3;
        }
        *rights
    }

    fn peek(&mut self, address: u64) -> Result<u8, Gone> {
        if self.rights_at(address) & 1 == 0 {
            return Err(Gone {
                address,
                write: false,
            });
        }
        Ok(self.bytes[usize::try_from(address - BASE).unwrap()])
    }

    fn may_write(&mut self, address: u64) -> Result<usize, Gone> {
        if self.rights_at(address) & 2 == 0 {
            return Err(Gone { address, write: true });
        }
        Ok(usize::try_from(address - BASE).unwrap())
    }

    fn effect(&mut self, d: &Descriptor) -> Says {
        let mut says = Says::default();
        match self.operation(d, &mut says) {
            Ok(()) if says.status == 0 => {
                let expected = match d.opcode() {
                    Some(Opcode::CreateDelta) => d.expected() & 1 << says.result != 0,
                    _ => d.expected() % 2 == says.result,
                };
                let checked = d.flags() & 0x80 != 0;
                says.status = if checked && !expected { 2 } else { 1 };
            }
            Ok(()) => {}
            Err(gone) => {
                says.status = if self.blocks { 4 } else { 3 } | u8::from(gone.write) << 7;
                says.address = gone.address;
            }
        }
        says
    }
}

/// The operations.
impl Oracle {
    /// Does it; what was done before a fault is in `says`.
    fn operation(&mut self, d: &Descriptor, says: &mut Says) -> Result<(), Gone> {
        let (a, b, size) = (d.source(), d.destination(), d.size());
        let pattern = |word: u64, at: u32| word.to_le_bytes()[at as usize % 8];
        match d.opcode().unwrap() {
            Opcode::Memmove => return self.memmove(a, b, size, says),
            Opcode::CreateDelta => return self.create_delta(d, says),
            Opcode::ApplyDelta => return self.apply_delta(d, says),
            Opcode::CrcGenerate => return self.crc(d, false, says),
            Opcode::CopyCrc => return self.crc(d, true, says),
            Opcode::IntegrityCheck
            | Opcode::IntegrityInsert
            | Opcode::IntegrityStrip
            | Opcode::IntegrityUpdate => return self.blocks(d, says),
            Opcode::Nop | Opcode::Drain | Opcode::Batch => return Ok(()),
            Opcode::Fill => {
                for at in 0..size {
                    let to = self.may_write(b + u64::from(at))?;
                    self.bytes[to] = pattern(a, at);
                    says.completed += 1;
                }
            }
            Opcode::Compare => {
                for at in 0..size {
                    if self.peek(a + u64::from(at))? != self.peek(b + u64::from(at))? {
                        says.result = 1;
                        return Ok(());
                    }
                    says.completed += 1;
                }
            }
            Opcode::ComparePattern => {
                for at in 0..size {
                    if self.peek(a + u64::from(at))? != pattern(b, at) {
                        says.result = 1;
                        return Ok(());
                    }
                    says.completed += 1;
                }
            }
            Opcode::Dualcast => {
                for at in 0..u64::from(size) {
                    let byte = self.peek(a + at)?;
                    let to = [self.may_write(b + at)?, self.may_write(d.destination_2() + at)?];
                    to.into_iter().for_each(|to| self.bytes[to] = byte);
                    says.completed += 1;
                }
            }
            Opcode::TranslationFetch => {
                for at in 0..u64::from(size) {
                    self.peek(a + at)?;
                    says.completed += 1;
                }
            }
            Opcode::CacheFlush => {
                for at in 0..u64::from(size) {
                    self.peek(b + at)?;
                    says.completed += 1;
                }
            }
        }
        Ok(())
    }

    fn memmove(&mut self, a: u64, b: u64, size: u32, says: &mut Says) -> Result<(), Gone> {
        let size = u64::from(size);
        let backwards = b > a && b - a < size;
        for at in 0..size {
            let at = if backwards { size - 1 - at } else { at };
            // A piece that faults at its far end does so at its near one, which is where the address points.
            let moved = self
                .peek(a + at)
                .and_then(|byte| Ok((byte, self.may_write(b + at)?)));
            match moved {
                Ok((byte, to)) => self.bytes[to] = byte,
                Err(gone) if backwards => {
                    says.result = 1;
                    return Err(self.piece_start(gone, a, b, at));
                }
                Err(gone) => return Err(gone),
            }
            says.completed += 1;
        }
        Ok(())
    }

    /// Where the piece begins that ends with byte `at` of a copy from the end.
    fn piece_start(&self, gone: Gone, a: u64, b: u64, at: u64) -> Gone {
        let back = ((a + at) % 4096).min((b + at) % 4096).min(at);
        Gone {
            address: gone.address - back,
            ..gone
        }
    }

    fn create_delta(&mut self, d: &Descriptor, says: &mut Says) -> Result<(), Gone> {
        let space = d.delta_space();
        for at in (0..d.size()).step_by(8) {
            let (mut old, mut new) = ([0; 8], [0; 8]);
            for (address, to) in (d.source() + u64::from(at)..).zip(&mut old) {
                *to = self.peek(address)?;
            }
            for (address, to) in (d.destination() + u64::from(at)..).zip(&mut new) {
                *to = self.peek(address)?;
            }
            if old != new {
                if says.value + 10 > space.max_bytes {
                    says.result = 2;
                    return Ok(());
                }
                let index = u16::try_from(at / 8).unwrap().to_le_bytes();
                let entry: Vec<u8> = index.into_iter().chain(new).collect();
                let start = space.address.0 + u64::from(says.value);
                let mut places = Vec::new();
                for address in start..start + 10 {
                    places.push(self.may_write(address)?);
                }
                for (place, byte) in places.into_iter().zip(entry) {
                    self.bytes[place] = byte;
                }
                says.value += 10;
            }
            says.completed += 8;
        }
        says.result = u8::from(says.value > 0);
        Ok(())
    }

    fn apply_delta(&mut self, d: &Descriptor, says: &mut Says) -> Result<(), Gone> {
        let mut last = None;
        while says.completed < d.delta_bytes() {
            let mut entry = [0; 10];
            for (address, to) in (d.source() + u64::from(says.completed)..).zip(&mut entry) {
                *to = self.peek(address)?;
            }
            let index = u16::from_le_bytes([entry[0], entry[1]]);
            if Some(index) <= last {
                says.status = 7;
                return Ok(());
            }
            if u32::from(index) * 8 + 8 > d.size() {
                says.status = 8;
                return Ok(());
            }
            let start = d.destination() + u64::from(index) * 8;
            for (address, byte) in (start..).zip(&entry[2..]) {
                let to = self.may_write(address)?;
                self.bytes[to] = *byte;
            }
            last = Some(index);
            says.completed += 10;
        }
        Ok(())
    }

    fn crc(&mut self, d: &Descriptor, copy: bool, says: &mut Says) -> Result<(), Gone> {
        let bypass = |flag: u32| d.flags() & flag != 0;
        let mut seed = d.crc_seed();
        if bypass(flags::READ_CRC_SEED) {
            let mut bytes = [0; 4];
            for (address, to) in (d.crc_seed_address().0..).zip(&mut bytes) {
                *to = self.peek(address)?;
            }
            seed = u32::from_le_bytes(bytes);
        }
        let plain = bypass(flags::BYPASS_CRC_INVERSION);
        // The polynomial as it is written, the first bit of a byte being its lowest, unless that is bypassed.
        let mut state = if plain { seed } else { !seed.reverse_bits() };
        let shown = |state: u32| if plain { state } else { !state.reverse_bits() };
        says.value = shown(state);
        for at in 0..u64::from(d.size()) {
            let byte = self.peek(d.source() + at)?;
            if copy {
                let to = self.may_write(d.destination() + at)?;
                self.bytes[to] = byte;
            }
            let bits = if bypass(flags::BYPASS_DATA_REFLECTION) {
                byte
            } else {
                byte.reverse_bits()
            };
            state ^= u32::from(bits) << 24;
            for _ in 0..8 {
                let carry = state & 1 << 31 != 0;
                state <<= 1;
                if carry {
                    state ^= 0x1edc_6f41;
                }
            }
            says.value = shown(state);
            says.completed += 1;
        }
        Ok(())
    }
}

/// Blocks with data integrity fields.
impl Oracle {
    fn blocks(&mut self, d: &Descriptor, says: &mut Says) -> Result<(), Gone> {
        let raw = d.to_bytes();
        let half = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        let (from, to) = block_sizes(d);
        let insert = d.opcode() == Some(Opcode::IntegrityInsert);
        let update = d.opcode() == Some(Opcode::IntegrityUpdate);
        // Of the source and of the destination: flags, reference tag, mask, application tag.
        let mut checked = (raw[40], word(48), half(52), half(54));
        let mut made = (raw[41], word(56), half(60), half(62));
        if insert {
            checked = (0x80, 0, 0, 0);
        } else if !update {
            made = (0x80, 0, 0, 0);
        }
        for block in 0..u64::from(d.size()) / from {
            says.value = checked.1;
            let tags = |mask: u16, application: u16| u32::from(mask) | u32::from(application) << 16;
            says.more = [tags(checked.2, checked.3), made.1, tags(made.2, made.3)];
            let mut bytes = Vec::new();
            for at in 0..from {
                bytes.push(self.peek(d.source() + block * from + at)?);
            }
            let len = bytes.len() - if insert { 0 } else { 8 };
            let field = bytes.split_off(len);
            let mut guard = self.guard(&bytes, raw[42] & 4 != 0);
            if raw[42] & 8 != 0 {
                guard ^= 0xffff;
            }
            if !insert {
                says.result = is_wrong(&field, guard, checked);
                if says.result != 0 {
                    says.status = 9;
                    return Ok(());
                }
            }
            if insert || update {
                let application = made.3 & !made.2;
                let new = guard.to_be_bytes().into_iter().chain(application.to_be_bytes());
                let new: Vec<u8> = new.chain(made.1.to_be_bytes()).collect();
                // Parts that an update takes over, by the bit that says so.
                for (part, bit) in [(0..2, 0x20), (2..4, 0x08), (4..8, 0x40)] {
                    let kept = update && made.0 & bit != 0;
                    bytes.extend(if kept { &field[part] } else { &new[part] });
                }
            }
            let mut places = Vec::new();
            for at in 0..to {
                places.push(self.may_write(d.destination() + block * to + at)?);
            }
            for (place, byte) in places.into_iter().zip(bytes) {
                self.bytes[place] = byte;
            }
            for tags in [&mut checked, &mut made] {
                tags.1 = tags.1.wrapping_add(u32::from(tags.0 & 0x80 == 0));
                tags.3 = tags.3.wrapping_add(u16::from(tags.0 & 0x10 != 0));
            }
            says.completed += u32::try_from(from).unwrap();
            says.value = checked.1;
            says.more = [tags(checked.2, checked.3), made.1, tags(made.2, made.3)];
        }
        Ok(())
    }

    /// The CRC of a block.
    pub(crate) fn guard(&self, block: &[u8], ones: bool) -> u16 {
        let mut state: u16 = if ones { 0xffff } else { 0 };
        for byte in block {
            state = state << 8 ^ self.of_byte[usize::from(state >> 8) ^ usize::from(*byte)];
        }
        state
    }
}

/// What each byte makes of the CRC-16 with the polynomial 0x8bb7, bit by bit.
fn of_byte() -> Vec<u16> {
    let of = |byte: u16| {
        (0..8).fold(byte << 8, |state, _| {
            let carry = state & 0x8000 != 0;
            if carry { state << 1 ^ 0x8bb7 } else { state << 1 }
        })
    };
    (0..256).map(of).collect()
}

/// Bytes of a block, in the source and in the destination.
fn block_sizes(d: &Descriptor) -> (u64, u64) {
    let block = [512, 520, 4096, 4104][usize::from(d.to_bytes()[42]) % 4];
    match d.opcode().unwrap() {
        Opcode::IntegrityInsert => (block, block + 8),
        Opcode::IntegrityStrip => (block + 8, block),
        Opcode::IntegrityUpdate => (block + 8, block + 8),
        _ => (block + 8, 0),
    }
}

/// What is wrong with a field, of which flags, reference tag, mask and application tag are named.
fn is_wrong(field: &[u8], guard: u16, (bits, reference, mask, application): (u8, u32, u16, u16)) -> u8 {
    let all = |part: &[u8]| part.iter().all(|byte| *byte == 0xff);
    if all(field) && bits & 2 != 0 {
        return if bits & 1 != 0 { 8 } else { 0 };
    }
    if all(&field[2..4]) && bits & 4 != 0 || all(&field[2..]) && bits & 8 != 0 {
        return 0;
    }
    let differs = |at: usize| (application.to_be_bytes()[at] ^ field[2 + at]) & !mask.to_be_bytes()[at] != 0;
    u8::from(bits & 0x20 == 0 && field[..2] != guard.to_be_bytes())
        | u8::from(differs(0) || differs(1)) << 1
        | u8::from(bits & 0x40 == 0 && field[4..] != reference.to_be_bytes()) << 2
}

fn first_of(faults: &[(bool, u8)]) -> Option<u8> {
    faults.iter().find(|(is_so, _)| *is_so).map(|(_, status)| *status)
}

/// Whether a buffer has no last address.
fn beyond(start: u64, len: u64) -> bool {
    start > u64::MAX - len
}

/// Whether two buffers have a byte in common.
fn near(a: u64, a_len: u64, b: u64, b_len: u64) -> bool {
    let meet = |a: u64, len: u64, b: u64| b.checked_sub(a).is_some_and(|between| between < len);
    meet(a, a_len, b) || meet(b, b_len, a)
}
