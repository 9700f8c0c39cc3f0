//! Metadata of words in overlays (section 5.3.4), against shadow memory by software.
//!
//! The paper proposes this and evaluates nothing. The program here is one that a tool for memory errors or taint watches:
//! it loads metadata with each word that it accesses, and stores metadata with each word that it stores to a marked line. By
//! software the metadata is in shadow memory at an address that two instructions compute: as wide as the words, as in the
//! overlay, or a byte for each.

use crate::account::{Account, MemoryInUse};
use crate::address::Pid;
use crate::config::{Config, OnWrite};
use crate::dice::Dice;
use crate::machine::{Contents, Machine, MachineError};
use crate::pipeline::Issue;
use crate::sizes::{LINES, PAGE_BYTES, index, number};
use serde::Serialize;

/// Where metadata is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Way {
    /// There is none.
    None,
    /// In the page's overlay.
    Overlay,
    /// In shadow memory, 8 bytes for each word of 8.
    ShadowWords,
    /// In shadow memory, 1 byte for each word of 8.
    ShadowBytes,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Overlay, Self::ShadowWords, Self::ShadowBytes];
}

/// What the program took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Where metadata is.
    pub way: Way,
    /// The share of lines that are marked.
    pub marked: f64,
    /// What was counted, after the marks were set.
    pub account: Account,
    /// Memory for metadata alone.
    pub memory: MemoryInUse,
}

impl Run {
    /// Bytes of memory for metadata: shadow pages, segments, and nodes of the OMT.
    pub fn bytes(&self) -> u64 {
        self.memory.pages + self.memory.segments + self.memory.omt
    }
}

const PID: Result<Pid, crate::address::AddressError> = Pid::try_new(1);
const DATA: u64 = 1 << 32;
const SHADOW: u64 = 1 << 33;
/// Accesses after the marks are set.
pub const ACCESSES: u64 = 400_000;
/// One access in so many is of any page, the others of the hot ones.
const COLD: u64 = 8;
const HOT_PAGES: u64 = 16;
/// One access in so many is a store.
const STORE: u64 = 4;
/// Instructions between accesses.
const BETWEEN: u64 = 3;

struct Program {
    machine: Machine,
    pid: Pid,
    way: Way,
}

impl Program {
    fn shadow(&mut self, address: u64) -> Result<(u64, usize), MachineError> {
        self.machine.compute(0, 2)?;
        Ok(match self.way {
            Way::ShadowBytes => (SHADOW + (address - DATA) / 8, 1),
            _ => (SHADOW + (address - DATA), 8),
        })
    }

    fn metadata(&mut self, address: u64) -> Result<(), MachineError> {
        let mut bytes = [0; 8];
        match self.way {
            Way::None => return Ok(()),
            Way::Overlay => self
                .machine
                .read_metadata(0, self.pid, address, &mut bytes, Issue::Free)?,
            Way::ShadowWords | Way::ShadowBytes => {
                let (shadow, width) = self.shadow(address)?;
                self.machine
                    .read(0, self.pid, shadow, &mut bytes[..width], Issue::Free)?;
            }
        }
        // The test.
        self.machine.compute(0, 1)
    }

    fn mark(&mut self, address: u64) -> Result<(), MachineError> {
        match self.way {
            Way::None => Ok(()),
            Way::Overlay => self
                .machine
                .write_metadata(0, self.pid, address, &[1; 8], Issue::Free),
            Way::ShadowWords | Way::ShadowBytes => {
                let (shadow, width) = self.shadow(address)?;
                self.machine
                    .write(0, self.pid, shadow, &[1; 8][..width], Issue::Free)
            }
        }
    }
}

/// Runs the program on `pages` pages, of whose lines about one in `one_in` is marked.
///
/// # Errors
/// The machine's, if `pages` cannot be.
pub fn run(pages: u64, one_in: u64, way: Way) -> Result<Run, MachineError> {
    let mut program = Program {
        machine: Machine::try_new(Config::table_2(OnWrite::Copy))?,
        pid: PID?,
        way,
    };
    let contents = if way == Way::Overlay {
        Contents::WithMetadata
    } else {
        Contents::Own
    };
    program.machine.map(program.pid, DATA, pages, contents)?;
    // Shadow memory that nobody has written takes no memory.
    let shadow_pages = match way {
        Way::None | Way::Overlay => 0,
        Way::ShadowWords => pages,
        Way::ShadowBytes => pages.div_ceil(8),
    };
    program
        .machine
        .map(program.pid, SHADOW, shadow_pages, Contents::Zeros)?;
    let mut dice = Dice::new(one_in);
    let lines = pages * number(LINES);
    let marked: Vec<bool> = (0..lines).map(|_| dice.below(one_in) == 0).collect();
    for (line, _) in (0..).zip(&marked).filter(|(_, marked)| **marked) {
        program.mark(DATA + line * 64 + dice.below(8) * 8)?;
    }
    program.machine.settle(0)?;
    let before = program.machine.account(0)?;
    for _ in 0..ACCESSES {
        let from = if dice.below(COLD) == 0 {
            pages
        } else {
            HOT_PAGES.min(pages)
        };
        let address = DATA + dice.below(from * number(PAGE_BYTES) / 8) * 8;
        program.machine.compute(0, BETWEEN)?;
        program.metadata(address)?;
        if dice.below(STORE) > 0 {
            program
                .machine
                .read(0, program.pid, address, &mut [0; 8], Issue::Free)?;
            continue;
        }
        program
            .machine
            .write(0, program.pid, address, &[7; 8], Issue::Free)?;
        if marked[index((address - DATA) / 64)] {
            program.mark(address)?;
        }
    }
    program.machine.settle(0)?;
    let account = program.machine.account(0)?.since(&before);
    program.machine.flush();
    let mut memory = program.machine.memory_in_use();
    memory.pages -= pages * number(PAGE_BYTES);
    let count = number(marked.iter().filter(|marked| **marked).count());
    Ok(Run {
        way,
        marked: super::fork::ratio(count, lines),
        account,
        memory,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_marks_take_least_in_overlays() {
        let [none, overlay, words, bytes] = Way::ALL.map(|way| run(512, 200, way).unwrap());
        assert_eq!(none.bytes(), 0);
        assert!(overlay.bytes() < words.bytes() && overlay.bytes() < 512 * 4096 / 8);
        assert!(bytes.bytes() < words.bytes());
        assert!(none.account.core.cycles < overlay.account.core.cycles);
        assert!(overlay.account.core.cycles < words.account.core.cycles);
        assert!(overlay.account.events.metadata_loads_absent > 0);
    }
}
