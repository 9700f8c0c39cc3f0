//! Registers: BAR 0 (Linux, drivers/dma/idxd/registers.h; all little-endian).
//!
//! | offset | register | |
//! | --- | --- | --- |
//! | 0x00 | VERSION | 0x100, 0x200 |
//! | 0x10 | GENCAP | [`GeneralCapability`] |
//! | 0x20 | WQCAP | [`QueueCapability`] |
//! | 0x30 | GRPCAP | [`GroupCapability`] |
//! | 0x38 | ENGCAP | engines in bits 7:0 |
//! | 0x40 | OPCAP | 256 bits, one for each [operation](crate::Opcode) |
//! | 0x60 | TABLES | [`Tables`]: where the tables begin |
//! | 0x80 | GENCFG | read buffers, event log |
//! | 0x88 | GENCTRL | which events raise interrupts |
//! | 0x90 | GENSTS | [`DeviceState`], [`ResetKind`] |
//! | 0x98 | INTCAUSE | why vector 0 was raised; ones written clear bits |
//! | 0xa0 | CMD | [`CommandWord`](crate::CommandWord) |
//! | 0xa8 | CMDSTS | [`CommandStatus`](crate::CommandStatus) |
//! | 0xb0 | CMDCAP | a bit for each command |
//! | 0xc0 | SWERR | [`SoftwareError`], 32 bytes |
//! | 0xe0 | EVLCFG | event log |
//! | 0xf0 | EVLSTATUS | |

/// Vendor of all of them.
pub const VENDOR: u16 = 0x8086;
/// Device: Sapphire Rapids, Emerald Rapids.
pub const DEVICE_SPR: u16 = 0x0b25;
/// Device: Granite Rapids.
pub const DEVICE_GNR: u16 = 0x11fb;
/// Device: Diamond Rapids.
pub const DEVICE_DMR: u16 = 0x1212;

/// Bytes of BAR 0.
pub const REGISTERS_BYTES: u64 = 64 << 10;

/// VERSION.
pub const VERSION: u64 = 0x00;
/// GENCAP.
pub const GENCAP: u64 = 0x10;
/// WQCAP.
pub const WQCAP: u64 = 0x20;
/// GRPCAP.
pub const GRPCAP: u64 = 0x30;
/// ENGCAP.
pub const ENGCAP: u64 = 0x38;
/// OPCAP.
pub const OPCAP: u64 = 0x40;
/// TABLES.
pub const TABLES: u64 = 0x60;
/// GENCFG.
pub const GENCFG: u64 = 0x80;
/// GENCTRL.
pub const GENCTRL: u64 = 0x88;
/// GENSTS.
pub const GENSTS: u64 = 0x90;
/// INTCAUSE.
pub const INTCAUSE: u64 = 0x98;
/// CMD.
pub const CMD: u64 = 0xa0;
/// CMDSTS.
pub const CMDSTS: u64 = 0xa8;
/// CMDCAP.
pub const CMDCAP: u64 = 0xb0;
/// SWERR.
pub const SWERR: u64 = 0xc0;
/// EVLCFG.
pub const EVLCFG: u64 = 0xe0;
/// EVLSTATUS.
pub const EVLSTATUS: u64 = 0xf0;

/// GENCTRL: errors of software ([`SoftwareError`]) raise an interrupt.
pub const GENCTRL_SOFTWARE_ERROR: u32 = 1;
/// GENCTRL: a halt does.
pub const GENCTRL_HALT: u32 = 2;

/// INTCAUSE: a [`SoftwareError`] was noted.
pub const CAUSE_ERROR: u32 = 1;
/// INTCAUSE: a command has ended.
pub const CAUSE_COMMAND: u32 = 2;
/// INTCAUSE: a queue's occupancy is below its limit.
pub const CAUSE_OCCUPANCY: u32 = 4;
/// INTCAUSE: the device has halted.
pub const CAUSE_HALT: u32 = 0x10;

/// Bits `low..low + bits` of a word.
const fn field(word: u64, low: u32, bits: u32) -> u64 {
    word >> low & ((1 << bits) - 1)
}

#[allow(clippy::cast_possible_truncation)] // 8 bits
const fn byte(word: u64, low: u32) -> u8 {
    field(word, low, 8) as u8
}

/// GENCAP (`union gen_cap_reg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneralCapability(pub u64);

impl GeneralCapability {
    /// Descriptors may block on faults.
    pub const BLOCK_ON_FAULT: u64 = 1;
    /// Copies may overlap.
    pub const OVERLAP: u64 = 1 << 1;
    /// Writes can be led to memory.
    pub const CACHE_CONTROL_MEMORY: u64 = 1 << 2;
    /// CMDCAP is there.
    pub const COMMANDS: u64 = 1 << 4;
    /// Destinations can be read back.
    pub const DESTINATION_READBACK: u64 = 1 << 8;
    /// Tables can be written.
    pub const CONFIGURABLE: u64 = 1 << 31;

    /// A device that can do all of these, with transfers and batches of at most 2 to these powers.
    #[must_use]
    pub const fn new(bits: u64, transfer_shift: u8, batch_shift: u8) -> Self {
        Self(bits | (transfer_shift as u64 & 0x1f) << 16 | (batch_shift as u64 & 0xf) << 21)
    }

    /// Whether it can do all of these.
    #[must_use]
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// Transfers are of at most 2 to this power bytes.
    #[must_use]
    pub const fn transfer_shift(self) -> u8 {
        byte(self.0, 16) & 0x1f
    }

    /// Batches are of at most 2 to this power descriptors.
    #[must_use]
    pub const fn batch_shift(self) -> u8 {
        byte(self.0, 21) & 0xf
    }
}

/// WQCAP (`union wq_cap_reg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCapability(pub u64);

impl QueueCapability {
    /// Queues can be shared.
    pub const SHARED: u64 = 1 << 48;
    /// Queues can be dedicated.
    pub const DEDICATED: u64 = 1 << 49;
    /// Queues say whether they use ATS.
    pub const ATS: u64 = 1 << 50;
    /// Queues have priorities.
    pub const PRIORITY: u64 = 1 << 51;
    /// Queues tell how full they are.
    pub const OCCUPANCY: u64 = 1 << 52;
    /// Queues say which operations they do; their tables have 64 bytes.
    pub const OPERATIONS: u64 = 1 << 54;
    /// Queues say whether they use PRS.
    pub const PRS: u64 = 1 << 55;

    /// So many queues and entries in all; a queue's table has 2 to the power of `config_shift` + 5 bytes.
    #[must_use]
    pub const fn new(bits: u64, entries: u16, queues: u8, config_shift: u8) -> Self {
        Self(bits | entries as u64 | (queues as u64) << 16 | (config_shift as u64 & 0xf) << 24)
    }

    /// Whether it has all of these.
    #[must_use]
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// Entries of all queues together.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // 16 bits
    pub const fn entries(self) -> u16 {
        field(self.0, 0, 16) as u16
    }

    /// Queues.
    #[must_use]
    pub const fn queues(self) -> u8 {
        byte(self.0, 16)
    }

    /// Bytes from one queue's table to the next.
    #[must_use]
    pub const fn config_stride(self) -> u64 {
        1 << (field(self.0, 24, 4) + 5)
    }
}

/// GRPCAP (`union group_cap_reg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCapability(pub u64);

impl GroupCapability {
    /// So many groups and read buffers.
    #[must_use]
    pub const fn new(groups: u8, read_buffers: u8) -> Self {
        // Read buffers can be reserved and limited.
        Self(groups as u64 | (read_buffers as u64) << 8 | 3 << 16)
    }

    /// Groups.
    #[must_use]
    pub const fn groups(self) -> u8 {
        byte(self.0, 0)
    }

    /// Read buffers of all groups together.
    #[must_use]
    pub const fn read_buffers(self) -> u8 {
        byte(self.0, 8)
    }
}

/// TABLES: where the tables begin in BAR 0, in units of 256 bytes (`union offsets_reg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables(pub [u64; 2]);

impl Tables {
    const UNIT: u64 = 0x100;

    /// Tables at these offsets, multiples of 256.
    #[must_use]
    pub const fn new(groups: u64, queues: u64, permissions: u64, ims: u64, performance: u64) -> Self {
        Self([
            (groups / Self::UNIT)
                | ((queues / Self::UNIT) << 16)
                | ((permissions / Self::UNIT) << 32)
                | ((ims / Self::UNIT) << 48),
            performance / Self::UNIT,
        ])
    }

    /// The groups'.
    #[must_use]
    pub const fn groups(self) -> u64 {
        field(self.0[0], 0, 16) * Self::UNIT
    }

    /// The queues'.
    #[must_use]
    pub const fn queues(self) -> u64 {
        field(self.0[0], 16, 16) * Self::UNIT
    }

    /// Which PASIDs may raise which vectors of MSI-X.
    #[must_use]
    pub const fn permissions(self) -> u64 {
        field(self.0[0], 32, 16) * Self::UNIT
    }
}

/// What the device is doing (GENSTS bits 1:0).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum DeviceState {
    /// Nothing; it can be configured.
    #[default]
    Disabled = 0,
    /// It takes descriptors.
    Enabled = 1,
    /// It is on its way to being disabled.
    Draining = 2,
    /// It failed, and has dropped what it had; see [`ResetKind`].
    Halted = 3,
}

/// What ends a halt (GENSTS bits 3:2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ResetKind {
    /// The command.
    #[default]
    Command = 0,
    /// PCI's function level reset.
    Function = 1,
    /// A warm reset of the machine.
    Warm = 2,
    /// A cold one.
    Cold = 3,
}

/// GENSTS (`union gensts_reg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneralStatus(pub u32);

impl GeneralStatus {
    /// Such a state.
    #[must_use]
    pub const fn new(state: DeviceState, reset: ResetKind) -> Self {
        Self(state as u32 | (reset as u32) << 2)
    }

    /// What the device is doing.
    #[must_use]
    pub const fn state(self) -> DeviceState {
        match self.0 & 3 {
            0 => DeviceState::Disabled,
            1 => DeviceState::Enabled,
            2 => DeviceState::Draining,
            _ => DeviceState::Halted,
        }
    }

    /// What ends a halt.
    #[must_use]
    pub const fn reset(self) -> ResetKind {
        match self.0 >> 2 & 3 {
            0 => ResetKind::Command,
            1 => ResetKind::Function,
            2 => ResetKind::Warm,
            _ => ResetKind::Cold,
        }
    }
}

/// SWERR: an error that no completion record tells of (`union sw_err_reg`). It stays until software clears it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftwareError(pub [u64; 4]);

/// What a [`SoftwareError`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorDetails {
    /// The number of a [`Status`](crate::Status), or one of [`SoftwareError`]'s own.
    pub error: u8,
    /// The queue, if it is known.
    pub queue: Option<u8>,
    /// The descriptor's operation and address space, if it is known.
    pub operation: Option<(u8, u32)>,
    /// Its place in a batch, if it was in one.
    pub batch_index: Option<u16>,
    /// Whether a fault was a write.
    pub write: bool,
    /// Where that was.
    pub fault_address: u64,
}

impl SoftwareError {
    /// The register holds an error.
    pub const VALID: u64 = 1;
    /// Others came when it did, and are lost.
    pub const OVERFLOW: u64 = 2;

    /// A descriptor was written to a queue that is not enabled. The number is this project's: Linux prints what it reads.
    pub const QUEUE_DISABLED: u8 = 0x51;
    /// A descriptor was written to a dedicated queue that was full, and is lost. The number is this project's.
    pub const QUEUE_FULL: u8 = 0x52;
    /// Something else than 64 bytes was written to a portal. The number is this project's.
    pub const PORTAL: u8 = 0x53;

    /// That of these details.
    #[must_use]
    pub fn new(details: ErrorDetails) -> Self {
        let bit = |set: bool, at: u32| u64::from(set) << at;
        let (operation, pasid) = details.operation.unwrap_or_default();
        Self([
            Self::VALID
                | bit(details.operation.is_some(), 2)
                | bit(details.queue.is_some(), 3)
                | bit(details.batch_index.is_some(), 4)
                | bit(details.write, 5)
                | u64::from(details.error) << 8
                | u64::from(details.queue.unwrap_or(0)) << 16
                | u64::from(operation) << 32
                | u64::from(pasid & 0xf_ffff) << 40,
            u64::from(details.batch_index.unwrap_or(0)),
            details.fault_address,
            0,
        ])
    }

    /// Whether it holds an error.
    #[must_use]
    pub fn is_valid(self) -> bool {
        self.0[0] & Self::VALID != 0
    }

    /// What it says.
    #[must_use]
    pub fn details(self) -> Option<ErrorDetails> {
        let [first, second, fault_address, _] = self.0;
        let bit = |at: u32| first >> at & 1 != 0;
        #[allow(clippy::cast_possible_truncation)] // 20 and 16 bits
        let (pasid, index) = (field(first, 40, 20) as u32, field(second, 0, 16) as u16);
        self.is_valid().then(|| ErrorDetails {
            error: byte(first, 8),
            queue: bit(3).then(|| byte(first, 16)),
            operation: bit(2).then(|| (byte(first, 32), pasid)),
            batch_index: bit(4).then_some(index),
            write: bit(5),
            fault_address,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sapphire Rapids, as Linux prints it.
    const SPR: GeneralCapability = GeneralCapability(0x40_915f_0107);

    #[test]
    fn a_real_devices_capabilities_are_read() {
        assert_eq!((SPR.transfer_shift(), SPR.batch_shift()), (31, 10));
        let (can, cannot) = (GeneralCapability::BLOCK_ON_FAULT, GeneralCapability::COMMANDS);
        assert_eq!((SPR.has(can), SPR.has(cannot)), (true, false));
        let same = GeneralCapability::new(SPR.0 & !0x1ff_0000, 31, 10);
        assert_eq!(same, SPR);
    }

    #[test]
    fn queues_and_groups_are_counted() {
        let queues = QueueCapability::new(QueueCapability::SHARED, 128, 8, 1);
        assert_eq!(
            (queues.entries(), queues.queues(), queues.config_stride()),
            (128, 8, 64)
        );
        let groups = GroupCapability::new(4, 96);
        assert_eq!((groups.groups(), groups.read_buffers()), (4, 96));
        let tables = Tables::new(0x400, 0x500, 0x600, 0x700, 0x800);
        assert_eq!(
            (tables.groups(), tables.queues(), tables.permissions()),
            (0x400, 0x500, 0x600)
        );
    }

    #[test]
    fn a_status_has_state_and_reset() {
        let halted = GeneralStatus::new(DeviceState::Halted, ResetKind::Function);
        assert_eq!(
            (halted.state(), halted.reset()),
            (DeviceState::Halted, ResetKind::Function)
        );
        assert_eq!(halted.0, 7);
    }

    #[test]
    fn an_error_tells_its_details() {
        let details = ErrorDetails {
            error: 0x1a,
            queue: Some(3),
            operation: Some((5, 0xa_bcde)),
            batch_index: Some(700),
            write: true,
            fault_address: 0x1234_5000,
        };
        let error = SoftwareError::new(details);
        assert_eq!(error.details(), Some(details));
        // Linux, registers.h: the error is the second byte, the queue the third, the operation the fifth.
        assert_eq!(error.0[0] & 0xff_00ff_ff00, 0x05_0003_1a00);
        assert_eq!(SoftwareError::default().details(), None);
    }
}
