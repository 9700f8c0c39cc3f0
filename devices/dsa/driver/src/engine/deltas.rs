//! Deltas: made and applied in buffers of the driver's own. The device writes nothing of the caller's: what it does late, after
//! it was given up, meets nobody's page.
//!
//! A page fault ends a delta, which the CPU makes then.

use super::DsaEngine;
use super::page::PAGE;
use super::scratch::{Scratch, words_of};
use std::sync::atomic::Ordering;
use vmm_dedup::compare::{Answer, Arena, DELTA_ENTRY, Delta, Deltas, Error, PageId, PageView, Pages};
use vmm_dedup_dsa_abi::{
    CompletionRecord, DELTA_EQUAL, DELTA_TOO_BIG, DeltaSpace, Descriptor, DeviceAddress, Opcode,
};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::PageWords;

/// Deltas that are made or applied at once.
const AT_ONCE: usize = 64;
/// Bytes of the largest record: the least space is 80 bytes, and whole multiples of that fit into a page.
const RECORD: u32 = PAGE / 80 * 80;

/// The page of a delta's record, and of what it makes.
fn record_of(delta: usize) -> usize {
    2 * delta
}

fn result_of(delta: usize) -> usize {
    2 * delta + 1
}

impl DsaEngine {
    /// Makes the buffers when they are needed first.
    fn prepare_scratch(&mut self) -> Answer<()> {
        if self.scratch.is_some() {
            return Ok(());
        }
        let failed = |error: &dyn std::fmt::Display| Error::Device(error.to_string());
        let pages = Arena::new(2 * AT_ONCE).map_err(|error| failed(&error))?;
        let mut at = Vec::with_capacity(self.channels.len());
        let mut wrong = Vec::new();
        for (queue, channel) in self.channels.iter_mut().enumerate() {
            let Some(channel) = channel else {
                at.push(None);
                continue;
            };
            let first = pages
                .view(PageId(0))
                .map(|page| DeviceAddress(std::ptr::from_ref(page) as u64));
            match channel.map(2 * AT_ONCE * PAGE_SIZE, pages.file(), true) {
                Ok(mapped) => at.push(mapped.or(first)),
                Err(trouble) => {
                    at.push(None);
                    wrong.push((queue, trouble));
                }
            }
        }
        wrong
            .iter()
            .for_each(|(queue, trouble)| self.give_up(*queue, trouble));
        self.scratch = Some(Scratch { pages, at });
        self.alive()
    }

    /// Whether all queues do these operations.
    fn does(&self, operations: &[Opcode]) -> bool {
        self.live()
            .all(|channel| operations.iter().all(|opcode| channel.limits().does(*opcode)))
    }

    /// Records of the device for pairs of pages: `None` where it made none.
    fn created(&mut self, pairs: &[Option<[Seen<'_>; 2]>]) -> Vec<Option<CompletionRecord>> {
        if !self.does(&[Opcode::CreateDelta]) {
            return vec![None; pairs.len()];
        }
        let make = |engine: &Self, queue: usize, job: usize| {
            let [(base, base_view), (changed, changed_view)] = pairs[job]?;
            let base = engine.address(queue, base, base_view)?;
            let changed = engine.address(queue, changed, changed_view)?;
            let space = DeltaSpace {
                address: engine.scratch.as_ref()?.address(queue, record_of(job))?,
                max_bytes: RECORD,
            };
            Descriptor::create_delta(base, changed, PAGE, space).ok()
        };
        self.run(pairs.len(), make, |_, record| Some(*record))
    }

    /// The delta that a record tells of, if the device has told the truth about it as far as that can be seen.
    fn delta_of(&self, job: usize, record: CompletionRecord, changed: &PageView) -> Option<Option<Delta>> {
        match record.delta()? {
            (DELTA_EQUAL, _) => Some(Some(Delta::default())),
            (DELTA_TOO_BIG, _) => None,
            (_, bytes) => {
                let bytes = usize::try_from(bytes.min(RECORD)).ok()?;
                let words = self.scratch.as_ref()?.words(record_of(job))?;
                let record = words.iter().flat_map(|word| word.to_ne_bytes()).take(bytes);
                let delta = Delta::try_new(record.collect())?;
                let differs = |(index, value): (usize, u64)| changed[index].load(Ordering::Relaxed) == value;
                let true_so_far = delta.entries().all(differs);
                true_so_far.then_some(Some(delta))
            }
        }
    }
}

/// A page by its number, and as the CPU sees it.
type Seen<'p> = (PageId, &'p PageView);

impl Deltas for DsaEngine {
    fn create_deltas(
        &mut self,
        pages: &dyn Pages,
        of: &[(PageId, PageId)],
        most: usize,
    ) -> Vec<Answer<Option<Delta>>> {
        if let Err(error) = self.alive().and_then(|()| self.prepare_scratch()) {
            return of.iter().map(|_| Err(error.clone())).collect();
        }
        let watch = self.watch();
        let mut answers = Vec::with_capacity(of.len());
        for some in of.chunks(AT_ONCE) {
            let seen = |page: PageId| Some((page, pages.view(page).filter(|_| self.may_read(page))?));
            let pairs: Vec<Option<[Seen<'_>; 2]>> = some
                .iter()
                .map(|(base, changed)| Some([seen(*base)?, seen(*changed)?]))
                .collect();
            let records = self.created(&pairs);
            for (job, ((pair, record), (base, changed))) in pairs.iter().zip(records).zip(some).enumerate() {
                answers.push(match pair {
                    None if pages.view(*base).is_none() || !self.may_read(*base) => Err(Error::Fault(*base)),
                    None => Err(Error::Fault(*changed)),
                    Some([(_, base), (_, changed)]) => {
                        self.past.cpu_instead += u64::from(record.is_none());
                        let by_device = record.and_then(|record| self.delta_of(job, record, changed));
                        let delta = by_device.unwrap_or_else(|| {
                            // Larger than a record, or the device did not make it.
                            Some(Delta::between(&words_of(base), &words_of(changed)))
                        });
                        Ok(delta.filter(|delta| delta.len() <= most))
                    }
                });
            }
        }
        let lines = of.len() as u64 * 2 * u64::from(PAGE) / 64;
        self.account.comparisons += of.len() as u64;
        self.account.lines += lines;
        self.account.bytes += lines * 64;
        self.stop(&watch);
        answers
    }

    fn apply_deltas(&mut self, pages: &dyn Pages, of: &[(PageId, &Delta)]) -> Vec<Answer<Box<PageWords>>> {
        if let Err(error) = self.alive().and_then(|()| self.prepare_scratch()) {
            return of.iter().map(|_| Err(error.clone())).collect();
        }
        let watch = self.watch();
        let mut answers = Vec::with_capacity(of.len());
        for some in of.chunks(AT_ONCE) {
            let views: Vec<Option<&PageView>> = some
                .iter()
                .map(|(page, _)| pages.view(*page).filter(|_| self.may_read(*page)))
                .collect();
            let applied = self.applied(some, &views);
            for (((page, delta), view), applied) in some.iter().zip(views).zip(applied) {
                answers.push(match (applied, view) {
                    (_, None) => Err(Error::Fault(*page)),
                    (Some(words), _) => Ok(words),
                    (None, Some(view)) => {
                        self.past.cpu_instead += 1;
                        let mut words = Box::new(words_of(view));
                        delta.apply(&mut words);
                        Ok(words)
                    }
                });
            }
        }
        self.stop(&watch);
        answers
    }
}

impl DsaEngine {
    /// What the device makes of pages by deltas: `None` where it does not.
    fn applied(
        &mut self,
        of: &[(PageId, &Delta)],
        views: &[Option<&PageView>],
    ) -> Vec<Option<Box<PageWords>>> {
        if !self.does(&[Opcode::Memmove, Opcode::ApplyDelta]) || self.channels.len() != 1 {
            // What one queue's device has copied another one's may not see yet.
            return vec![None; of.len()];
        }
        if let Some(scratch) = &self.scratch {
            for (job, (_, delta)) in of.iter().enumerate() {
                let fits = delta.bytes().len() <= PAGE_SIZE;
                if let Some(page) = scratch.view(record_of(job)).filter(|_| fits) {
                    for (word, bytes) in page.iter().zip(delta.bytes().chunks(8)) {
                        let mut whole = [0; 8];
                        whole[..bytes.len()].copy_from_slice(bytes);
                        word.store(u64::from_ne_bytes(whole), Ordering::Release);
                    }
                }
            }
        }
        let copy = |engine: &Self, queue: usize, job: usize| {
            let from = engine.address(queue, of[job].0, views[job]?)?;
            let to = engine.scratch.as_ref()?.address(queue, result_of(job))?;
            Descriptor::memmove(from, to, PAGE).ok()
        };
        let done = |_: usize, record: &CompletionRecord| record.is_done().then_some(());
        let copied = self.run(of.len(), copy, done);
        let apply = |engine: &Self, queue: usize, job: usize| {
            let delta = of[job].1;
            let bytes = u32::try_from(delta.len() * DELTA_ENTRY).ok()?;
            if copied[job].is_none() || delta.is_empty() || bytes > PAGE {
                return None;
            }
            let scratch = engine.scratch.as_ref()?;
            let record = scratch.address(queue, record_of(job))?;
            Descriptor::apply_delta(record, bytes, scratch.address(queue, result_of(job))?, PAGE).ok()
        };
        let applied = self.run(of.len(), apply, done);
        let words = |(job, applied): (usize, &Option<()>)| {
            let nothing_to_apply = of[job].1.is_empty() && copied[job].is_some();
            let done = applied.is_some() || nothing_to_apply;
            Some(Box::new(self.scratch.as_ref()?.words(result_of(job))?)).filter(|_| done)
        };
        applied.iter().enumerate().map(words).collect()
    }
}
