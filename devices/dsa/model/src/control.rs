//! What software sets of the device, and what the device tells of itself: state, tables, errors.

use crate::board::Board;
use crate::queue::Sequence;
use crate::shape::Shape;
use vmm_dedup_dsa_abi::config::GroupConfig;
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::registers::{DeviceState, ErrorDetails, GeneralStatus, ResetKind, SoftwareError};
use vmm_dedup_dsa_abi::{CommandError, CommandStatus, CommandWord};

/// Words of a group's table.
pub(crate) const GROUP_WORDS: usize = 12;

/// A command that is being done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    pub(crate) word: CommandWord,
    /// Not before this time.
    pub(crate) due: u64,
    /// What it waits for: descriptors up to this number.
    pub(crate) before: Sequence,
}

/// What software reads and writes of the device, its queues' tables aside.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) status: GeneralStatus,
    pub(crate) groups: Vec<[u32; GROUP_WORDS]>,
    pub(crate) permissions: Vec<u32>,
    pub(crate) config: u32,
    pub(crate) interrupts: u32,
    pub(crate) cause: u32,
    pub(crate) error: SoftwareError,
    pub(crate) command: CommandStatus,
    pub(crate) running: Option<Running>,
    /// What PCI's configuration space says.
    pub(crate) bus_master: bool,
    /// The same.
    pub(crate) pasid: bool,
}

impl Control {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self {
            status: GeneralStatus::default(),
            groups: vec![[0; GROUP_WORDS]; shape.groups.groups().into()],
            permissions: vec![0; usize::from(shape.vectors()) * 2],
            config: 0,
            interrupts: 0,
            cause: 0,
            error: SoftwareError::default(),
            command: CommandStatus::default(),
            running: None,
            bus_master: true,
            pasid: true,
        }
    }

    pub(crate) fn state(&self) -> DeviceState {
        self.status.state()
    }

    pub(crate) fn set_state(&mut self, state: DeviceState) {
        self.status = GeneralStatus::new(state, ResetKind::Command);
    }

    pub(crate) fn command_due(&self) -> Option<u64> {
        self.running.map(|running| running.due)
    }

    /// Notes an error that no record tells of.
    pub(crate) fn note_error(&mut self, details: ErrorDetails, board: &dyn Board) {
        if self.error.is_valid() {
            self.error.0[0] |= SoftwareError::OVERFLOW;
        } else {
            self.error = SoftwareError::new(details);
        }
        self.cause |= reg::CAUSE_ERROR;
        if self.interrupts & reg::GENCTRL_SOFTWARE_ERROR != 0 {
            board.interrupt(0);
        }
    }

    pub(crate) fn halt(&mut self, for_good: bool, board: &dyn Board) {
        let reset = if for_good {
            ResetKind::Function
        } else {
            ResetKind::Command
        };
        self.status = GeneralStatus::new(DeviceState::Halted, reset);
        self.cause |= reg::CAUSE_HALT;
        if let Some(running) = self.running.take() {
            self.end_command(running.word, Err(CommandError::Hardware), board);
        }
        if self.interrupts & reg::GENCTRL_HALT != 0 {
            board.interrupt(0);
        }
    }

    pub(crate) fn end_command(
        &mut self,
        word: CommandWord,
        outcome: Result<u16, CommandError>,
        board: &dyn Board,
    ) {
        self.command = CommandStatus::ended(outcome);
        if word.wants_interrupt() {
            self.cause |= reg::CAUSE_COMMAND;
            board.interrupt(0);
        }
    }

    pub(crate) fn group(&self, at: usize) -> GroupConfig {
        let words = &self.groups[at];
        let long = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        GroupConfig {
            queues: std::array::from_fn(|word| long(2 * word)),
            engines: long(8),
            flags: long(10),
        }
    }
}
