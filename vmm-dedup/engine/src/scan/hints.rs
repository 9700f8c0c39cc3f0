//! Taking over what the guest's agent says, between the work of passes. It changes what is looked at, never what is safe.

use crate::hints::line::SaidOfBlock;
use crate::memory::hint::Hint;
use crate::memory::layout::Page;
use crate::scan::pass::Pass;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use std::collections::HashSet;

/// Pages that are made private between two looks at what else there is to do.
const BROKEN_AT_ONCE: usize = 16 * CHUNK_PAGES;

impl Pass {
    /// Hears what the agent said since the last call. Once a pass: an agent that never ends must not keep the pass from its end,
    /// for which other VMs wait.
    pub(super) fn hear_hints(&mut self) {
        self.heard.hear();
    }

    /// Takes over some of what was heard; whether there is more. To be called where nothing is in the planner's hands.
    ///
    /// Once the agent hears that a mark is in force, no page under it is shared, none has a key, and none gets one while it is
    /// marked: whoever reads keys asks [`PageMap::rests`](crate::memory::page_map::PageMap::rests) first, and what had been found
    /// before is dropped here.
    pub(super) fn heed_hints(&mut self) -> bool {
        let said = self.heard.next();
        self.take_over(&said);
        if self.heard.has_more() {
            return true;
        }
        let more = self.enforce();
        self.account.lap(|cpu| &mut cpu.track);
        more
    }

    fn take_over(&mut self, said: &[SaidOfBlock]) {
        let mut resting = HashSet::new();
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
                        self.heard.to_break.push(page);
                    }
                    if self.map.rests(page) {
                        resting.insert(page);
                    }
                }
            }
        }
        if !resting.is_empty() {
            self.drop_work(|page| !resting.contains(&page));
        }
    }

    /// Makes some of what must not be shared private, and tells the agent when nothing of it is shared any more. Whether there is
    /// more to be made private now.
    fn enforce(&mut self) -> bool {
        let mut more = false;
        if !self.heard.to_break.is_empty() {
            self.note_breaks();
            let mut pages = std::mem::take(&mut self.heard.to_break);
            let is_shared = |pass: &Self, page: &Page| {
                let there = pass.map.memory().has(*page) && !pass.map.is_lent(*page);
                there && pass.map.hint(*page).has(Hint::NEVER) && pass.map.backing(*page).maps_a_slot()
            };
            pages.retain(|page| is_shared(self, page));
            pages.sort_unstable();
            pages.dedup();
            let now = &pages[..pages.len().min(BROKEN_AT_ONCE)];
            self.space.make_all_private(&mut self.map, &mut self.account, now);
            self.note_breaks();
            // What could not be made private is tried again with the next pass.
            let stays = now.iter().filter(|page| is_shared(self, page)).count();
            more = stays == 0 && now.len() < pages.len();
            pages.retain(|page| is_shared(self, page));
            self.heard.to_break = pages;
        }
        if self.heard.to_break.is_empty() {
            self.heard.done();
        }
        more
    }
}
