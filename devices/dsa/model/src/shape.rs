//! What a device can do, and how long it takes.

use vmm_dedup_dsa_abi::Opcode;
use vmm_dedup_dsa_abi::registers::{DEVICE_SPR, GeneralCapability, GroupCapability, QueueCapability};

/// What a device can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// PCI's number of the device.
    pub device: u16,
    /// VERSION.
    pub version: u32,
    /// GENCAP.
    pub general: GeneralCapability,
    /// WQCAP.
    pub queues: QueueCapability,
    /// GRPCAP.
    pub groups: GroupCapability,
    /// Engines, at most 64.
    pub engines: u8,
    /// The operations.
    pub operations: Vec<Opcode>,
}

impl Shape {
    /// Sapphire Rapids: figures as Linux prints them for such a machine.
    #[must_use]
    pub fn sapphire_rapids() -> Self {
        use GeneralCapability as General;
        let general = General::BLOCK_ON_FAULT
            | General::OVERLAP
            | General::CACHE_CONTROL_MEMORY
            | General::DESTINATION_READBACK
            | General::CONFIGURABLE;
        let queues = QueueCapability::SHARED
            | QueueCapability::DEDICATED
            | QueueCapability::ATS
            | QueueCapability::PRIORITY
            | QueueCapability::OCCUPANCY
            | QueueCapability::OPERATIONS
            | QueueCapability::PRS;
        Self {
            device: DEVICE_SPR,
            version: 0x100,
            general: General::new(general, 31, 10),
            queues: QueueCapability::new(queues, 128, 8, 1),
            groups: GroupCapability::new(4, 96),
            engines: 4,
            // Sapphire Rapids does not fetch translations.
            operations: { Opcode::ALL.into_iter() }
                .filter(|opcode| *opcode != Opcode::TranslationFetch)
                .collect(),
        }
    }

    /// A device that does all operations known here, and takes commands for interrupt handles.
    #[must_use]
    pub fn everything() -> Self {
        let shape = Self::sapphire_rapids();
        Self {
            version: 0x200,
            general: GeneralCapability(shape.general.0 | GeneralCapability::COMMANDS),
            operations: Opcode::ALL.to_vec(),
            ..shape
        }
    }

    /// OPCAP: a bit for each operation.
    #[must_use]
    pub fn operation_bits(&self) -> [u64; 4] {
        let mut words = [0; 4];
        for (word, bit) in self.operations.iter().map(|opcode| opcode.capability()) {
            words[word] |= 1 << bit;
        }
        words
    }

    /// Vectors of MSI-X: one for the device, and one for each queue.
    #[must_use]
    pub fn vectors(&self) -> u16 {
        u16::from(self.queues.queues()) + 1
    }
}

/// How long things take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From the submission of a descriptor to its completion record, besides the transfer itself, ns.
    pub latency_ns: u64,
    /// Bytes that the device reads in a microsecond, or writes where an operation does not read.
    pub bytes_per_us: u64,
    /// From the beginning of a batch until its first member begins, ns.
    pub list_ns: u64,
    /// A command, ns.
    pub command_ns: u64,
}

impl Timing {
    /// No time at all.
    pub const NONE: Self = Self {
        latency_ns: 0,
        bytes_per_us: u64::MAX,
        list_ns: 0,
        command_ns: 0,
    };

    /// As published for Sapphire Rapids: about 30 GB/s a device; 1,024 comparisons of pages in about 270 us and as many
    /// CRCs in 136 us (Para-ksm, ATC'25, table of latencies), of which both figures follow; a 4 KiB operation that
    /// somebody waits for takes about as long as the CPU does, which gives the latency.
    pub const PUBLISHED: Self = Self {
        latency_ns: 800,
        bytes_per_us: 31_000,
        list_ns: 300,
        command_ns: 5_000,
    };

    /// Time for so many bytes, ns.
    #[must_use]
    pub fn transfer_ns(&self, bytes: u64) -> u64 {
        let ns = u128::from(bytes) * 1000 / u128::from(self.bytes_per_us.max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}
