//! What is wrong with a descriptor, before anything is done.
//!
//! Which of several errors is reported is the device's choice; here it is the first in the order of [`check`].

use crate::board::Board;
use crate::queue::Job;
use crate::shape::Shape;
use vmm_dedup_dsa_abi::config::{Mode, QueueConfig};
use vmm_dedup_dsa_abi::registers::{GeneralCapability, QueueCapability};
use vmm_dedup_dsa_abi::{
    CompletionRecord, DELTA_ENTRY, Descriptor, MAX_DELTA_SOURCE, MIN_BATCH, MIN_DELTA_SPACE, Opcode, Status,
    flags,
};

/// What a queue allows.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    /// A bit for each operation.
    operations: [u64; 4],
    block_on_fault: bool,
    /// Bytes.
    most_bytes: u64,
    /// Members of a batch.
    most_members: u32,
    /// Interrupt vectors.
    vectors: u16,
    /// Whether copies may overlap.
    overlap: bool,
}

impl Allowed {
    /// What a queue of such a device allows.
    fn new(config: &QueueConfig, shape: &Shape) -> Self {
        let operations = if shape.queues.has(QueueCapability::OPERATIONS) {
            let (able, chosen) = (shape.operation_bits(), config.operations());
            std::array::from_fn(|word| able[word] & chosen[word])
        } else {
            shape.operation_bits()
        };
        Self {
            operations,
            block_on_fault: config.block_on_fault(),
            most_bytes: 1 << config.transfer_shift(),
            most_members: 1 << config.batch_shift(),
            vectors: shape.vectors(),
            overlap: shape.general.has(GeneralCapability::OVERLAP),
        }
    }

    fn does(&self, opcode: Opcode) -> bool {
        let (word, bit) = opcode.capability();
        self.operations[word] >> bit & 1 != 0
    }
}

/// The record of a descriptor that came to a queue and is not done, or `None` if nothing is wrong with it.
pub(crate) fn wrong_with(
    job: &Job,
    config: &QueueConfig,
    shape: &Shape,
    board: &dyn Board,
) -> Option<CompletionRecord> {
    if let Some(address) = job.record_address() {
        if !address.0.is_multiple_of(32) {
            return Some(CompletionRecord::new(Status::RecordAlignment));
        }
        let there = board.memory().is_there(job.space, address.0, true)
            || job.descriptor.has(flags::BLOCK_ON_FAULT)
                && board.memory().request(job.space, address.0, true);
        if !there {
            return Some(CompletionRecord::new(Status::RecordFault));
        }
    }
    let user = config.mode() == Mode::Shared && !config.is_privileged();
    if user && job.descriptor.is_privileged() {
        return Some(CompletionRecord::new(Status::Privilege));
    }
    check(
        &job.descriptor,
        &Allowed::new(config, shape),
        job.member.is_some(),
    )
}

/// The record of a descriptor that is not done, or `None` if nothing is wrong with it. `member`: it is one of a batch.
/// That a record can be written at all has been seen to.
fn check(descriptor: &Descriptor, allowed: &Allowed, member: bool) -> Option<CompletionRecord> {
    let wrong = |status| Some(CompletionRecord::new(status));
    let opcode = descriptor.opcode().filter(|opcode| allowed.does(*opcode));
    let Some(opcode) = opcode.filter(|opcode| !member || !matches!(opcode, Opcode::Batch | Opcode::Drain))
    else {
        return wrong(Status::Opcode);
    };
    let mut taken = opcode.allowed_flags();
    if !allowed.block_on_fault {
        taken &= !flags::BLOCK_ON_FAULT;
    }
    let mut invalid = descriptor.flags() & !taken;
    if descriptor.has(flags::REQUEST_COMPLETION) && !descriptor.has(flags::COMPLETION_ADDRESS_VALID) {
        invalid |= flags::REQUEST_COMPLETION;
    }
    if invalid != 0 {
        return Some(CompletionRecord::new(Status::Flags).with_value(invalid));
    }
    if descriptor.has_reserved_bits() {
        return wrong(Status::Reserved);
    }
    if let Some(status) = sizes(opcode, descriptor, allowed)
        .or_else(|| alignment(opcode, descriptor))
        .or_else(|| overlap(opcode, descriptor, allowed))
    {
        return wrong(status);
    }
    if descriptor.has(flags::REQUEST_INTERRUPT) && descriptor.interrupt_handle() >= allowed.vectors {
        return wrong(Status::InterruptHandle);
    }
    classes_differ(opcode, descriptor).then(|| CompletionRecord::new(Status::TrafficClass))
}

/// Whether writes that are to be in order go by different ways. The public headers name this error and do not say which
/// descriptors have it; this reading is the model's own.
fn classes_differ(opcode: Opcode, descriptor: &Descriptor) -> bool {
    let written: &[u32] = match opcode {
        Opcode::CreateDelta => &[flags::ADDRESS_3_CLASS],
        Opcode::Dualcast => &[flags::ADDRESS_2_CLASS, flags::ADDRESS_3_CLASS],
        _ => &[flags::ADDRESS_2_CLASS],
    };
    let record = descriptor.has(flags::COMPLETION_CLASS);
    descriptor.has(flags::STRICT_ORDER) && written.iter().any(|class| descriptor.has(*class) != record)
}

fn sizes(opcode: Opcode, descriptor: &Descriptor, allowed: &Allowed) -> Option<Status> {
    let size = descriptor.size();
    match opcode {
        Opcode::Nop | Opcode::Drain => return None,
        Opcode::Batch => {
            return (size < MIN_BATCH || size > allowed.most_members).then_some(Status::Count);
        }
        _ if size == 0 || u64::from(size) > allowed.most_bytes => return Some(Status::Size),
        _ => {}
    }
    match opcode {
        Opcode::IntegrityCheck
        | Opcode::IntegrityInsert
        | Opcode::IntegrityStrip
        | Opcode::IntegrityUpdate
            if !size.is_multiple_of(descriptor.source_block()) =>
        {
            Some(Status::Size)
        }
        Opcode::CreateDelta | Opcode::ApplyDelta if !size.is_multiple_of(8) || size > MAX_DELTA_SOURCE => {
            Some(Status::Size)
        }
        Opcode::CreateDelta if descriptor.delta_space().max_bytes < MIN_DELTA_SPACE => {
            Some(Status::DeltaSize)
        }
        Opcode::ApplyDelta
            if descriptor.delta_bytes() == 0 || !descriptor.delta_bytes().is_multiple_of(DELTA_ENTRY) =>
        {
            Some(Status::DeltaSize)
        }
        _ => None,
    }
}

fn alignment(opcode: Opcode, descriptor: &Descriptor) -> Option<Status> {
    let (source, destination) = (descriptor.source(), descriptor.destination());
    match opcode {
        Opcode::Batch if !source.is_multiple_of(64) => Some(Status::ListAlignment),
        Opcode::CreateDelta
            if !(source | destination | descriptor.delta_space().address.0).is_multiple_of(8) =>
        {
            Some(Status::AddressAlignment)
        }
        Opcode::ApplyDelta if !(source | destination).is_multiple_of(8) => Some(Status::AddressAlignment),
        Opcode::CrcGenerate | Opcode::CopyCrc
            if descriptor.has(flags::READ_CRC_SEED) && !descriptor.crc_seed_address().0.is_multiple_of(4) =>
        {
            Some(Status::AddressAlignment)
        }
        Opcode::Dualcast if (destination ^ descriptor.destination_2()) & 0xfff != 0 => Some(Status::Dualcast),
        _ => None,
    }
}

/// A buffer: its address and its bytes.
type Span = (u64, u64);

/// Buffers that must not overlap, and buffers that go beyond the last address.
fn overlap(opcode: Opcode, descriptor: &Descriptor, allowed: &Allowed) -> Option<Status> {
    let size = u64::from(descriptor.size());
    let (source, destination) = (descriptor.source(), descriptor.destination());
    let delta = descriptor.delta_space();
    let blocks = size / u64::from(descriptor.source_block()) * u64::from(descriptor.destination_block());
    // Reads, then writes.
    let (reads, writes): (&[Span], &[Span]) = match opcode {
        Opcode::Nop | Opcode::Drain => return None,
        Opcode::Batch => (&[(source, size * 64)], &[]),
        Opcode::Memmove | Opcode::CopyCrc => (&[(source, size)], &[(destination, size)]),
        Opcode::Fill => (&[], &[(destination, size)]),
        Opcode::Compare => (&[(source, size), (destination, size)], &[]),
        Opcode::ComparePattern | Opcode::CrcGenerate | Opcode::TranslationFetch | Opcode::IntegrityCheck => {
            (&[(source, size)], &[])
        }
        Opcode::IntegrityInsert | Opcode::IntegrityStrip | Opcode::IntegrityUpdate => {
            (&[(source, size)], &[(destination, blocks)])
        }
        Opcode::CacheFlush => (&[(destination, size)], &[]),
        Opcode::CreateDelta => (
            &[(source, size), (destination, size)],
            &[(delta.address.0, u64::from(delta.max_bytes))],
        ),
        Opcode::ApplyDelta => (
            &[(source, u64::from(descriptor.delta_bytes()))],
            &[(destination, size)],
        ),
        Opcode::Dualcast => (
            &[(source, size)],
            &[(destination, size), (descriptor.destination_2(), size)],
        ),
    };
    if reads
        .iter()
        .chain(writes)
        .any(|(at, len)| at.checked_add(*len).is_none())
    {
        return Some(Status::Translation);
    }
    let meet = |a: &Span, b: &Span| a.0 < b.0 + b.1 && b.0 < a.0 + a.1;
    let may = opcode == Opcode::Memmove && allowed.overlap;
    let crossed = writes
        .iter()
        .any(|write| reads.iter().any(|read| meet(read, write)));
    let twice = matches!(writes, [first, second] if meet(first, second));
    (!may && (crossed || twice)).then_some(Status::Overlap)
}
