//! Finding twins: marks and slots in the shared index, sightings and publications with the store.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::merge::request::Item;
use crate::scan::pass::Scanner;
use crate::sys::guest;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use std::collections::HashSet;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::index::{IndexReader, Line, News};
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash};
use vmm_dedup_protocol::message::{MAX_AMBIGUOUS, MAX_BATCH, RefDelta};

/// Items collected before they are merged; bounds the memory for them.
pub(crate) const MAX_MERGES: usize = 1 << 17;

/// Least passes from one time that all candidates are sighted anew to the next.
pub(crate) const SIGHT_ANEW_PERIOD: u64 = 32;
/// The same while there are no mappings left for what is found, which can be so for ever.
pub(crate) const SIGHT_ANEW_PERIOD_FULL: u64 = 1024;

impl Scanner {
    pub(crate) fn index(&self) -> Option<&IndexReader> {
        self.store.as_ref().map(|s| s.index())
    }

    /// A page has this line key. If the index has one slot for it, that is compared at once; if the key is known to be
    /// ambiguous, the page's hash decides; else it is sighted.
    pub(crate) fn look_up(&mut self, page: Page, key: Key) -> Result<(), Error> {
        match self.index().and_then(|index| index.line(key)) {
            Some(Line::Marked(_)) => self.to_hash.push(page),
            Some(line) => self
                .merges
                .extend(line.slot_for(page).map(|slot| Item::twin_of(page, slot))),
            None => return self.sight(page, key),
        }
        Ok(())
    }

    pub(crate) fn sight(&mut self, page: Page, key: Key) -> Result<(), Error> {
        if matches!(
            self.table.get(page),
            State::Private(_) | State::Shared(_) | State::Zero
        ) {
            return Ok(()); // it changed while it waited to be hashed
        }
        let foreign = self.table.get(page).in_file_mapping();
        if self.table.get(page) == State::Untracked {
            self.table.set(page, State::Armed);
        }
        self.table.set(page, State::Candidate { key, foreign });
        let chunk = self.memory.chunk_of(page);
        self.chunks[chunk].stir(self.passes);
        // The store asks for what one batch lists, and a huge page should be asked for as one.
        let begins = page == self.memory.chunks()[chunk].pages.start;
        if begins && self.outbox.sightings.len() + CHUNK_PAGES > MAX_BATCH {
            self.flush()?;
        }
        self.outbox.sightings.push(key.raw());
        self.outbox.pages.push(page);
        if self.outbox.sightings.len() == MAX_BATCH {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// A page does not map this slot any more.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.outbox.refs.push(RefDelta {
            slot: slot.number(),
            delta: -1,
        });
    }

    /// Works until there is nothing left to hash, publish or merge.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        if self.store.is_none() {
            return Ok(());
        }
        self.release_held()?;
        self.sight_anew()?;
        loop {
            self.flush()?;
            self.take_news()?;
            self.lap(|cpu| &mut cpu.store);
            if self.to_hash.is_empty() {
                match (self.merges.is_empty(), self.outbox.is_empty()) {
                    (true, true) => break,
                    (true, false) => {} // candidates that changed were withdrawn
                    (false, _) => self.apply_merges()?,
                }
                continue;
            }
            self.hash_pages()?;
            if self.merges.len() >= MAX_MERGES {
                self.apply_merges()?;
            }
        }
        self.acknowledge()
    }

    /// Tells the store what there is to tell, and publishes what it asks for.
    ///
    /// The epoch sent was read when no lookup was pending, and every reference taken before that is in this batch or
    /// an earlier one. That is the service's half of the rule in `vmm_dedup_protocol::index`.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        while !self.outbox.is_empty() {
            let Some(store) = &mut self.store else {
                return Ok(());
            };
            let mut out = std::mem::take(&mut self.outbox);
            let rest_of = |len: usize| len.min(MAX_BATCH);
            self.outbox.withdrawals = out.withdrawals.split_off(rest_of(out.withdrawals.len()));
            self.outbox.ambiguous = out.ambiguous.split_off(out.ambiguous.len().min(MAX_AMBIGUOUS));
            self.outbox.refs = out.refs.split_off(rest_of(out.refs.len()));
            let epoch = if self.outbox.refs.is_empty() {
                self.epoch
            } else {
                self.acknowledged
            };
            let wanted = store.batch(epoch, &out.sightings, &out.withdrawals, &out.ambiguous, &out.refs)?;
            self.acknowledged = epoch;
            if self.merges.is_empty() && self.outbox.refs.is_empty() {
                self.epoch = store.index().epoch();
            }
            let pages: Vec<Page> = wanted
                .iter()
                .filter_map(|i| out.pages.get(*i as usize))
                .copied()
                .collect();
            self.publish_wanted(&pages)?;
        }
        Ok(())
    }

    /// At the end of a pass nothing is pending: lets the store reuse what was freed.
    pub(crate) fn acknowledge(&mut self) -> Result<(), Error> {
        debug_assert!(self.merges.is_empty() && self.outbox.is_empty());
        let pass = self.passes;
        self.chunks.iter_mut().for_each(|chunk| chunk.end_pass(pass));
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        store.release_staging();
        self.epoch = store.index().epoch();
        if self.epoch > self.acknowledged {
            store.batch(self.epoch, &[], &[], &[], &[])?;
            self.acknowledged = self.epoch;
        }
        Ok(())
    }

    /// Looks whether what entered the index lately concerns a candidate.
    fn take_news(&mut self) -> Result<(), Error> {
        let Some(index) = self.store.as_ref().map(|s| s.index()) else {
            return Ok(());
        };
        let position = index.news_position();
        if position == self.news {
            return Ok(());
        }
        let news = index.news_since(self.news);
        let entered = matches!(news, News::Keys(_));
        if !entered {
            self.doubt(SIGHT_ANEW_PERIOD);
        }
        let pages = match news {
            News::Keys(keys) => {
                let mut filter = [0u64; 1024];
                let bit = |raw: u64| ((raw % 65_536 / 64) as usize, 1u64 << (raw % 64));
                for key in &keys {
                    let (word, mask) = bit(key.raw());
                    filter[word] |= mask;
                }
                let keys: HashSet<u64> = keys.into_iter().map(|k| k.raw()).collect();
                self.table.candidates_with(|raw| {
                    let (word, mask) = bit(raw);
                    filter[word] & mask != 0 && keys.contains(&raw)
                })
            }
            News::Overrun => self.table.candidates_with(|_| true),
        };
        self.news = position;
        let candidates: Vec<(Page, Key)> = pages
            .into_iter()
            .filter_map(|page| self.candidate(page))
            .collect();
        let missing = self.look_up_again(&candidates);
        // What entered the index is no sighting for the store any more. If it has left already, it must become one again.
        for (page, key) in missing.into_iter().filter(|_| entered) {
            self.sight(page, key)?;
        }
        Ok(())
    }

    /// A key that enters the index is no sighting any more, and if it leaves unseen by us (much entered at once, or its twin
    /// found no mapping), nobody would ever be asked for our page. So from time to time, if that may have happened, all that
    /// the index lacks is sighted anew. It is withdrawn first: a key that is sighted twice by one VM would be asked for.
    fn sight_anew(&mut self) -> Result<(), Error> {
        if self.sight_anew_at.is_none_or(|pass| pass > self.passes) {
            return Ok(());
        }
        self.sight_anew_at = None;
        let held: HashSet<Page> = self.held_twins.iter().map(|(page, _)| *page).collect();
        let pages = self.table.candidates_with(|_| true).into_iter();
        let candidates: Vec<(Page, Key)> = pages
            .filter(|page| !held.contains(page))
            .filter_map(|page| self.candidate(page))
            .collect();
        for some in candidates.chunks(MAX_BATCH) {
            if let Err(error) = self.breathe() {
                self.doubt(SIGHT_ANEW_PERIOD);
                return Err(error);
            }
            let missing = self.look_up_again(some);
            let keys = missing.iter().map(|(_, key)| key.raw());
            self.outbox.withdrawals.extend(keys);
            self.flush()?;
            for (page, key) in missing {
                self.sight(page, key)?;
            }
        }
        self.lap(|cpu| &mut cpu.store);
        Ok(())
    }

    /// The store may have forgotten sightings: in a multiple of that many passes they are repeated.
    pub(crate) fn doubt(&mut self, period: u64) {
        let pass = (self.passes + 1).next_multiple_of(period);
        self.sight_anew_at = Some(self.sight_anew_at.map_or(pass, |at| at.min(pass)));
    }

    fn candidate(&self, page: Page) -> Option<(Page, Key)> {
        match self.table.get(page) {
            State::Candidate { key, .. } => Some((page, key)),
            _ => None,
        }
    }

    /// Looks a candidate's key up in the index; returns whether that has it now.
    pub(crate) fn find_again(&mut self, page: Page, key: Key) -> bool {
        let Some(index) = self.index() else {
            return false;
        };
        let line = match key.is_full() {
            true => index.slot_of_key(key).map(Line::Sole),
            false => index.line(key),
        };
        match line {
            Some(Line::Marked(_)) => self.to_hash.push(page),
            Some(line) => self
                .merges
                .extend(line.slot_for(page).map(|slot| Item::twin_of(page, slot))),
            None => return false,
        }
        true
    }

    /// Hashes whole pages and looks the hashes up.
    #[allow(unsafe_code)] // reads guest memory
    fn hash_pages(&mut self) -> Result<(), Error> {
        let pages = std::mem::take(&mut self.to_hash);
        let mut words = [0; PAGE_WORDS];
        for (i, page) in pages.iter().copied().enumerate() {
            if let Some(ahead) = pages.get(i + 1) {
                guest::prefetch_page(self.memory.address(*ahead));
            }
            if i % 1024 == 1023 {
                self.lap(|cpu| &mut cpu.hash);
                if let Err(error) = self.breathe() {
                    self.to_hash.extend_from_slice(&pages[i..]);
                    return Err(error);
                }
            }
            // SAFETY: guest memory stays mapped while the service runs.
            unsafe { guest::copy_page(self.memory.address(page), &mut words) };
            let hash = PageHash::of(&words, self.salt);
            self.stats.pages_hashed_total += 1;
            self.stats.bytes_read.hash += PAGE_SIZE as u64;
            let before = self.table.get(page);
            match self.index().and_then(|index| index.slot_of(hash)) {
                Some(slot) => self.merges.push(Item::twin_of(page, slot)),
                None => match before {
                    State::Candidate { key, .. } if key == hash.key() => {}
                    State::Candidate { key, .. } => {
                        self.outbox.withdrawals.push(key.raw());
                        self.sight(page, hash.key())?;
                    }
                    _ => self.sight(page, hash.key())?,
                },
            }
        }
        self.lap(|cpu| &mut cpu.hash);
        Ok(())
    }
}
