//! Registers, tables and commands.

use crate::core::{Board, Core};
use crate::queue::{Queue, Sequence};
use crate::shape::Shape;
use vmm_dedup_dsa_abi::config::{GROUP_STRIDE, GroupConfig, Mode, QUEUE_WORDS, QueueConfig, QueueState};
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::registers::{
    DeviceState, ErrorDetails, GeneralCapability, GeneralStatus, QueueCapability, ResetKind, SoftwareError,
    Tables,
};
use vmm_dedup_dsa_abi::{Command, CommandError, CommandStatus, CommandWord, Pasid};

/// Where the tables are in BAR 0: those of groups, of queues, of permissions for MSI-X, of other interrupts (which is
/// empty). There are no performance counters.
const TABLES: Tables = Tables::new(0x400, 0x1000, 0x3000, 0x4000, 0);
const GROUP_WORDS: usize = 12;

/// A command that is being done.
#[derive(Clone, Copy, Debug)]
struct Running {
    word: CommandWord,
    /// Not before this time.
    due: u64,
    /// What it waits for: descriptors up to this number.
    before: Sequence,
}

/// What software reads and writes of the device, its queues' tables aside.
#[derive(Debug)]
pub(crate) struct Control {
    status: GeneralStatus,
    groups: Vec<[u32; GROUP_WORDS]>,
    permissions: Vec<u32>,
    config: u32,
    interrupts: u32,
    cause: u32,
    error: SoftwareError,
    command: CommandStatus,
    running: Option<Running>,
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

    fn end_command(&mut self, word: CommandWord, outcome: Result<u16, CommandError>, board: &dyn Board) {
        self.command = CommandStatus::ended(outcome);
        if word.wants_interrupt() {
            self.cause |= reg::CAUSE_COMMAND;
            board.interrupt(0);
        }
    }

    fn group(&self, at: usize) -> GroupConfig {
        let words = &self.groups[at];
        let long = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        GroupConfig {
            queues: std::array::from_fn(|word| long(2 * word)),
            engines: long(8),
            flags: long(10),
        }
    }
}

/// The place of a word in one of several tables.
fn entry(offset: u64, table: u64, stride: u64, count: usize) -> Option<(usize, usize)> {
    let from = offset.checked_sub(table)?;
    let at = usize::try_from(from / stride).ok()?;
    let word = usize::try_from(from % stride / 4).ok()?;
    (at < count).then_some((at, word))
}

/// Registers.
impl Core {
    /// Reads from BAR 0 at a time, ns. What no register covers reads as zeros.
    pub fn read(&mut self, offset: u64, into: &mut [u8], now: u64, board: &dyn Board) {
        self.advance(now, board);
        self.read_registers(offset, into);
    }

    /// The same, of the device as it is: it does nothing of what is due.
    pub fn read_registers(&self, offset: u64, into: &mut [u8]) {
        let mut at = offset;
        let mut left = into;
        while !left.is_empty() {
            let byte = usize::try_from(at % 4).unwrap_or(0);
            let word = self.read_word(at - at % 4).to_le_bytes();
            let (part, rest) = left.split_at_mut(left.len().min(4 - byte));
            part.copy_from_slice(&word[byte..byte + part.len()]);
            at = at.saturating_add(part.len() as u64);
            left = rest;
        }
    }

    /// Writes to BAR 0 at a time, ns: whole words of 4 bytes. Others are ignored.
    pub fn write(&mut self, offset: u64, from: &[u8], now: u64, board: &dyn Board) {
        self.advance(now, board);
        self.write_registers(offset, from, now, board);
    }

    /// The same, of the device as it is: it does nothing of what was due before, and accesses no memory.
    pub fn write_registers(&mut self, offset: u64, from: &[u8], now: u64, board: &dyn Board) {
        if !offset.is_multiple_of(4) {
            return;
        }
        let words = from
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        for (at, word) in (offset..).step_by(4).zip(words) {
            self.write_word(at, word, now, board);
        }
    }

    /// PCI's configuration space has changed: whether the device may master the bus, and use PASIDs.
    pub fn set_bus(&mut self, bus_master: bool, pasid: bool) {
        (self.control.bus_master, self.control.pasid) = (bus_master, pasid);
    }

    /// PCI's function level reset: as after power-on.
    pub fn function_reset(&mut self) {
        let (bus_master, pasid) = (self.control.bus_master, self.control.pasid);
        self.drop_all();
        self.queues.fill_with(Queue::default);
        self.control = Control::new(&self.shape);
        self.set_bus(bus_master, pasid);
    }

    fn drop_all(&mut self) {
        self.drop_where(0..self.queues.len(), |_| true, 0);
    }

    #[allow(clippy::cast_possible_truncation)] // words are cut into halves
    fn read_word(&self, offset: u64) -> u32 {
        let half = |word: u64| {
            if offset.is_multiple_of(8) {
                word as u32
            } else {
                (word >> 32) as u32
            }
        };
        let word_of = |words: &[u64], first: u64| {
            let at = usize::try_from((offset - first) / 8).unwrap_or(usize::MAX);
            words.get(at).map_or(0, |word| half(*word))
        };
        let control = &self.control;
        match offset {
            reg::VERSION => self.shape.version,
            0x10..0x18 => half(self.shape.general.0),
            0x20..0x28 => half(self.shape.queues.0),
            0x30..0x38 => half(self.shape.groups.0),
            0x38..0x40 => half(self.shape.engines.into()),
            0x40..0x60 => word_of(&self.shape.operation_bits(), reg::OPCAP),
            0x60..0x70 => word_of(&TABLES.0, reg::TABLES),
            reg::GENCFG => control.config,
            reg::GENCTRL => control.interrupts,
            reg::GENSTS => control.status.0,
            reg::INTCAUSE => control.cause,
            reg::CMDSTS => control.command.0,
            reg::CMDCAP if self.shape.general.has(GeneralCapability::COMMANDS) => Command::ALL
                .iter()
                .fold(0, |bits, command| bits | 1 << *command as u32),
            0xc0..0xe0 => word_of(&control.error.0, reg::SWERR),
            _ => self.read_table(offset),
        }
    }

    fn read_table(&self, offset: u64) -> u32 {
        let control = &self.control;
        let stride = self.shape.queues.config_stride();
        if let Some((at, word)) = entry(offset, TABLES.groups(), GROUP_STRIDE, control.groups.len()) {
            return control.groups[at].get(word).copied().unwrap_or(0);
        }
        if let Some((at, word)) = entry(offset, TABLES.queues(), stride, self.queues.len()) {
            return match word {
                QueueConfig::STATE_WORD => self.queues[at].state_word(),
                word => self.queues[at].config.0.get(word).copied().unwrap_or(0),
            };
        }
        let permission = entry(offset, TABLES.permissions(), 4, control.permissions.len());
        permission.map_or(0, |(at, _)| control.permissions[at])
    }

    fn write_word(&mut self, offset: u64, word: u32, now: u64, board: &dyn Board) {
        let control = &mut self.control;
        match offset {
            reg::GENCFG if control.state() == DeviceState::Disabled => control.config = word,
            reg::GENCTRL => control.interrupts = word,
            reg::INTCAUSE => control.cause &= !word,
            reg::CMD => self.command(CommandWord(word), now, board),
            reg::SWERR => {
                let cleared = u64::from(word) & (SoftwareError::VALID | SoftwareError::OVERFLOW);
                control.error.0[0] &= !cleared;
                if !control.error.is_valid() {
                    control.error = SoftwareError::default();
                }
            }
            _ => self.write_table(offset, word),
        }
    }

    fn write_table(&mut self, offset: u64, value: u32) {
        let control = &mut self.control;
        let off = control.state() == DeviceState::Disabled;
        let stride = self.shape.queues.config_stride();
        if let Some((at, word)) = entry(offset, TABLES.groups(), GROUP_STRIDE, control.groups.len()) {
            if let Some(to) = control.groups[at].get_mut(word).filter(|_| off) {
                *to = value;
            }
        } else if let Some((at, word)) = entry(offset, TABLES.queues(), stride, self.queues.len()) {
            let queue = &mut self.queues[at];
            // Of a queue that is off, on a device that is on, the address space and the threshold can be changed.
            let may = queue.state == QueueState::Disabled && (off || word == 1 || word == 2);
            if may && word < QUEUE_WORDS && word != QueueConfig::STATE_WORD {
                queue.config.0[word] = value;
            }
        } else if let Some((at, _)) = entry(offset, TABLES.permissions(), 4, control.permissions.len()) {
            control.permissions[at] = value;
        }
    }
}

/// Commands.
impl Core {
    fn command(&mut self, word: CommandWord, now: u64, board: &dyn Board) {
        if self.control.running.is_some() {
            return;
        }
        if let Err(error) = self.start(word, now) {
            self.control.end_command(word, Err(error), board);
            return;
        }
        self.control.command = CommandStatus::ACTIVE;
        self.control.running = Some(Running {
            word,
            due: now.saturating_add(self.timing.command_ns),
            before: self.numbers,
        });
        self.progress(now, board);
    }

    /// Checks a command, and begins with it.
    fn start(&mut self, word: CommandWord, now: u64) -> Result<(), CommandError> {
        let command = word.command().map_err(|_| CommandError::Command)?;
        let state = self.control.state();
        if state == DeviceState::Halted {
            let ends = command == Command::ResetDevice && self.control.status.reset() == ResetKind::Command;
            return ends.then_some(()).ok_or(CommandError::Hardware);
        }
        let on = state == DeviceState::Enabled;
        match command {
            Command::EnableDevice => self.check_device()?,
            Command::DisableDevice if !on => return Err(CommandError::NotEnabled),
            Command::DisableDevice => {
                self.set_state(DeviceState::Draining);
                self.each_enabled(|queue| queue.state = QueueState::Draining);
            }
            Command::EnableQueue => self.check_queue(word.operand())?,
            Command::DisableQueue | Command::DrainQueue | Command::AbortQueue | Command::ResetQueue => {
                if !on {
                    return Err(CommandError::QueueNotEnabled);
                }
                for at in word.queues() {
                    let queue = self.queues.get(at).ok_or(CommandError::QueueIndex)?;
                    if queue.state != QueueState::Enabled && command != Command::ResetQueue {
                        return Err(CommandError::QueueNotEnabled);
                    }
                }
                for at in word.queues() {
                    match command {
                        Command::DisableQueue => self.queues[at].state = QueueState::Draining,
                        Command::AbortQueue => self.drop_where(std::iter::once(at), |_| true, now),
                        _ => {}
                    }
                }
            }
            Command::AbortAll => self.drop_all(),
            Command::AbortPasid => {
                let pasid = Pasid::from_low_bits(word.operand());
                self.drop_where(0..self.queues.len(), |space| space == Some(pasid), now);
            }
            Command::RequestInterrupt | Command::ReleaseInterrupt => {
                if !self.shape.general.has(GeneralCapability::COMMANDS) {
                    return Err(CommandError::Command);
                }
                // A handle is the number of its vector; there are none for other interrupts.
                let (index, others) = (word.operand() & 0xffff, word.operand() >> 16 != 0);
                if others || index >= u32::from(self.shape.vectors()) {
                    return Err(CommandError::InterruptIndex);
                }
            }
            Command::ResetDevice | Command::DrainAll | Command::DrainPasid => {}
        }
        Ok(())
    }

    /// Ends the command that is being done, if it can be ended.
    pub(crate) fn progress(&mut self, now: u64, board: &dyn Board) {
        let Some(running) = self.control.running.filter(|running| running.due <= now) else {
            return;
        };
        let word = running.word;
        let Ok(command) = word.command() else {
            return;
        };
        let waits = |queue: &Queue, which: &dyn Fn(Option<Pasid>) -> bool| {
            { queue.outstanding.range(..=running.before) }.any(|(_, space)| which(*space))
        };
        let all = |_: Option<Pasid>| true;
        let busy = match command {
            Command::DisableDevice | Command::DrainAll => self.queues.iter().any(|queue| waits(queue, &all)),
            Command::DisableQueue | Command::DrainQueue => word
                .queues()
                .any(|at| self.queues.get(at).is_some_and(|queue| waits(queue, &all))),
            Command::DrainPasid => {
                let pasid = Pasid::from_low_bits(word.operand());
                let own = |space: Option<Pasid>| space == Some(pasid);
                self.queues.iter().any(|queue| waits(queue, &own))
            }
            _ => false,
        };
        if busy {
            return;
        }
        let result = self.finish(command, word, now);
        self.control.running = None;
        self.control.end_command(word, Ok(result), board);
    }

    fn finish(&mut self, command: Command, word: CommandWord, now: u64) -> u16 {
        match command {
            Command::EnableDevice => self.set_state(DeviceState::Enabled),
            Command::DisableDevice => {
                self.set_state(DeviceState::Disabled);
                self.queues
                    .iter_mut()
                    .for_each(|queue| queue.state = QueueState::Disabled);
            }
            Command::EnableQueue => self.queues[word.operand() as usize].state = QueueState::Enabled,
            Command::DisableQueue => {
                word.queues()
                    .for_each(|at| self.queues[at].state = QueueState::Disabled);
            }
            Command::ResetQueue => {
                for at in word.queues() {
                    self.drop_where(std::iter::once(at), |_| true, now);
                    self.queues[at] = Queue::default();
                }
            }
            Command::ResetDevice => {
                self.drop_all();
                self.queues.fill_with(Queue::default);
                self.control.groups.fill([0; GROUP_WORDS]);
                (self.control.config, self.control.interrupts) = (0, 0);
                self.control.error = SoftwareError::default();
                self.set_state(DeviceState::Disabled);
            }
            Command::RequestInterrupt => return u16::try_from(word.operand() & 0xffff).unwrap_or(0),
            _ => {}
        }
        0
    }

    fn set_state(&mut self, state: DeviceState) {
        self.control.status = GeneralStatus::new(state, ResetKind::Command);
    }

    fn each_enabled(&mut self, change: impl Fn(&mut Queue)) {
        self.queues
            .iter_mut()
            .filter(|queue| queue.state == QueueState::Enabled)
            .for_each(change);
    }

    fn check_device(&self) -> Result<(), CommandError> {
        let control = &self.control;
        if control.state() != DeviceState::Disabled {
            return Err(CommandError::DeviceEnabled);
        }
        if !control.bus_master {
            return Err(CommandError::BusMaster);
        }
        if !control.pasid && self.queues.iter().any(|queue| queue.config.pasid().is_some()) {
            return Err(CommandError::PasidOff);
        }
        let entries: u32 = self
            .queues
            .iter()
            .map(|queue| u32::from(queue.config.entries()))
            .sum();
        if entries > self.shape.queues.entries().into() {
            return Err(CommandError::QueueSizes);
        }
        let (mut queues, mut engines, mut buffers) = ([0; 4], 0, 0);
        for group in (0..control.groups.len()).map(|at| control.group(at)) {
            for (word, (seen, own)) in (0u32..).zip(queues.iter_mut().zip(group.queues)) {
                if *seen & own != 0 || own & !below(self.queues.len(), word) != 0 {
                    return Err(CommandError::GroupQueues);
                }
                *seen |= own;
            }
            if engines & group.engines != 0 || group.engines & !below(self.shape.engines.into(), 0) != 0 {
                return Err(CommandError::GroupEngines);
            }
            engines |= group.engines;
            // Linux leaves engines in groups that have lost their queues; that does no harm.
            if group.engines == 0 && !group.is_empty() {
                return Err(CommandError::GroupHalf);
            }
            buffers += u32::from(group.reserved_buffers());
        }
        if buffers > self.shape.groups.read_buffers().into() {
            return Err(CommandError::GroupBuffers);
        }
        Ok(())
    }

    fn check_queue(&self, operand: u32) -> Result<(), CommandError> {
        if self.control.state() != DeviceState::Enabled {
            return Err(CommandError::DeviceDisabled);
        }
        let at = operand as usize;
        let queue = self.queues.get(at).ok_or(CommandError::QueueIndex)?;
        if queue.state != QueueState::Disabled {
            return Err(CommandError::QueueEnabled);
        }
        let config = &queue.config;
        let (general, able) = (self.shape.general, self.shape.queues);
        let mode_fits = match config.mode() {
            Mode::Dedicated => able.has(QueueCapability::DEDICATED),
            Mode::Shared => {
                let threshold = config.threshold();
                able.has(QueueCapability::SHARED) && threshold > 0 && threshold <= config.entries()
            }
        };
        let grouped = (0..self.control.groups.len())
            .any(|group| self.control.group(group).queues[at / 64] >> (at % 64) & 1 != 0);
        let faults = [
            (config.entries() == 0, CommandError::QueueSize),
            (config.priority() == 0, CommandError::QueuePriority),
            (!mode_fits, CommandError::QueueMode),
            (
                config.block_on_fault() && !general.has(GeneralCapability::BLOCK_ON_FAULT),
                CommandError::BlockOnFault,
            ),
            (
                config.mode() == Mode::Shared && config.pasid().is_none(),
                CommandError::PasidNeeded,
            ),
            (
                !self.control.pasid && config.pasid().is_some(),
                CommandError::PasidOff,
            ),
            (
                config.batch_shift() > general.batch_shift(),
                CommandError::BatchSize,
            ),
            (
                config.transfer_shift() > general.transfer_shift(),
                CommandError::TransferSize,
            ),
            (!grouped, CommandError::Config),
        ];
        let first = faults.into_iter().find(|(is_so, _)| *is_so);
        first.map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// The bits of the 64 from 64 times `word` on that are below a number.
fn below(count: usize, word: u32) -> u64 {
    let left = count.saturating_sub(word as usize * 64);
    if left >= 64 { u64::MAX } else { (1 << left) - 1 }
}
