//! Registers and tables.

use crate::board::Board;
use crate::commands::command;
use crate::works::Works;
use vmm_dedup_dsa_abi::config::{GROUP_STRIDE, QUEUE_WORDS, QueueConfig, QueueState};
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::registers::{DeviceState, GeneralCapability, SoftwareError, Tables};
use vmm_dedup_dsa_abi::{Command, CommandWord};

/// Where the tables are in BAR 0: those of groups, of queues, of permissions for MSI-X, of other interrupts (which is
/// empty). There are no performance counters.
const TABLES: Tables = Tables::new(0x400, 0x1000, 0x3000, 0x4000, 0);

/// The place of a word in one of several tables.
fn entry(offset: u64, table: u64, stride: u64, count: usize) -> Option<(usize, usize)> {
    let from = offset.checked_sub(table)?;
    let at = usize::try_from(from / stride).ok()?;
    let word = usize::try_from(from % stride / 4).ok()?;
    (at < count).then_some((at, word))
}

/// Reads from BAR 0. What no register covers reads as zeros.
pub(crate) fn read(works: &Works, offset: u64, into: &mut [u8]) {
    let mut at = offset;
    let mut left = into;
    while !left.is_empty() {
        let byte = usize::try_from(at % 4).unwrap_or(0);
        let word = read_word(works, at - at % 4).to_le_bytes();
        let (part, rest) = left.split_at_mut(left.len().min(4 - byte));
        part.copy_from_slice(&word[byte..byte + part.len()]);
        at = at.saturating_add(part.len() as u64);
        left = rest;
    }
}

/// Writes to BAR 0: whole words of 4 bytes. Others are ignored. Accesses no memory.
pub(crate) fn write(works: &mut Works, offset: u64, from: &[u8], now: u64, board: &dyn Board) {
    if !offset.is_multiple_of(4) {
        return;
    }
    let words = from
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    for (at, word) in (offset..).step_by(4).zip(words) {
        write_word(works, at, word, now, board);
    }
}

#[allow(clippy::cast_possible_truncation)] // words are cut into halves
fn read_word(works: &Works, offset: u64) -> u32 {
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
    let control = &works.control;
    match offset {
        reg::VERSION => works.shape.version,
        0x10..0x18 => half(works.shape.general.0),
        0x20..0x28 => half(works.shape.queues.0),
        0x30..0x38 => half(works.shape.groups.0),
        0x38..0x40 => half(works.shape.engines.into()),
        0x40..0x60 => word_of(&works.shape.operation_bits(), reg::OPCAP),
        0x60..0x70 => word_of(&TABLES.0, reg::TABLES),
        reg::GENCFG => control.config,
        reg::GENCTRL => control.interrupts,
        reg::GENSTS => control.status.0,
        reg::INTCAUSE => control.cause,
        reg::CMDSTS => control.command.0,
        reg::CMDCAP if works.shape.general.has(GeneralCapability::COMMANDS) => Command::ALL
            .iter()
            .fold(0, |bits, command| bits | 1 << *command as u32),
        0xc0..0xe0 => word_of(&control.error.0, reg::SWERR),
        _ => read_table(works, offset),
    }
}

fn read_table(works: &Works, offset: u64) -> u32 {
    let control = &works.control;
    let stride = works.shape.queues.config_stride();
    if let Some((at, word)) = entry(offset, TABLES.groups(), GROUP_STRIDE, control.groups.len()) {
        return control.groups[at].get(word).copied().unwrap_or(0);
    }
    if let Some((at, word)) = entry(offset, TABLES.queues(), stride, works.queues.len()) {
        return match word {
            QueueConfig::STATE_WORD => works.queues[at].state_word(),
            word => works.queues[at].config.0.get(word).copied().unwrap_or(0),
        };
    }
    let permission = entry(offset, TABLES.permissions(), 4, control.permissions.len());
    permission.map_or(0, |(at, _)| control.permissions[at])
}

fn write_word(works: &mut Works, offset: u64, word: u32, now: u64, board: &dyn Board) {
    let control = &mut works.control;
    match offset {
        reg::GENCFG if control.state() == DeviceState::Disabled => control.config = word,
        reg::GENCTRL => control.interrupts = word,
        reg::INTCAUSE => control.cause &= !word,
        reg::CMD => command(works, CommandWord(word), now, board),
        reg::SWERR => {
            let cleared = u64::from(word) & (SoftwareError::VALID | SoftwareError::OVERFLOW);
            control.error.0[0] &= !cleared;
            if !control.error.is_valid() {
                control.error = SoftwareError::default();
            }
        }
        _ => write_table(works, offset, word),
    }
}

fn write_table(works: &mut Works, offset: u64, value: u32) {
    let control = &mut works.control;
    let off = control.state() == DeviceState::Disabled;
    let stride = works.shape.queues.config_stride();
    if let Some((at, word)) = entry(offset, TABLES.groups(), GROUP_STRIDE, control.groups.len()) {
        if let Some(to) = control.groups[at].get_mut(word).filter(|_| off) {
            *to = value;
        }
    } else if let Some((at, word)) = entry(offset, TABLES.queues(), stride, works.queues.len()) {
        let queue = &mut works.queues[at];
        // Of a queue that is off, on a device that is on, the address space and the threshold can be changed.
        let may = queue.state == QueueState::Disabled && (off || word == 1 || word == 2);
        if may && word < QUEUE_WORDS && word != QueueConfig::STATE_WORD {
            queue.config.0[word] = value;
        }
    } else if let Some((at, _)) = entry(offset, TABLES.permissions(), 4, control.permissions.len()) {
        control.permissions[at] = value;
    }
}
