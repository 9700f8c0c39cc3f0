//! Finding out what was written, and which pages have stood still long enough to be keyed.

use crate::error::Error;
use crate::lookup::candidates::MAX_MERGES;
use crate::lookup::tree_search::BATCH;
use crate::memory::chunk_state::MAX_PERIOD;
use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::guest;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::pagemap::Written;
use std::ops::Range;
use vmm_dedup_protocol::key::Key;

/// Chunks asked for in one request (64 MiB).
const CHUNKS_PER_SCAN: usize = 32;
/// Every chunk is visited at least this often, in passes, for what raises no fault here: another process writing
/// guest memory through the kernel.
const FORCED_PERIOD: u64 = 128;
/// Passes from one look for copied pages in a chunk to the next.
const BREAKS_PERIOD: u64 = 16;
/// Keys that are looked up one after the other, so that the loads overlap.
const KEYED_TOGETHER: usize = 64;
/// Pages whose key lines are fetched ahead.
pub(crate) const PREFETCH: usize = 8;

impl Scanner {
    /// Visits the chunks that are due.
    pub(crate) fn track(&mut self) -> Result<(), Error> {
        if self.store.is_none() {
            return Ok(());
        }
        let mut skipped = false;
        let mut at = 0;
        while at < self.chunks.len() {
            if !self.is_due(at, &mut skipped) {
                at += 1;
                continue;
            }
            let mut end = at + 1;
            while end < self.chunks.len()
                && end - at < CHUNKS_PER_SCAN
                && self.memory.chunks()[end].start == self.memory.chunks()[end - 1].addresses().end
                && self.is_due(end, &mut skipped)
            {
                end += 1;
            }
            self.visit(at..end)?;
            self.breathe()?;
            if self.merges.len() >= MAX_MERGES {
                self.apply_merges()?;
            }
            at = end;
        }
        self.find_breaks()?;
        if !skipped || self.passes.is_multiple_of(MAX_PERIOD) {
            self.stats.full_scans_total += 1;
        }
        Ok(())
    }

    fn is_due(&self, at: usize, skipped: &mut bool) -> bool {
        let chunk = &self.chunks[at];
        if chunk.released {
            return false;
        }
        let turn = |period: u64| (self.passes + at as u64).is_multiple_of(period);
        if turn(FORCED_PERIOD) || chunk.is_ripe(self.passes) {
            return true;
        }
        let due = chunk.pending && turn(chunk.period());
        *skipped |= chunk.pending && !due;
        due
    }

    /// Asks the kernel about consecutive chunks, then takes them one by one.
    fn visit(&mut self, chunks: Range<usize>) -> Result<(), Error> {
        let range =
            self.memory.chunks()[chunks.start].start..self.memory.chunks()[chunks.end - 1].addresses().end;
        let mut written = vec![[0u64; CHUNK_PAGES / 64]; chunks.len()];
        let mut huge = vec![false; chunks.len()];
        let mut starts = self.memory.chunks()[chunks.clone()]
            .iter()
            .map(|c| c.start)
            .collect::<Vec<_>>();
        starts.push(range.end);
        let mut note = |found: Written| {
            for at in found.range.clone().step_by(PAGE_SIZE) {
                let chunk = starts.partition_point(|s| *s <= at) - 1;
                if found.huge {
                    huge[chunk] = true;
                } else {
                    let page = (at - starts[chunk]) / PAGE_SIZE;
                    written[chunk][page / 64] |= 1 << (page % 64);
                }
            }
        };
        self.pagemap.written(range, &mut note).map_err(Error::Pagemap)?;
        for (i, at) in chunks.enumerate() {
            let was_huge = std::mem::replace(&mut self.chunks[at].huge, huge[i]);
            if huge[i] {
                // Never protected, so that a write does not split it; see `crate::thp::monitor`.
                self.chunks[at].pending = false;
                self.chunks[at].mixed.ours = false;
                continue;
            }
            if was_huge {
                self.chunks[at].unarmed = true;
                self.chunks[at].forget_twins();
            }
            self.visit_small(at, &written[i]);
        }
        let protect = std::mem::take(&mut self.to_protect);
        // Protected only now, and keyed in a later pass at the earliest: a write in between is still seen there.
        for range in protect {
            if let Err(error) = self.tracker.write_protect(range.start, range.len(), true) {
                // Its pages keep counting as written: they are not merged, and nothing else happens.
                log::debug!("cannot protect {range:x?}: {error}");
            }
        }
        self.lap(|cpu| &mut cpu.track);
        self.key_pages()
    }

    /// Draws the conclusions for a chunk of small pages. Pages to be keyed are left in `to_key`.
    fn visit_small(&mut self, at: usize, written: &[u64; CHUNK_PAGES / 64]) {
        let pages = self.memory.chunks()[at].pages.clone();
        let unarmed = std::mem::take(&mut self.chunks[at].unarmed);
        let mut waiting = false;
        for page in pages.clone() {
            let offset = (page - pages.start) as usize;
            let was_written = written[offset / 64] & (1 << (offset % 64)) != 0;
            let state = self.table.get(page);
            // What lay in a mapping of the store when the pass began was broken since. The next pass learns of that, and must
            // find it written then.
            if was_written && !state.in_file_mapping() {
                self.note_protect(page);
            }
            match (state, was_written) {
                (State::Untracked | State::Zero | State::Seen { .. }, true) => {
                    self.table.set(page, State::Armed);
                    waiting = true;
                }
                (State::Armed | State::Volatile, true) => {
                    self.table.set(page, State::Volatile);
                    waiting = true;
                }
                // Not worth a visit of its own: chunks are visited now and then.
                (State::Pinned(retry), false) if retry.is_due(self.passes) => self.to_key.push(page),
                (State::Candidate { key, foreign: false }, true) if !unarmed => {
                    self.outbox.withdrawals.push(key.raw());
                    self.table.set(page, State::Armed);
                    waiting = true;
                }
                (state, false) if state.awaits_key() && !self.is_probe(at, page) => self.to_key.push(page),
                _ => {}
            }
        }
        self.chunks[at].pending = waiting;
    }

    /// Remembers a page to be protected. (PAGEMAP_SCAN could find and protect in one request, but the kernel then drops
    /// KVM's mappings of the whole range, written or not.)
    fn note_protect(&mut self, page: Page) {
        let start = self.memory.address(page);
        let end = start + PAGE_SIZE;
        match self.to_protect.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => self.to_protect.push(start..end),
        }
    }

    /// Looks for shared pages that the kernel copied, in chunks where something may have happened, each in its turn:
    /// what a copy frees is only known later then, and walking the store's mappings costs most of a pass.
    fn find_breaks(&mut self) -> Result<(), Error> {
        for at in 0..self.chunks.len() {
            let turn = (self.passes + at as u64).is_multiple_of(BREAKS_PERIOD);
            if !turn || !self.chunks[at].unchecked {
                continue;
            }
            self.chunks[at].unchecked = false;
            let pages = self.memory.chunks()[at].pages.clone();
            if !pages.clone().any(|page| self.table.get(page).maps_a_slot()) {
                continue;
            }
            let range = self.memory.chunks()[at].addresses();
            for copied in self.pagemap.copied(range.clone()).map_err(Error::Pagemap)? {
                for address in copied.step_by(PAGE_SIZE) {
                    let page = pages.start + Page::try_from((address - range.start) / PAGE_SIZE).unwrap_or(0);
                    if self.table.get(page).maps_a_slot() {
                        self.note_kernel_break(page);
                    }
                }
            }
        }
        self.lap(|cpu| &mut cpu.track);
        Ok(())
    }

    /// The kernel copied a shared page for a writer.
    fn note_kernel_break(&mut self, page: Page) {
        if !self.breaker.kernel_broke(page) {
            return; // the fault thread did, and will tell
        }
        let state = self.table.get(page);
        match state {
            State::Shared(slot) => self.release(slot),
            State::Candidate { key, .. } => self.outbox.withdrawals.push(key.raw()),
            _ => {}
        }
        self.table.set(page, State::Private(state.place()));
        self.note_break(self.memory.chunk_of(page));
        self.stats.breaks_kernel_total += 1;
    }

    /// Reads the key lines of the pages in `to_key`.
    pub(crate) fn key_pages(&mut self) -> Result<(), Error> {
        let pages = std::mem::take(&mut self.to_key);
        let together = if self.searcher.is_on() {
            BATCH
        } else {
            KEYED_TOGETHER
        };
        let mut keys = Vec::with_capacity(together);
        for (i, page) in pages.iter().enumerate() {
            if let Some(ahead) = pages.get(i + PREFETCH) {
                guest::prefetch_key_lines(self.memory.address(*ahead));
            }
            let (key, zero) = self.read_key(*page);
            if zero {
                self.merges.push(Item::zero(*page));
            } else {
                keys.push((*page, key));
            }
            if keys.len() == together || i + 1 == pages.len() {
                self.touch_index(&keys);
                self.look_up_all(&keys)?;
                keys.clear();
            }
        }
        self.lap(|cpu| &mut cpu.key);
        self.to_key = pages;
        self.to_key.clear();
        Ok(())
    }

    /// Brings what keys will be looked up in into the cache.
    fn touch_index(&self, keys: &[(Page, Key)]) {
        if let Some(index) = self.index() {
            std::hint::black_box(keys.iter().fold(0, |sum, (_, key)| sum ^ index.touch(*key)));
        }
    }

    /// Reads a page's key: `(key, whether the key lines are all zero)`.
    #[allow(unsafe_code)] // reads guest memory
    pub(crate) fn read_key(&mut self, page: Page) -> (Key, bool) {
        // SAFETY: guest memory stays mapped while the service runs.
        let lines = unsafe { guest::key_lines(self.memory.address(page)) };
        self.stats.pages_keyed_total += 1;
        self.stats.bytes_read.key += 256;
        let zero = lines.iter().fold(0, |all, w| all | w) == 0;
        (Key::of_lines(&lines, self.salt), zero && self.is_zero_now(page))
    }

    #[allow(unsafe_code)] // reads guest memory
    fn is_zero_now(&mut self, page: Page) -> bool {
        let mut words = [0; vmm_dedup_protocol::key::PAGE_WORDS];
        // SAFETY: as above.
        unsafe { guest::copy_page(self.memory.address(page), &mut words) };
        self.stats.bytes_read.key += PAGE_SIZE as u64;
        words.iter().fold(0, |all, w| all | w) == 0
    }
}
