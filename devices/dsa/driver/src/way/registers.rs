//! Bringing a device up by its registers: for ways that have them.

use super::queue::QueueLimits;
use std::time::{Duration, Instant};
use vmm_dedup_dsa_abi::config::{GROUP_ENGINES, GROUP_FLAGS, GroupConfig, Mode, QueueConfig};
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::registers::{
    DeviceState, ErrorDetails, GeneralCapability, GeneralStatus, QueueCapability, ResetKind, SoftwareError,
    Tables,
};
use vmm_dedup_dsa_abi::{Command, CommandError, CommandStatus, CommandWord, Pasid, wq_mask};

/// How long a command may take. A reset drops what is in flight; a drain waits for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// BAR 0.
pub trait Registers {
    /// Reads a word of 8 bytes.
    fn read(&mut self, offset: u64) -> u64;

    /// Writes a word of 4 bytes.
    fn write(&mut self, offset: u64, value: u32);
}

/// Why a device cannot be brought up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Nothing answers.
    #[error("the device reads as all ones: it is gone, or its memory space is not enabled")]
    Gone,
    /// The tables are fixed.
    #[error("the device cannot be configured")]
    Fixed,
    /// It lacks what was asked for.
    #[error("the device has no {0:?} work queues: ask for the other mode")]
    Mode(Mode),
    /// It refuses.
    #[error("{command:?} failed: {error}")]
    Refused {
        /// What was asked of it.
        command: Command,
        /// Why.
        error: CommandError,
    },
    /// It does not come to an end.
    #[error("{0:?} does not end: reset the device by its PCI function")]
    Hangs(Command),
    /// Only more than a command helps.
    #[error("the device has halted until {0:?} reset")]
    Halted(ResetKind),
}

/// What a queue is to be. By default, a dedicated one of all entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Entries, at most what the device has; all of them if `None`.
    pub entries: Option<u16>,
    /// Whether several use it.
    pub mode: Mode,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            entries: None,
            mode: Mode::Dedicated,
        }
    }
}

/// Resets a device and configures one queue: number 0, in group 0 with all engines, for all operations that the device has.
///
/// # Errors
/// [`SetupError`].
pub fn bring_up(device: &mut dyn Registers, wanted: Wanted) -> Result<QueueLimits, SetupError> {
    reset(device)?;
    let general = GeneralCapability(device.read(reg::GENCAP));
    let queues = QueueCapability(device.read(reg::WQCAP));
    if !general.has(GeneralCapability::CONFIGURABLE) {
        return Err(SetupError::Fixed);
    }
    let mode = match wanted.mode {
        Mode::Shared => QueueCapability::SHARED,
        Mode::Dedicated => QueueCapability::DEDICATED,
    };
    if !queues.has(mode) {
        return Err(SetupError::Mode(wanted.mode));
    }
    let engines = device.read(reg::ENGCAP) & 0xff;
    let operations = [0, 8, 16, 24].map(|at| device.read(reg::OPCAP + at));
    let entries = wanted.entries.unwrap_or(u16::MAX).min(queues.entries());
    let queue = QueueConfig::new(entries, entries, wanted.mode, 10)
        .with_limits(general.transfer_shift(), general.batch_shift())
        .with_operations(operations);
    // A shared queue takes the address space from the descriptor; the kernel's are of number 0.
    let queue = match wanted.mode {
        Mode::Shared => queue.with_pasid(Pasid::from_low_bits(0)),
        Mode::Dedicated => queue,
    };
    let all_engines = if engines >= 64 {
        u64::MAX
    } else {
        (1 << engines) - 1
    };
    let group = GroupConfig::new(1, all_engines);
    let tables = Tables([device.read(reg::TABLES), device.read(reg::TABLES + 8)]);
    write_long(device, tables.groups(), group.queues[0]);
    write_long(device, tables.groups() + GROUP_ENGINES, group.engines);
    write_long(device, tables.groups() + GROUP_FLAGS, group.flags);
    let words = usize::try_from(queues.config_stride() / 4).unwrap_or(usize::MAX);
    for (at, word) in (tables.queues()..).step_by(4).zip(queue.0).take(words) {
        device.write(at, word);
    }
    command(device, Command::EnableDevice, 0)?;
    command(device, Command::EnableQueue, 0)?;
    Ok(QueueLimits {
        entries: entries.into(),
        members: 1 << general.batch_shift(),
        bytes: 1 << general.transfer_shift(),
        operations,
        node: None,
    })
}

/// Drops what a device has, and its configuration.
///
/// # Errors
/// [`SetupError`].
pub fn reset(device: &mut dyn Registers) -> Result<(), SetupError> {
    if device.read(reg::GENCAP) == u64::MAX {
        return Err(SetupError::Gone);
    }
    let status = general_status(device);
    if status.state() == DeviceState::Halted && status.reset() != ResetKind::Command {
        return Err(SetupError::Halted(status.reset()));
    }
    command(device, Command::ResetDevice, 0).map(drop)
}

/// Drops what queue 0 has; it stays enabled. When that returns without an error the device accesses nothing any more that
/// those descriptors named, and writes none of their records.
///
/// # Errors
/// [`SetupError`]: then only [`reset`] helps.
pub fn abort(device: &mut dyn Registers) -> Result<(), SetupError> {
    if device.read(reg::GENCAP) == u64::MAX {
        return Err(SetupError::Gone);
    }
    command(device, Command::AbortQueue, wq_mask(0)).map(drop)
}

/// Gives a command and waits for its end.
///
/// # Errors
/// [`SetupError::Refused`], [`SetupError::Hangs`].
pub fn command(device: &mut dyn Registers, command: Command, operand: u32) -> Result<u16, SetupError> {
    let deadline = Instant::now() + PATIENCE;
    device.write(reg::CMD, CommandWord::new(command, operand, false).0);
    loop {
        let status = CommandStatus(low_half(device.read(reg::CMDSTS)));
        if !status.is_active() {
            return status
                .outcome()
                .map_err(|error| SetupError::Refused { command, error });
        }
        if Instant::now() > deadline {
            return Err(SetupError::Hangs(command));
        }
        std::thread::yield_now();
    }
}

/// What the device is doing.
pub(super) fn general_status(device: &mut dyn Registers) -> GeneralStatus {
    GeneralStatus(low_half(device.read(reg::GENSTS)))
}

/// The software error that is noted, if one is; it is cleared.
pub(super) fn take_software_error(device: &mut dyn Registers) -> Option<ErrorDetails> {
    let error = SoftwareError([0, 8, 16, 24].map(|at| device.read(reg::SWERR + at)));
    let details = error.details()?;
    let cleared = SoftwareError::VALID | SoftwareError::OVERFLOW;
    device.write(reg::SWERR, low_half(cleared));
    Some(details)
}

fn write_long(device: &mut dyn Registers, offset: u64, value: u64) {
    device.write(offset, low_half(value));
    device.write(offset + 4, low_half(value >> 32));
}

#[allow(clippy::cast_possible_truncation)] // the low half is meant
fn low_half(word: u64) -> u32 {
    word as u32
}
