//! Commands, which change the state of the device or of its queues.

/// Commands (Linux, registers.h, `enum idxd_cmd`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Command {
    /// Checks the configuration and takes the device into use.
    EnableDevice = 1,
    /// Waits for all descriptors, and puts device and queues out of use.
    DisableDevice = 2,
    /// Waits for all descriptors.
    DrainAll = 3,
    /// Drops all descriptors.
    AbortAll = 4,
    /// Drops all descriptors and the configuration.
    ResetDevice = 5,
    /// Checks a queue's configuration and takes it into use.
    EnableQueue = 6,
    /// Waits for the queues' descriptors, and puts the queues out of use.
    DisableQueue = 7,
    /// Waits for the queues' descriptors.
    DrainQueue = 8,
    /// Drops the queues' descriptors.
    AbortQueue = 9,
    /// Drops the queues' descriptors and their configuration.
    ResetQueue = 10,
    /// Waits for the descriptors of an address space.
    DrainPasid = 11,
    /// Drops the descriptors of an address space.
    AbortPasid = 12,
    /// Gives a handle for an interrupt.
    RequestInterrupt = 13,
    /// Takes one back.
    ReleaseInterrupt = 14,
}

impl Command {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::EnableDevice,
        Self::DisableDevice,
        Self::DrainAll,
        Self::AbortAll,
        Self::ResetDevice,
        Self::EnableQueue,
        Self::DisableQueue,
        Self::DrainQueue,
        Self::AbortQueue,
        Self::ResetQueue,
        Self::DrainPasid,
        Self::AbortPasid,
        Self::RequestInterrupt,
        Self::ReleaseInterrupt,
    ];

    /// The command of this number, if there is one.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|command| *command as u32 == code)
    }
}

/// The register CMD: operand in bits 19:0, command in 24:20, an interrupt is asked for in 31 (registers.h,
/// `union idxd_command_reg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandWord(pub u32);

impl CommandWord {
    const OPERAND_MASK: u32 = (1 << 20) - 1;

    /// A command.
    #[must_use]
    pub fn new(command: Command, operand: u32, interrupt: bool) -> Self {
        Self(operand & Self::OPERAND_MASK | (command as u32) << 20 | u32::from(interrupt) << 31)
    }

    /// The command, or the number that is none.
    ///
    /// # Errors
    /// If it is none.
    pub fn command(self) -> Result<Command, u32> {
        let code = self.0 >> 20 & 0x1f;
        Command::from_code(code).ok_or(code)
    }

    /// Its operand.
    #[must_use]
    pub fn operand(self) -> u32 {
        self.0 & Self::OPERAND_MASK
    }

    /// Whether an interrupt is to tell of the end.
    #[must_use]
    pub fn wants_interrupt(self) -> bool {
        self.0 >> 31 != 0
    }

    /// The queues that an operand means, of commands that take several: a bit each in bits 15:0, for the sixteen queues
    /// from 16 times bits 19:16 on.
    pub fn queues(self) -> impl Iterator<Item = usize> {
        let (bits, first) = (self.operand() & 0xffff, (self.operand() >> 16) as usize * 16);
        (0..16)
            .filter(move |bit| bits >> bit & 1 != 0)
            .map(move |bit| first + bit)
    }
}

/// The operand for one queue, of commands that take several.
#[must_use]
pub fn wq_mask(queue: u8) -> u32 {
    1 << (queue % 16) | u32::from(queue / 16) << 16
}

/// Why a command failed (registers.h, `enum idxd_cmdsts_err`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
#[repr(u8)]
pub enum CommandError {
    /// No such command, or not one of this device.
    #[error("the device does not know this command")]
    Command = 0x01,
    /// No such queue.
    #[error("the device has no such work queue")]
    QueueIndex = 0x02,
    /// The device is broken.
    #[error("the device failed: reset it")]
    Hardware = 0x03,
    /// It is in use already.
    #[error("the device is enabled already")]
    DeviceEnabled = 0x10,
    /// Some table is wrong.
    #[error("the configuration is wrong")]
    Config = 0x11,
    /// PCI's command register does not allow it to reach memory.
    #[error("the device may not master the bus: set that bit in PCI's command register")]
    BusMaster = 0x12,
    /// PASIDs are used, and PCI's capability is not enabled.
    #[error("a work queue wants a PASID, which is not enabled in PCI's capability")]
    PasidOff = 0x13,
    /// The queues are larger than all entries there are.
    #[error("the work queues have more entries together than the device")]
    QueueSizes = 0x14,
    /// A group names a queue that there is not, or that another group has.
    #[error("a group has a work queue that there is not, or that another group has")]
    GroupQueues = 0x15,
    /// A group names an engine that there is not, or that another group has.
    #[error("a group has an engine that there is not, or that another group has")]
    GroupEngines = 0x16,
    /// A group with queues has no engine, or the other way.
    #[error("a group has work queues and no engine, or engines and no work queue")]
    GroupHalf = 0x17,
    /// A group's read buffers or classes.
    #[error("a group has more read buffers than there are")]
    GroupBuffers = 0x18,
    /// The device is not in use.
    #[error("the device is not enabled")]
    DeviceDisabled = 0x20,
    /// The queue is.
    #[error("the work queue is enabled already")]
    QueueEnabled = 0x21,
    /// The queue has no entries.
    #[error("the work queue has no entries")]
    QueueSize = 0x22,
    /// The queue's priority is 0.
    #[error("the work queue has no priority: give it 1 to 15")]
    QueuePriority = 0x23,
    /// The queue is of a kind that the device does not have, or a shared one without a threshold.
    #[error("the work queue's mode is not one of the device's, or it is shared and has no threshold")]
    QueueMode = 0x24,
    /// The device cannot block on faults.
    #[error("the work queue is to block on faults, which the device cannot")]
    BlockOnFault = 0x25,
    /// A shared queue needs PASIDs.
    #[error("the work queue is shared and has no PASID enabled")]
    PasidNeeded = 0x26,
    /// The queue's batches are longer than the device's.
    #[error("the work queue's batches are longer than the device's")]
    BatchSize = 0x27,
    /// The queue's transfers are longer than the device's.
    #[error("the work queue's transfers are longer than the device's")]
    TransferSize = 0x28,
    /// The device was not in use.
    #[error("the device is not enabled, and so cannot be disabled")]
    NotEnabled = 0x31,
    /// The device, or one of the queues, is not in use.
    #[error("a work queue is not enabled")]
    QueueNotEnabled = 0x32,
    /// No such interrupt.
    #[error("the device has no such interrupt")]
    InterruptIndex = 0x41,
    /// All handles are given away.
    #[error("the device has no handle left")]
    NoHandle = 0x42,
}

impl CommandError {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::Command,
        Self::QueueIndex,
        Self::Hardware,
        Self::DeviceEnabled,
        Self::Config,
        Self::BusMaster,
        Self::PasidOff,
        Self::QueueSizes,
        Self::GroupQueues,
        Self::GroupEngines,
        Self::GroupHalf,
        Self::GroupBuffers,
        Self::DeviceDisabled,
        Self::QueueEnabled,
        Self::QueueSize,
        Self::QueuePriority,
        Self::QueueMode,
        Self::BlockOnFault,
        Self::PasidNeeded,
        Self::BatchSize,
        Self::TransferSize,
        Self::NotEnabled,
        Self::QueueNotEnabled,
        Self::InterruptIndex,
        Self::NoHandle,
    ];

    /// The error of this number, if there is one.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|error| *error as u8 == code)
    }
}

/// The register CMDSTS: error in bits 7:0, result in 23:8, still busy in 31 (registers.h, `union cmdsts_reg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandStatus(pub u32);

impl CommandStatus {
    /// A command is being done.
    pub const ACTIVE: Self = Self(1 << 31);

    /// That of a command that ended so.
    #[must_use]
    pub fn ended(outcome: Result<u16, CommandError>) -> Self {
        match outcome {
            Ok(result) => Self(u32::from(result) << 8),
            Err(error) => Self(error as u32),
        }
    }

    /// Whether a command is being done.
    #[must_use]
    pub fn is_active(self) -> bool {
        self.0 & Self::ACTIVE.0 != 0
    }

    /// How the last command ended: its result.
    ///
    /// # Errors
    /// Why it failed. A number that is not known is taken for [`CommandError::Hardware`].
    pub fn outcome(self) -> Result<u16, CommandError> {
        let [code, low, high, _] = self.0.to_le_bytes();
        match code {
            0 => Ok(u16::from_le_bytes([low, high])),
            code => Err(CommandError::from_code(code).unwrap_or(CommandError::Hardware)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_command_operand_and_interrupt() {
        let word = CommandWord::new(Command::DrainQueue, wq_mask(19), true);
        assert_eq!(word.0, 0x8081_0008);
        assert_eq!(
            (word.command(), word.wants_interrupt()),
            (Ok(Command::DrainQueue), true)
        );
        assert_eq!(word.queues().collect::<Vec<_>>(), [19]);
        assert_eq!(CommandWord(0x01f0_0000).command(), Err(0x1f));
    }

    #[test]
    fn a_status_tells_result_or_error() {
        assert_eq!(CommandStatus::ended(Ok(0x1234)).outcome(), Ok(0x1234));
        for error in CommandError::ALL {
            assert_eq!(CommandStatus::ended(Err(error)).outcome(), Err(error));
        }
        assert!(CommandStatus::ACTIVE.is_active());
    }
}
