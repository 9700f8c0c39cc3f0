//! Taking over what the guest's agent says, between the work of passes. It changes what is looked at, never what is safe.

use crate::hints::line::SaidOfBlock;
use crate::memory::hint::Hint;
use crate::memory::layout::Page;
use crate::scan::pass::Pass;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How long hints are heeded at a time while nothing is merged.
const IN_STANDBY: Duration = Duration::from_millis(100);

/// Pages that are made private between two looks at what else there is to do.
const BROKEN_AT_ONCE: usize = 16 * CHUNK_PAGES;

impl Pass {
    /// Hears what the agent said since the last call, and what the VMM has read. Once a pass: an agent that never ends must not keep
    /// the pass from its end, for which other VMs wait.
    pub(super) fn hear_hints(&mut self) {
        for read in self.control.reads().take() {
            let start = read
                .start
                .checked_next_multiple_of(PAGE_SIZE)
                .unwrap_or(usize::MAX);
            let whole = start..read.end & !(PAGE_SIZE - 1);
            for pages in self.map.memory().clone().within(&whole) {
                pages.for_each(|page| self.map.note_read(page));
            }
        }
        self.heard.hear();
    }

    /// Takes over some of what was heard, and makes some of what must not be shared private; whether there is more. To be called
    /// where nothing is planned.
    ///
    /// Once the agent hears that a mark is in force, no page under it is shared, none has a key, and none gets one while it is
    /// marked: whoever reads keys asks [`PageMap::is_withheld`](crate::memory::page_map::PageMap::is_withheld) first, what had been found
    /// before is dropped here, and the store is told before the agent is.
    pub(super) fn heed_hints(&mut self) -> bool {
        let said = self.heard.next();
        self.take_over(&said);
        self.enforce();
        self.account.lap(|cpu| &mut cpu.track);
        self.heard.has_more() || !self.heard.to_break.is_empty()
    }

    /// The same while nothing is merged: for a moment, within the CPU budget, and not while somebody waits.
    pub(super) fn heed_hints_in_standby(&mut self) {
        let start = Instant::now();
        let is_time = |pass: &mut Self| start.elapsed() < IN_STANDBY && pass.keep_budget_in_standby().is_ok();
        while self.heed_hints() && is_time(self) {}
    }

    fn take_over(&mut self, said: &[SaidOfBlock]) {
        let mut withheld = HashSet::new();
        let memory = self.map.memory().clone();
        for SaidOfBlock { addresses, hints } in said {
            for (first, pages) in memory.parts_at_guest(addresses) {
                let place = (first - addresses.start) / PAGE_SIZE as u64;
                let hints = &hints[usize::try_from(place).unwrap_or(usize::MAX).min(hints.len())..];
                for (page, hint) in pages.zip(hints) {
                    if !self.map.say(page, *hint) {
                        continue;
                    }
                    if hint.has(Hint::NEVER) && self.map.backing(page).maps_a_slot() {
                        self.heard.to_break.insert(page);
                    }
                    if self.map.is_withheld(page) {
                        withheld.insert(page);
                    }
                }
            }
        }
        if !withheld.is_empty() {
            self.drop_work(|page| !withheld.contains(&page));
        }
    }

    /// Makes some of what must not be shared private. What cannot be is tried again with the next pass.
    fn enforce(&mut self) {
        if self.heard.to_break.is_empty() {
            return;
        }
        self.note_breaks();
        let is_shared = |pass: &Self, page: &Page| {
            let there = pass.map.memory().has(*page) && !pass.map.is_lent(*page);
            there && pass.map.hint(*page).has(Hint::NEVER) && pass.map.backing(*page).maps_a_slot()
        };
        let next = std::iter::from_fn(|| self.heard.to_break.pop_first());
        let mut pages: Vec<Page> = next.take(BROKEN_AT_ONCE).collect();
        pages.retain(|page| is_shared(self, page));
        self.space
            .make_all_private(&mut self.map, &mut self.account, &pages);
        self.note_breaks();
        pages.retain(|page| is_shared(self, page));
        self.heard.stuck.extend(pages);
    }
}
