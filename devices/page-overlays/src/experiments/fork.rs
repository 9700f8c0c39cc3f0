//! Overlay-on-write against copy-on-write after a fork (section 5.1, figures 8 and 9).
//!
//! The paper runs five programs of SPEC CPU2006 of each of three kinds for 300 million instructions after a fork. Here
//! writers stand for the kinds: their writes are those that the paper describes, and the work between writes is made up. So
//! the direction of a difference can be compared with the paper's, its size only in kind. Writers of types 2 and 3 come to a
//! new page every 25,600 instructions on average.

use crate::account::{Account, MemoryInUse};
use crate::address::Pid;
use crate::config::{Config, ObitsFetch, OnWrite};
use crate::dice::Dice;
use crate::machine::{Contents, Machine, MachineError};
use crate::pipeline::Issue;
use crate::replay::{ReplayError, apply, replay};
use crate::sizes::{LINES, PAGE_BYTES, number};
use crate::trace::{Action, Bytes, Record, TraceError};
use serde::Serialize;

/// A program that writes after a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Writer {
    /// What it is called.
    pub name: &'static str,
    /// Its type in section 5.1: 1 writes few pages, 2 whole pages, 3 few lines in each of many pages.
    pub kind: u8,
    /// Pages that it writes, as a share of all, 1 in so many.
    pub one_in: u64,
    /// Lines that it writes in each.
    pub lines: u64,
    /// Pages that it writes in turn: a line of each, then the next line of each. `None`: all that it writes.
    pub in_turn: Option<u64>,
    /// Instructions between two writes, about.
    pub between: u32,
    /// How often it writes each line.
    pub rounds: u64,
}

/// The writers.
pub const WRITERS: [Writer; 7] = [
    Writer {
        name: "few pages",
        kind: 1,
        one_in: 256,
        lines: 64,
        in_turn: Some(1),
        between: 400,
        rounds: 64,
    },
    Writer {
        name: "whole pages, at once",
        kind: 2,
        one_in: 4,
        lines: 64,
        in_turn: Some(1),
        between: 400,
        rounds: 1,
    },
    Writer {
        name: "whole pages, 32 in turn",
        kind: 2,
        one_in: 4,
        lines: 64,
        in_turn: Some(32),
        between: 400,
        rounds: 1,
    },
    Writer {
        name: "whole pages, all in turn",
        kind: 2,
        one_in: 4,
        lines: 64,
        in_turn: None,
        between: 400,
        rounds: 1,
    },
    Writer {
        name: "1 line in many pages",
        kind: 3,
        one_in: 1,
        lines: 1,
        in_turn: Some(1),
        between: 25_600,
        rounds: 1,
    },
    Writer {
        name: "4 lines in many pages",
        kind: 3,
        one_in: 1,
        lines: 4,
        in_turn: Some(1),
        between: 6400,
        rounds: 1,
    },
    Writer {
        name: "12 lines in many pages",
        kind: 3,
        one_in: 1,
        lines: 12,
        in_turn: Some(16),
        between: 2133,
        rounds: 1,
    },
];

/// What a machine is changed in, to find what costs the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Variant {
    /// Table 2, and what the crate assumes besides.
    Table2,
    /// A miss of the OMT cache takes no time.
    FreeOmtWalks,
    /// The `OBitVector` is fetched after the page table was walked.
    ObitsAfterWalk,
    /// The OMT cache has 4,096 entries.
    LargeOmtCache,
    /// Overlays of 32 lines become pages.
    PromoteAt32,
    /// Traps and shootdowns take no time: of a copy only the copying is left.
    FreeTraps,
}

impl Variant {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Table2,
        Self::FreeOmtWalks,
        Self::ObitsAfterWalk,
        Self::LargeOmtCache,
        Self::PromoteAt32,
        Self::FreeTraps,
    ];

    /// The machine.
    pub fn config(self, on_write: OnWrite) -> Config {
        let mut config = Config::table_2(on_write);
        match self {
            Self::Table2 => {}
            Self::FreeOmtWalks => config.omt.miss_cycles = 0,
            Self::ObitsAfterWalk => config.tlb.obits = ObitsFetch::AfterWalk,
            Self::LargeOmtCache => config.omt.entries = 4096,
            Self::PromoteAt32 => config.os.promote_at = Some(32),
            Self::FreeTraps => (config.os.trap_cycles, config.os.shootdown_cycles) = (0, 0),
        }
        config
    }
}

/// What a writer took from the fork on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// What was counted.
    pub account: Account,
    /// Memory that came to be in use, with all dirty lines written.
    pub memory: MemoryInUse,
}

impl Run {
    /// Bytes of memory as figure 8 has them: copied pages, and segments.
    pub fn bytes(&self) -> u64 {
        self.memory.pages + self.memory.segments
    }
}

/// A writer under both ways to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// The writer.
    pub writer: Writer,
    /// The machine.
    pub variant: Variant,
    /// Copy-on-write.
    pub copy: Run,
    /// Overlay-on-write.
    pub overlay: Run,
}

impl Comparison {
    /// By how much faster overlays are, as a share: 0.15 is the paper's average.
    pub fn faster(&self) -> f64 {
        ratio(self.copy.account.core.cycles, self.overlay.account.core.cycles) - 1.0
    }

    /// How much less memory overlays take, as a share: 0.53 is the paper's average.
    pub fn less_memory(&self) -> f64 {
        1.0 - ratio(self.overlay.bytes(), self.copy.bytes())
    }
}

#[allow(clippy::cast_precision_loss)] // a statistic
pub(super) fn ratio(of: u64, to: u64) -> f64 {
    of as f64 / to as f64
}

const PARENT: Result<Pid, crate::address::AddressError> = Pid::try_new(1);
const CHILD: Result<Pid, crate::address::AddressError> = Pid::try_new(2);
/// Where the parent's pages begin.
const BASE: u64 = 1 << 32;
/// Pages that it reads most of the time: they fit into the L1.
const HOT_PAGES: u64 = 8;
/// One load in so many is of a warm page. Warm pages fit into the L3, and their translations into the TLB.
const WARM_LOAD: u64 = 16;
const WARM_PAGES: u64 = 256;
/// One load in so many is of any page.
const COLD_LOAD: u64 = 256;
const WARM_SHARE: u64 = COLD_LOAD / WARM_LOAD;
/// Instructions for which there is one load.
const PER_LOAD: u32 = 5;

/// What a writer does: `pages` pages are mapped, read and written, then a child is forked, and then it writes. Each record is
/// given to `act`.
///
/// # Errors
/// Those of `act`, and an address error if there is no room for the pages.
pub fn records<E>(writer: &Writer, pages: u64, mut act: impl FnMut(Record) -> Result<(), E>) -> Result<(), E>
where
    E: From<MachineError>,
{
    let (parent, child) = (
        PARENT.map_err(MachineError::from)?,
        CHILD.map_err(MachineError::from)?,
    );
    let mut act = |action| act(Record { core: 0, action });
    let contents = Contents::Own;
    act(Action::Map {
        pid: parent,
        contents,
        address: BASE,
        pages,
    })?;
    let mut program = Program {
        pid: parent,
        pages,
        dice: Dice::new(u64::from(writer.kind) * 100 + writer.lines),
    };
    for page in 0..pages {
        for line in (0..64).step_by(4) {
            program.store(page, line, &mut act)?;
        }
    }
    program.work(100_000, &mut act)?;
    act(Action::Fork { parent, child })?;
    let written = (pages / writer.one_in).max(1);
    let in_turn = writer.in_turn.unwrap_or(written).min(written);
    for _ in 0..writer.rounds {
        for first in (0..written).step_by(crate::sizes::index(in_turn)) {
            for line in 0..writer.lines {
                for page in first..(first + in_turn).min(written) {
                    // Spread over the pages, and over the lines of each.
                    let place = (line * 37 + page * 11) % number(LINES);
                    program.update(page * writer.one_in, place, &mut act)?;
                    program.work(writer.between, &mut act)?;
                }
            }
        }
    }
    Ok(())
}

struct Program {
    pid: Pid,
    pages: u64,
    dice: Dice,
}

impl Program {
    fn address(page: u64, line: u64) -> u64 {
        BASE + page * number(PAGE_BYTES) + line * 64
    }

    fn store<E>(
        &mut self,
        page: u64,
        line: u64,
        act: &mut impl FnMut(Action) -> Result<(), E>,
    ) -> Result<(), E> {
        act(Action::Store {
            metadata: false,
            pid: self.pid,
            bytes: Bytes::new(&self.dice.any().to_le_bytes()).expect("eight bytes fit"),
            issue: Issue::Free,
            address: Self::address(page, line),
        })
    }

    fn load<E>(&self, page: u64, line: u64, act: &mut impl FnMut(Action) -> Result<(), E>) -> Result<(), E> {
        act(Action::Load {
            metadata: false,
            pid: self.pid,
            bytes: 8,
            issue: Issue::Free,
            address: Self::address(page, line),
        })
    }

    /// Reads and writes a word of a line.
    fn update<E>(
        &mut self,
        page: u64,
        line: u64,
        act: &mut impl FnMut(Action) -> Result<(), E>,
    ) -> Result<(), E> {
        self.load(page, line, act)?;
        act(Action::Compute(2))?;
        self.store(page, line, act)
    }

    /// About so many instructions that read.
    fn work<E>(&mut self, instructions: u32, act: &mut impl FnMut(Action) -> Result<(), E>) -> Result<(), E> {
        for _ in 0..instructions / PER_LOAD {
            act(Action::Compute(PER_LOAD - 1))?;
            let pages = match self.dice.below(COLD_LOAD) {
                0 => self.pages,
                1..=WARM_SHARE => WARM_PAGES,
                _ => HOT_PAGES,
            };
            let pages = pages.min(self.pages);
            let (page, line) = (self.dice.below(pages), self.dice.below(number(LINES)));
            self.load(page, line, act)?;
        }
        Ok(())
    }
}

/// Runs a writer under one way to write.
///
/// # Errors
/// The machine's, if `config` or `pages` cannot be.
pub fn run(writer: &Writer, pages: u64, config: Config) -> Result<Run, MachineError> {
    let mut machine = Machine::try_new(config)?;
    let mut before = None;
    records(writer, pages, |record| {
        if matches!(record.action, Action::Fork { .. }) {
            machine.settle(0)?;
            before = Some((machine.account(0)?, machine.memory_in_use()));
        }
        apply(&mut machine, &record)
    })?;
    since(&mut machine, before)
}

/// Plays a trace under one way to write, and counts from its last fork on, or from its beginning if there is none.
///
/// # Errors
/// [`TraceRunError`].
pub fn run_trace(
    trace: impl Iterator<Item = Result<Record, TraceError>>,
    config: Config,
) -> Result<Run, TraceRunError> {
    let mut machine = Machine::try_new(config)?;
    let mut before = None;
    replay(&mut machine, trace, |machine, record| {
        if matches!(record.action, Action::Fork { .. }) {
            machine.settle(0)?;
            before = Some((machine.account(0)?, machine.memory_in_use()));
        }
        Ok(())
    })?;
    Ok(since(&mut machine, before)?)
}

/// Why a trace was not played.
#[derive(Debug, thiserror::Error)]
pub enum TraceRunError {
    /// The trace is refused, or says what cannot be done.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The machine cannot be.
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// What was counted since `before`, and the memory that came to be in use.
fn since(machine: &mut Machine, before: Option<(Account, MemoryInUse)>) -> Result<Run, MachineError> {
    machine.settle(0)?;
    let (account, memory) = before.unwrap_or_default();
    let account = machine.account(0)?.since(&account);
    machine.flush();
    let after = machine.memory_in_use();
    Ok(Run {
        account,
        memory: MemoryInUse {
            pages: after.pages - memory.pages,
            overlay_lines: after.overlay_lines - memory.overlay_lines,
            segments: after.segments - memory.segments,
            store: after.store - memory.store,
            omt: after.omt - memory.omt,
        },
    })
}

/// Runs a writer under both ways to write.
///
/// # Errors
/// The machine's, if `pages` cannot be.
pub fn compare(writer: &Writer, pages: u64, variant: Variant) -> Result<Comparison, MachineError> {
    Ok(Comparison {
        writer: *writer,
        variant,
        copy: run(writer, pages, variant.config(OnWrite::Copy))?,
        overlay: run(writer, pages, variant.config(OnWrite::Overlay))?,
    })
}

/// Averages over the three types, each of which has the same weight (as with the paper's five programs each): the shares of
/// [`Comparison::less_memory`] and [`Comparison::faster`]. `None` if a type is missing.
pub fn averages(comparisons: &[Comparison]) -> Option<(f64, f64)> {
    let mean = |figure: fn(&Comparison) -> f64| {
        let of_kind = |kind: u8| {
            let figures: Vec<f64> = comparisons
                .iter()
                .filter(|one| one.writer.kind == kind)
                .map(figure)
                .collect();
            let count = u32::try_from(figures.len()).ok().filter(|count| *count > 0)?;
            Some(figures.iter().sum::<f64>() / f64::from(count))
        };
        Some((of_kind(1)? + of_kind(2)? + of_kind(3)?) / 3.0)
    };
    Some((mean(Comparison::less_memory)?, mean(Comparison::faster)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_lines_in_many_pages_take_far_less_memory_and_less_time() {
        let comparison = compare(&WRITERS[5], 1024, Variant::Table2).unwrap();
        assert_eq!(comparison.copy.memory.pages, 1024 * 4096);
        // 4 lines need a segment of 512 bytes.
        assert_eq!(comparison.overlay.memory.segments, 1024 * 512);
        assert!(comparison.faster() > 0.0, "{}", comparison.faster());
        assert_eq!(comparison.overlay.account.events.overlaying_writes, 4 * 1024);
        assert_eq!(comparison.overlay.account.events.faults, 0);
    }

    #[test]
    fn whole_pages_take_the_same_memory() {
        let comparison = compare(&WRITERS[1], 256, Variant::Table2).unwrap();
        assert_eq!(comparison.overlay.bytes(), comparison.copy.bytes());
        assert_eq!(comparison.copy.account.events.pages_copied, 64);
    }
}
