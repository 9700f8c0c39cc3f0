//! Commands: what they check, what they wait for, what they change.

use crate::board::Board;
use crate::control::{GROUP_WORDS, Running};
use crate::queue::Queue;
use crate::works::Works;
use vmm_dedup_dsa_abi::config::{Mode, QueueState};
use vmm_dedup_dsa_abi::registers::{
    DeviceState, GeneralCapability, QueueCapability, ResetKind, SoftwareError,
};
use vmm_dedup_dsa_abi::{Command, CommandError, CommandStatus, CommandWord, Pasid};

/// A command is written to its register.
pub(crate) fn command(works: &mut Works, word: CommandWord, now: u64, board: &dyn Board) {
    if works.control.running.is_some() {
        return;
    }
    if let Err(error) = start(works, word, now) {
        works.control.end_command(word, Err(error), board);
        return;
    }
    works.control.command = CommandStatus::ACTIVE;
    works.control.running = Some(Running {
        word,
        due: now.saturating_add(works.timing.command_ns),
        before: works.numbers,
    });
    progress(works, now, board);
}

/// Checks a command, and begins with it.
fn start(works: &mut Works, word: CommandWord, now: u64) -> Result<(), CommandError> {
    let command = word.command().map_err(|_| CommandError::Command)?;
    let state = works.control.state();
    if state == DeviceState::Halted {
        let ends = command == Command::ResetDevice && works.control.status.reset() == ResetKind::Command;
        return ends.then_some(()).ok_or(CommandError::Hardware);
    }
    let on = state == DeviceState::Enabled;
    match command {
        Command::EnableDevice => check_device(works)?,
        Command::DisableDevice if !on => return Err(CommandError::NotEnabled),
        Command::DisableDevice => {
            works.control.set_state(DeviceState::Draining);
            each_enabled(works, |queue| queue.state = QueueState::Draining);
        }
        Command::EnableQueue => check_queue(works, word.operand())?,
        Command::DisableQueue | Command::DrainQueue | Command::AbortQueue | Command::ResetQueue => {
            if !on {
                return Err(CommandError::QueueNotEnabled);
            }
            for at in word.queues() {
                let queue = works.queues.get(at).ok_or(CommandError::QueueIndex)?;
                if queue.state != QueueState::Enabled && command != Command::ResetQueue {
                    return Err(CommandError::QueueNotEnabled);
                }
            }
            for at in word.queues() {
                match command {
                    Command::DisableQueue => works.queues[at].state = QueueState::Draining,
                    Command::AbortQueue => works.drop_where(std::iter::once(at), |_| true, now),
                    _ => {}
                }
            }
        }
        Command::AbortAll => works.drop_all(),
        Command::AbortPasid => {
            let pasid = Pasid::from_low_bits(word.operand());
            works.drop_where(0..works.queues.len(), |space| space == Some(pasid), now);
        }
        Command::RequestInterrupt | Command::ReleaseInterrupt => {
            if !works.shape.general.has(GeneralCapability::COMMANDS) {
                return Err(CommandError::Command);
            }
            // A handle is the number of its vector; there are none for other interrupts.
            let (index, others) = (word.operand() & 0xffff, word.operand() >> 16 != 0);
            if others || index >= u32::from(works.shape.vectors()) {
                return Err(CommandError::InterruptIndex);
            }
        }
        Command::ResetDevice | Command::DrainAll | Command::DrainPasid => {}
    }
    Ok(())
}

/// Ends the command that is being done, if it can be ended.
pub(crate) fn progress(works: &mut Works, now: u64, board: &dyn Board) {
    let Some(running) = works.control.running.filter(|running| running.due <= now) else {
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
        Command::DisableDevice | Command::DrainAll => works.queues.iter().any(|queue| waits(queue, &all)),
        Command::DisableQueue | Command::DrainQueue => word
            .queues()
            .any(|at| works.queues.get(at).is_some_and(|queue| waits(queue, &all))),
        Command::DrainPasid => {
            let pasid = Pasid::from_low_bits(word.operand());
            let own = |space: Option<Pasid>| space == Some(pasid);
            works.queues.iter().any(|queue| waits(queue, &own))
        }
        _ => false,
    };
    if busy {
        return;
    }
    let result = finish(works, command, word, now);
    works.control.running = None;
    works.control.end_command(word, Ok(result), board);
}

fn finish(works: &mut Works, command: Command, word: CommandWord, now: u64) -> u16 {
    match command {
        Command::EnableDevice => works.control.set_state(DeviceState::Enabled),
        Command::DisableDevice => {
            works.control.set_state(DeviceState::Disabled);
            works
                .queues
                .iter_mut()
                .for_each(|queue| queue.state = QueueState::Disabled);
        }
        Command::EnableQueue => works.queues[word.operand() as usize].state = QueueState::Enabled,
        Command::DisableQueue => {
            word.queues()
                .for_each(|at| works.queues[at].state = QueueState::Disabled);
        }
        Command::ResetQueue => {
            for at in word.queues() {
                works.drop_where(std::iter::once(at), |_| true, now);
                works.queues[at] = Queue::default();
            }
        }
        Command::ResetDevice => {
            works.drop_all();
            works.queues.fill_with(Queue::default);
            works.control.groups.fill([0; GROUP_WORDS]);
            (works.control.config, works.control.interrupts) = (0, 0);
            works.control.error = SoftwareError::default();
            works.control.set_state(DeviceState::Disabled);
        }
        Command::RequestInterrupt => return u16::try_from(word.operand() & 0xffff).unwrap_or(0),
        _ => {}
    }
    0
}

fn each_enabled(works: &mut Works, change: impl Fn(&mut Queue)) {
    works
        .queues
        .iter_mut()
        .filter(|queue| queue.state == QueueState::Enabled)
        .for_each(change);
}

fn check_device(works: &Works) -> Result<(), CommandError> {
    let control = &works.control;
    if control.state() != DeviceState::Disabled {
        return Err(CommandError::DeviceEnabled);
    }
    if !control.bus_master {
        return Err(CommandError::BusMaster);
    }
    if !control.pasid && works.queues.iter().any(|queue| queue.config.pasid().is_some()) {
        return Err(CommandError::PasidOff);
    }
    let entries: u32 = works
        .queues
        .iter()
        .map(|queue| u32::from(queue.config.entries()))
        .sum();
    if entries > works.shape.queues.entries().into() {
        return Err(CommandError::QueueSizes);
    }
    let (mut queues, mut engines, mut buffers) = ([0; 4], 0, 0);
    for group in (0..control.groups.len()).map(|at| control.group(at)) {
        for (word, (seen, own)) in (0u32..).zip(queues.iter_mut().zip(group.queues)) {
            if *seen & own != 0 || own & !below(works.queues.len(), word) != 0 {
                return Err(CommandError::GroupQueues);
            }
            *seen |= own;
        }
        if engines & group.engines != 0 || group.engines & !below(works.shape.engines.into(), 0) != 0 {
            return Err(CommandError::GroupEngines);
        }
        engines |= group.engines;
        // Linux leaves engines in groups that have lost their queues; that does no harm.
        if group.engines == 0 && !group.is_empty() {
            return Err(CommandError::GroupHalf);
        }
        buffers += u32::from(group.reserved_buffers());
    }
    if buffers > works.shape.groups.read_buffers().into() {
        return Err(CommandError::GroupBuffers);
    }
    Ok(())
}

fn check_queue(works: &Works, operand: u32) -> Result<(), CommandError> {
    if works.control.state() != DeviceState::Enabled {
        return Err(CommandError::DeviceDisabled);
    }
    let at = operand as usize;
    let queue = works.queues.get(at).ok_or(CommandError::QueueIndex)?;
    if queue.state != QueueState::Disabled {
        return Err(CommandError::QueueEnabled);
    }
    let config = &queue.config;
    let (general, able) = (works.shape.general, works.shape.queues);
    let mode_fits = match config.mode() {
        Mode::Dedicated => able.has(QueueCapability::DEDICATED),
        Mode::Shared => {
            let threshold = config.threshold();
            able.has(QueueCapability::SHARED) && threshold > 0 && threshold <= config.entries()
        }
    };
    let grouped = (0..works.control.groups.len())
        .any(|group| works.control.group(group).queues[at / 64] >> (at % 64) & 1 != 0);
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
            !works.control.pasid && config.pasid().is_some(),
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

/// The bits of the 64 from 64 times `word` on that are below a number.
fn below(count: usize, word: u32) -> u64 {
    let left = count.saturating_sub(word as usize * 64);
    if left >= 64 { u64::MAX } else { (1 << left) - 1 }
}
