//! Random descriptors against an oracle that does them byte by byte: records, memory, interrupts and software errors must
//! be the same. By default a million in each run; `DSA_DESCRIPTORS` is another number.

mod expected;
mod random;

use expected::{Expected, Oracle};
use random::Random;
use std::cell::RefCell;
use std::collections::BTreeSet;
use vmm_dedup_dsa_abi::config::{GroupConfig, Mode, QueueConfig};
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::{
    Command, CommandStatus, CommandWord, DELTA_ENTRY, Descriptor, Opcode, Status, flags, portal,
};
use vmm_dedup_dsa_model::{
    Board, Core, Faults, Flat, Memory, READABLE, Shape, Submitted, Timing, WRITABLE, Way,
};

/// Where memory begins.
pub(crate) const BASE: u64 = 0x7f12_3450_0000;
/// Pages: one of records, one of records that may be missing, two of lists, and eight of data.
pub(crate) const PAGES: usize = 12;
const LIST: u64 = BASE + 2 * 4096;
const DATA: u64 = BASE + 4 * 4096;
const DATA_BYTES: u64 = 8 * 4096;
/// The queue takes at most 16 KiB at once.
pub(crate) const TRANSFER_SHIFT: u8 = 14;
/// And batches of 8.
pub(crate) const BATCH_SHIFT: u8 = 3;

/// Sizes of blocks, each of which has a quarter of the data.
const BLOCKS: [u64; 4] = [512, 520, 4096, 4104];
const REGION: u64 = DATA_BYTES / 4;
/// The application tag of all blocks.
const TAG: u16 = 0xface;

struct Bench {
    memory: Flat,
    interrupts: RefCell<Vec<u16>>,
}

impl Board for Bench {
    fn memory(&self) -> &dyn Memory {
        &self.memory
    }

    fn interrupt(&self, vector: u16) {
        self.interrupts.borrow_mut().push(vector);
    }
}

fn write(core: &mut Core, bench: &Bench, offset: u64, word: u32) {
    core.write(offset, &word.to_le_bytes(), 0, bench);
}

fn read(core: &mut Core, bench: &Bench, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    core.read(offset, &mut bytes, 0, bench);
    u64::from_le_bytes(bytes)
}

fn command(core: &mut Core, bench: &Bench, command: Command, operand: u32) {
    write(core, bench, reg::CMD, CommandWord::new(command, operand, false).0);
    let status = CommandStatus(u32::try_from(read(core, bench, reg::CMDSTS) & 0xffff_ffff).unwrap());
    assert_eq!(
        (status.is_active(), status.outcome()),
        (false, Ok(0)),
        "{command:?}"
    );
}

/// A device with one dedicated queue.
fn device(bench: &Bench, block_on_fault: bool) -> Core {
    let mut core = Core::new(Shape::everything(), Timing::NONE, Faults::default());
    let tables = reg::Tables([read(&mut core, bench, reg::TABLES), 0]);
    let group = GroupConfig::new(1, 1);
    write(&mut core, bench, tables.groups(), 1);
    write(
        &mut core,
        bench,
        tables.groups() + 32,
        u32::try_from(group.engines).unwrap(),
    );
    let mut queue = QueueConfig::new(64, 0, Mode::Dedicated, 5)
        .with_limits(TRANSFER_SHIFT, BATCH_SHIFT)
        .with_operations([u64::MAX; 4]);
    if block_on_fault {
        queue = queue.with_block_on_fault();
    }
    for (at, word) in (tables.queues()..).step_by(4).zip(queue.0) {
        write(&mut core, bench, at, word);
    }
    command(&mut core, bench, Command::EnableDevice, 0);
    command(&mut core, bench, Command::EnableQueue, 0);
    core
}

/// An address within the data, mostly aligned.
fn address(random: &mut Random) -> u64 {
    let at = DATA + random.below(DATA_BYTES);
    match random.below(4) {
        0 => at,
        1 => at & !7,
        2 => at & !63,
        _ => at & !4095,
    }
}

fn size(random: &mut Random) -> u32 {
    let size = match random.below(16) {
        0..6 => 1 + random.below(128),
        6..10 => 4096,
        10..14 => random.below(12 << 10),
        14 => random.below(20 << 10),
        _ => 0,
    };
    let size = u32::try_from(size).unwrap();
    if random.below(2) == 0 { size & !7 } else { size }
}

/// Any descriptor, mostly one that makes sense.
fn descriptor(random: &mut Random, record: u64) -> Descriptor {
    let mut bytes = [0; 64];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let opcode = match random.below(64) {
        0 => u8::try_from(random.below(256)).unwrap(),
        _ => Opcode::ALL[usize::try_from(random.below(Opcode::ALL.len() as u64)).unwrap()] as u8,
    };
    let known = Opcode::from_code(opcode);
    let mut bits = flags::COMPLETION_ADDRESS_VALID | flags::REQUEST_COMPLETION;
    let optional = [
        flags::FENCE,
        flags::BLOCK_ON_FAULT,
        flags::CHECK_RESULT,
        flags::REQUEST_INTERRUPT,
    ];
    let crc = [
        flags::READ_CRC_SEED,
        flags::BYPASS_CRC_INVERSION,
        flags::BYPASS_DATA_REFLECTION,
    ];
    for flag in optional.into_iter().chain(crc) {
        let takes = known.is_some_and(|known| known.allowed_flags() & flag != 0);
        if random.below(if takes { 4 } else { 200 }) == 0 {
            bits |= flag;
        }
    }
    let ordered = [
        flags::STRICT_ORDER,
        flags::ADDRESS_2_CLASS,
        flags::ADDRESS_3_CLASS,
        flags::COMPLETION_CLASS,
    ];
    if known.is_some_and(|known| known.allowed_flags() & flags::STRICT_ORDER != 0) && random.below(16) == 0 {
        let chosen = ordered.into_iter().filter(|_| random.below(2) == 0);
        bits |= chosen.fold(0, |bits, flag| bits | flag);
    }
    if random.below(64) == 0 {
        bits ^= 1 << random.below(20);
    }
    put(4, &(bits | u32::from(opcode) << 24).to_le_bytes());
    let record = if random.below(200) == 0 {
        record + 16
    } else {
        record
    };
    put(8, &record.to_le_bytes());
    let (source, size) = (address(random), size(random));
    // Operands that are alike, or near each other, so that comparisons go far and copies overlap.
    let destination = match random.below(3) {
        0 => address(random),
        1 => (source + random.below(8192)).saturating_sub(4096).max(DATA),
        _ => DATA + (source - DATA + 4 * 4096) % DATA_BYTES,
    };
    let pattern =
        [0u64, 0x0101_0101_0101_0101, 0x0102_0304_0506_0708][usize::try_from(random.below(3)).unwrap()];
    let is = |opcode: Opcode| known == Some(opcode);
    put(16, &if is(Opcode::Fill) { pattern } else { source }.to_le_bytes());
    put(
        24,
        &if is(Opcode::ComparePattern) {
            pattern
        } else {
            destination
        }
        .to_le_bytes(),
    );
    put(32, &size.to_le_bytes());
    put(36, &u16::try_from(random.below(10)).unwrap().to_le_bytes());
    if random.below(300) == 0 {
        put(38, &[1]);
    }
    if random.below(300) == 0 {
        put(2, &[0x10]);
    }
    let third = address(random);
    match known {
        Some(Opcode::CreateDelta) => {
            put(40, &third.to_le_bytes());
            let room = [0, 80, 96, 400, 4096, 16384][usize::try_from(random.below(6)).unwrap()];
            put(48, &u32::to_le_bytes(room));
            put(56, &[u8::try_from(random.below(8)).unwrap()]);
        }
        Some(Opcode::ApplyDelta) => {
            let entries = u32::try_from(random.below(40)).unwrap();
            let odd = u32::from(random.below(50) == 0);
            put(40, &(entries * DELTA_ENTRY + odd).to_le_bytes());
        }
        Some(Opcode::Dualcast) => {
            let alike = third & !4095 | destination & 4095;
            put(
                40,
                &if random.below(8) == 0 { third } else { alike }.to_le_bytes(),
            );
        }
        Some(Opcode::CrcGenerate | Opcode::CopyCrc) => {
            put(40, &u32::try_from(random.below(1 << 32)).unwrap().to_le_bytes());
            put(48, &third.to_le_bytes());
        }
        Some(Opcode::Compare | Opcode::ComparePattern) => put(40, &[u8::try_from(random.below(2)).unwrap()]),
        Some(
            Opcode::IntegrityCheck
            | Opcode::IntegrityInsert
            | Opcode::IntegrityStrip
            | Opcode::IntegrityUpdate,
        ) => of_blocks(random, &mut bytes),
        _ => {}
    }
    Descriptor::from_bytes(bytes)
}

/// Makes the operands of an operation on blocks of those that it has: mostly whole blocks, often those that [`blocks`] makes.
fn of_blocks(random: &mut Random, bytes: &mut [u8; 64]) {
    let kind = random.below(4);
    let made = random.below(2) == 0;
    let block = BLOCKS[usize::try_from(kind).unwrap()] + 8;
    let first = random.below(REGION / block);
    let flags =
        |random: &mut Random| (0..8).fold(0, |bits, bit| bits | u8::from(random.below(6) == 0) << bit);
    let (from, to) = (flags(random), flags(random));
    let inverted = [2, 3].map(|bit| u64::from(random.below(8) == 0) << bit);
    let guard = u8::try_from(kind | inverted[0] | inverted[1]).unwrap();
    bytes[40..43].copy_from_slice(&[from, to, guard]);
    let of_source = if bytes[7] == Opcode::IntegrityInsert as u8 {
        block - 8
    } else {
        block
    };
    let most = if made { REGION / block - first } else { 8 };
    let odd = u64::from(random.below(50) == 0);
    let size = (1 + random.below(most)) * of_source + odd;
    bytes[32..36].copy_from_slice(&u32::try_from(size).unwrap().to_le_bytes());
    for at in [48, 56] {
        let wrong = random.below(16) == 0;
        let reference = if made { u32::try_from(first).unwrap() } else { 0 } + u32::from(wrong);
        let mask = [0, 0, 0xff, 0xffff][usize::try_from(random.below(4)).unwrap()];
        let application = if made { TAG } else { 0 } ^ u16::from(random.below(16) == 0);
        bytes[at..at + 4].copy_from_slice(&reference.to_le_bytes());
        bytes[at + 4..at + 6].copy_from_slice(&u16::to_le_bytes(mask));
        bytes[at + 6..at + 8].copy_from_slice(&application.to_le_bytes());
    }
    if made {
        let source = DATA + kind * REGION + first * block;
        bytes[16..24].copy_from_slice(&source.to_le_bytes());
    }
}

/// Fills a quarter of the data with blocks of each size, whose fields are mostly right.
fn blocks(random: &mut Random, oracle: &mut Oracle, bench: &Bench) {
    for (kind, len) in (0..).zip(BLOCKS) {
        for number in 0..REGION / (len + 8) {
            let value = u8::try_from(random.below(3)).unwrap();
            let mut block = vec![value; usize::try_from(len).unwrap()];
            let guard = oracle.guard(&block, false);
            block.extend(guard.to_be_bytes());
            block.extend(TAG.to_be_bytes());
            block.extend(u32::try_from(number).unwrap().to_be_bytes());
            let field = block.len() - 8;
            // All ones, or the tags, or the application tag alone; or some bit is another one.
            match random.below(24) {
                0 => block[field..].fill(0xff),
                1 => block[field + 2..].fill(0xff),
                2 => block[field + 2..field + 4].fill(0xff),
                3 => block[field + usize::try_from(random.below(8)).unwrap()] ^= 4,
                _ => {}
            }
            put(bench, oracle, DATA + kind * REGION + number * (len + 8), &block);
        }
    }
}

/// Entries of a delta record, mostly in order.
fn delta_record(random: &mut Random, bytes: &mut [u8]) {
    let mut index = 0;
    for entry in bytes.chunks_exact_mut(10) {
        entry[..2].copy_from_slice(&u16::try_from(index & 0xffff).unwrap().to_le_bytes());
        index = match random.below(30) {
            0 => index,
            1 => index + random.below(2000),
            _ => index + 1 + random.below(20),
        };
    }
}

/// Fills the data with few different words, and sometimes delta records.
fn refill(random: &mut Random, oracle: &mut Oracle, bench: &Bench) {
    for page in 4..PAGES {
        let mut content = [0; 4096];
        match random.below(4) {
            0 => {}
            1 => content.fill(1),
            2 => delta_record(random, &mut content),
            _ => content
                .iter_mut()
                .for_each(|byte| *byte = u8::from(random.below(200) == 0)),
        }
        bench.memory.set_rights(page, READABLE | WRITABLE);
        let at = BASE + page as u64 * 4096;
        bench.memory.write(None, at, &content).unwrap();
        oracle.fill_page(page, &content);
    }
    if random.below(2) == 0 {
        blocks(random, oracle, bench);
    }
}

fn change_rights(random: &mut Random, oracle: &mut Oracle, bench: &Bench) {
    for page in [1, 3].into_iter().chain(4..PAGES) {
        let rights = match random.below(16) {
            0 => 0,
            1 => READABLE,
            _ => READABLE | WRITABLE,
        };
        bench.memory.set_rights(page, rights);
        oracle.set_rights(page, rights);
    }
}

fn put(bench: &Bench, oracle: &mut Oracle, address: u64, bytes: &[u8]) {
    let first = usize::try_from(4096 - address % 4096).unwrap().min(bytes.len());
    let (now, rest) = bytes.split_at(first);
    oracle.poke(address, now);
    let page = usize::try_from((address - BASE) / 4096).unwrap();
    let rights = oracle.rights(page);
    bench.memory.set_rights(page, READABLE | WRITABLE);
    bench.memory.write(None, address, now).unwrap();
    bench.memory.set_rights(page, rights);
    if !rest.is_empty() {
        put(bench, oracle, address + first as u64, rest);
    }
}

/// Submits so many descriptors. Returns which operations ended how.
fn run(descriptors: u64, seed: u64, block_on_fault: bool) -> BTreeSet<(u8, u8)> {
    let mut random = Random::new(seed);
    let bench = Bench {
        memory: Flat::new(BASE, PAGES),
        interrupts: RefCell::default(),
    };
    let mut core = device(&bench, block_on_fault);
    let mut oracle = Oracle::new(block_on_fault);
    let mut done = 0;
    while done < descriptors {
        if random.below(64) == 0 {
            refill(&mut random, &mut oracle, &bench);
        }
        if random.below(8) == 0 {
            change_rights(&mut random, &mut oracle, &bench);
        }
        // Records are cleared, so that those that are not written show.
        put(&bench, &mut oracle, BASE, &[0; 4096]);
        let record = if random.below(32) == 0 { BASE + 4096 } else { BASE };
        let (submitted, members) = if random.below(4) == 0 {
            let members = 1 + random.below(9);
            let list = LIST + 64 * random.below(64);
            let list = if random.below(100) == 0 { list + 32 } else { list };
            let all: Vec<Descriptor> = (0..members)
                .map(|at| descriptor(&mut random, BASE + 32 * (at + 1)))
                .collect();
            for (at, member) in (list..).step_by(64).zip(&all) {
                put(&bench, &mut oracle, at, &member.to_bytes());
            }
            let mut bytes = [0; 64];
            let bits = flags::COMPLETION_ADDRESS_VALID | flags::REQUEST_COMPLETION | 1 << 24;
            bytes[4..8].copy_from_slice(&bits.to_le_bytes());
            bytes[8..16].copy_from_slice(&record.to_le_bytes());
            bytes[16..24].copy_from_slice(&list.to_le_bytes());
            bytes[32..36].copy_from_slice(&u32::try_from(members).unwrap().to_le_bytes());
            (Descriptor::from_bytes(bytes), all)
        } else {
            (descriptor(&mut random, record), Vec::new())
        };
        done += 1 + members.len() as u64;
        let at = portal::offset(0, portal::Kind::Unlimited);
        let taken = core.submit(at, Way::Posted, &submitted.to_bytes(), 0, &bench);
        assert_eq!(taken, Submitted::Taken);
        core.advance(0, &bench);
        let Expected { interrupts, errors } = oracle.run(&submitted);
        let context = || format!("seed {seed}, after {done}: {submitted:x?} of {members:x?}");
        assert_eq!(bench.interrupts.take(), interrupts, "interrupts, {}", context());
        let first = read(&mut core, &bench, reg::SWERR);
        let noted = (first & 1 != 0).then(|| u8::try_from(first >> 8 & 0xff).unwrap());
        assert_eq!(noted, errors.first().copied(), "software errors, {}", context());
        assert_eq!(first >> 1 & 1 != 0, errors.len() > 1, "overflow, {}", context());
        write(&mut core, &bench, reg::SWERR, 3);
        if let Some(page) = oracle.differs(bench.memory.words()) {
            let (is, should) = oracle.show(page, bench.memory.words());
            panic!("page {page} is {is:x?}\nand should be {should:x?}\n{}", context());
        }
    }
    oracle.seen
}

fn wanted() -> u64 {
    let wanted = std::env::var("DSA_DESCRIPTORS").ok();
    wanted.and_then(|text| text.parse().ok()).unwrap_or(1_000_000)
}

/// How a descriptor of an operation can end in these runs, besides with success.
fn endings(opcode: Opcode, fault: Status) -> Vec<Status> {
    let mut endings = vec![Status::Flags, Status::Reserved];
    let of_its_own: &[Status] = match opcode {
        Opcode::Nop | Opcode::Drain => &[],
        Opcode::Batch => &[
            Status::BatchFailed,
            Status::BatchListFault,
            Status::Count,
            Status::ListAlignment,
        ],
        Opcode::CreateDelta => &[
            fault,
            Status::FalsePredicate,
            Status::Size,
            Status::DeltaSize,
            Status::AddressAlignment,
            Status::Overlap,
            Status::TrafficClass,
        ],
        Opcode::ApplyDelta => &[
            fault,
            Status::DeltaOrder,
            Status::DeltaRange,
            Status::Size,
            Status::DeltaSize,
            Status::AddressAlignment,
            Status::Overlap,
        ],
        Opcode::Compare | Opcode::ComparePattern => &[fault, Status::FalsePredicate, Status::Size],
        Opcode::Dualcast => &[
            fault,
            Status::Size,
            Status::Dualcast,
            Status::Overlap,
            Status::TrafficClass,
        ],
        Opcode::IntegrityCheck => &[fault, Status::Size, Status::IntegrityField],
        Opcode::IntegrityInsert => &[fault, Status::Size, Status::Overlap, Status::TrafficClass],
        Opcode::IntegrityStrip | Opcode::IntegrityUpdate => &[
            fault,
            Status::Size,
            Status::IntegrityField,
            Status::Overlap,
            Status::TrafficClass,
        ],
        Opcode::CopyCrc => &[fault, Status::Size, Status::Overlap, Status::AddressAlignment],
        Opcode::CrcGenerate => &[fault, Status::Size, Status::AddressAlignment],
        Opcode::Memmove | Opcode::Fill | Opcode::CacheFlush => &[fault, Status::Size, Status::TrafficClass],
        Opcode::TranslationFetch => &[fault, Status::Size],
    };
    endings.extend(of_its_own);
    // Batches are made whole here.
    endings.retain(|status| opcode != Opcode::Batch || !matches!(status, Status::Flags | Status::Reserved));
    endings
}

fn all_endings_are_seen(seen: &BTreeSet<(u8, u8)>, fault: Status) {
    for opcode in Opcode::ALL {
        for status in endings(opcode, fault).into_iter().chain([Status::Success]) {
            assert!(
                seen.contains(&(opcode as u8, status as u8)),
                "no {opcode:?} ended with {status:?}"
            );
        }
    }
}

#[test]
fn descriptors_do_what_the_oracle_does() {
    let seen = run(wanted() / 2, 1, false);
    all_endings_are_seen(&seen, Status::PageFault);
}

#[test]
fn descriptors_that_may_block_do_what_the_oracle_does() {
    let seen = run(wanted() / 2, 2, true);
    all_endings_are_seen(&seen, Status::PageFault);
    assert!(seen.contains(&(Opcode::Memmove as u8, Status::PageResponse as u8)));
}
