//! A PageForge module: a Scan Table and the state machine that works on it (sections 3.2, 3.3 and 3.6).

use crate::ecc;
use crate::hash_key::{EccOffsets, HashKey, KEY_LINES};
use crate::memory::{Line, Memory, PAGE_LINES, compare_lines};
use crate::scan_table::{
    Candidate, Compared, EntryIndex, OTHER_PAGES, OtherPage, PfeInfo, Pointer, Ppn, RunError, ScanTable, Walk,
};
use crate::timing::{Account, Costs, Role};
use std::cmp::Ordering;

/// One module.
#[derive(Clone, Debug, Default)]
pub struct Module {
    table: ScanTable,
    offsets: EccOffsets,
    /// What was snatched so far of the candidate's key.
    minikeys: [Option<u8>; KEY_LINES],
    costs: Costs,
    account: Account,
}

impl Module {
    /// `insert_PPN`.
    pub fn insert_ppn(&mut self, index: EntryIndex, page: OtherPage) {
        self.table.insert_ppn(index, page);
    }

    /// Replaces all Other Pages at once.
    pub fn load(&mut self, others: [Option<OtherPage>; OTHER_PAGES]) {
        self.table.load(others);
    }

    /// `insert_PFE`: a new candidate, of whose key nothing is known.
    pub fn insert_pfe(&mut self, candidate: Candidate) {
        self.table.insert_pfe(candidate);
        self.minikeys = [None; KEY_LINES];
    }

    /// `update_PFE`: the same candidate, another set of pages. What there is of the key stays.
    pub fn update_pfe(&mut self, last_refill: bool, ptr: Pointer) {
        self.table.update_pfe(last_refill, ptr);
    }

    /// `get_PFE_info`; `None` without a candidate.
    pub fn pfe_info(&self) -> Option<PfeInfo> {
        self.table.pfe_info()
    }

    /// `update_ECC_offset`. Minikeys of the old offsets are dropped; a key that was ready stays that of the old ones
    /// until the next candidate.
    pub fn update_ecc_offset(&mut self, offsets: EccOffsets) {
        self.offsets = offsets;
        self.minikeys = [None; KEY_LINES];
    }

    /// What the module has done so far.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Triggers the hardware: compares until Scanned is set. Does nothing without a candidate, or if the table has been
    /// scanned already.
    ///
    /// At most 31 pages are compared: an entry that comes up a second time would come up for ever, since the comparison
    /// that led there leads there again, and is an error.
    pub fn run(&mut self, memory: &impl Memory) {
        let (Some(candidate), Some(PfeInfo { scanned: false, .. })) =
            (self.table.candidate(), self.table.pfe_info())
        else {
            return;
        };
        let mut cycles = 0;
        match self.walk(memory, candidate.ppn, &mut cycles) {
            Ok(duplicate) if duplicate || candidate.last_refill => {
                if self.complete_key(memory, candidate.ppn, &mut cycles).is_none() {
                    self.table.fail(RunError::CandidateFault);
                }
            }
            Ok(_) => {}
            Err(error) => self.table.fail(error),
        }
        self.account.table(cycles);
    }

    /// Follows Less and More; returns whether there is a duplicate.
    fn walk(&mut self, memory: &impl Memory, candidate: Ppn, cycles: &mut u64) -> Result<bool, RunError> {
        let mut visited = [false; OTHER_PAGES];
        while let Walk::Next(index, other) = self.table.current() {
            if std::mem::replace(&mut visited[index.number()], true) {
                return Err(RunError::Loop);
            }
            let compared = self.compare(memory, candidate, other.ppn, cycles)?;
            self.table.advance(compared);
        }
        Ok(self.table.pfe_info().is_some_and(|info| info.duplicate))
    }

    /// Compares two pages line by line, in lockstep, up to the first line that differs.
    fn compare(
        &mut self,
        memory: &impl Memory,
        candidate: Ppn,
        other: Ppn,
        cycles: &mut u64,
    ) -> Result<Compared, RunError> {
        self.account.comparisons += 1;
        let sources = [
            Costs::source(Role::Candidate, candidate),
            Costs::source(Role::Other, other),
        ];
        let slower = sources.map(|source| self.costs.latency(source)).into_iter().max();
        for number in 0..PAGE_LINES {
            let ours = memory.line(candidate, number).ok_or(RunError::CandidateFault)?;
            let theirs = memory.line(other, number).ok_or(RunError::OtherFault)?;
            sources.into_iter().for_each(|source| self.account.line(source));
            *cycles += slower.unwrap_or(0) + self.costs.compare;
            self.snatch(number, &ours);
            match compare_lines(&ours, &theirs) {
                Ordering::Equal => {}
                Ordering::Less => return Ok(Compared::Less),
                Ordering::Greater => return Ok(Compared::Greater),
            }
        }
        Ok(Compared::Equal)
    }

    /// Takes a minikey from a line of the candidate that passes by, if it is one of those that make the key.
    fn snatch(&mut self, number: usize, line: &Line) {
        let section = number / usize::from(crate::hash_key::LINES_PER_SECTION);
        if self.offsets.lines()[section] == number && self.minikeys[section].is_none() {
            self.minikeys[section] = Some(minikey(line));
        }
        if let [Some(a), Some(b), Some(c), Some(d)] = self.minikeys
            && self.table.pfe_info().is_some_and(|info| info.hash_key.is_none())
        {
            self.table.set_hash_key(HashKey::of_minikeys([a, b, c, d]));
            self.account.keys += 1;
        }
    }

    /// Reads the lines that are missing for the key, overlapped. `None` if one cannot be read.
    fn complete_key(&mut self, memory: &impl Memory, candidate: Ppn, cycles: &mut u64) -> Option<()> {
        let source = Costs::source(Role::Candidate, candidate);
        let mut waited = false;
        for (section, number) in self.offsets.lines().into_iter().enumerate() {
            if self.minikeys[section].is_none() {
                let line = memory.line(candidate, number)?;
                self.account.line(source);
                self.account.key_lines += 1;
                waited = true;
                self.snatch(number, &line);
            }
        }
        *cycles += if waited { self.costs.latency(source) } else { 0 };
        Some(())
    }
}

/// The 8 low bits of a line's ECC code.
#[allow(clippy::cast_possible_truncation)] // they are what is wanted
fn minikey(line: &Line) -> u8 {
    ecc::line_code(line) as u8
}

#[cfg(test)]
mod tests;
