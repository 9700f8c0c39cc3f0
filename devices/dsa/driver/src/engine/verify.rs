//! Verifying: comparisons of pages that were taken with slots, submitted in one call and answered in others.
#![allow(unsafe_code)] // the trait's submit() is unsafe

use super::DsaEngine;
use super::page::PAGE;
use super::verifying::{MOST, Running};
use crate::channel::{Item, ItemError};
use std::time::{Duration, Instant};
use vmm_dedup::compare::{
    Answer, Compared, Error, Limits, PageId, Pair, PairAnswer, StablePage, Verify, With,
};
use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress, Opcode};
use vmm_dedup_protocol::PAGE_SIZE;

/// Pairs of a call, if the device reads pages where they are.
const AT_ONCE: usize = 64;
/// Pairs of a call, if they have to be copied.
const AT_ONCE_COPIED: usize = 32;
/// How often the CPU's time for a pair is measured: each time of so many.
const MEASURE: u64 = 64;

impl DsaEngine {
    /// The descriptor of a pair, whose taken page is copied if need be.
    fn describe(&self, queue: usize, tag: usize, pair: &Pair<'_>) -> Answer<Descriptor> {
        let wrong = |error: vmm_dedup_dsa_abi::Error| Error::Device(error.to_string());
        let copied = self
            .verifying
            .copies
            .as_ref()
            .and_then(|(arena, at)| Some((arena, at[queue]?)));
        let taken = match copied {
            None => DeviceAddress(pair.taken.address() as u64),
            Some((arena, at)) => {
                arena.write(tag, pair.taken.words());
                DeviceAddress(at.0 + (tag * PAGE_SIZE) as u64)
            }
        };
        match pair.with {
            With::Zeros => Descriptor::compare_pattern(taken, 0, PAGE).map_err(wrong),
            With::Slot { id, page } => {
                let slot = if copied.is_some() {
                    self.seen_at(queue, id).ok_or(Error::Fault(id))?
                } else {
                    DeviceAddress(page.address() as u64)
                };
                Descriptor::compare(taken, slot, PAGE).map_err(wrong)
            }
        }
    }

    /// Whether the CPU would have compared so many pairs by the time the device has.
    fn cpu_is_sooner(&mut self, pairs: &[Pair<'_>]) -> bool {
        if !self.options.only_if_sooner {
            return false;
        }
        let device = { self.live() }
            .map(|channel| channel.latencies(Opcode::Compare).expect(pairs.len()))
            .min();
        let verifying = &mut self.verifying;
        if verifying.asked.is_multiple_of(MEASURE)
            && let Some(pair) = pairs.first()
        {
            // A page with itself: as long as an equal pair takes.
            let same = Pair {
                taken: pair.taken,
                with: With::Slot {
                    id: PageId(0),
                    page: StablePage::from(pair.taken.words()),
                },
            };
            let start = Instant::now();
            std::hint::black_box(std::hint::black_box(same).equal());
            let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            verifying.cpu_ns = if verifying.cpu_ns == 0 {
                took
            } else {
                verifying.cpu_ns.min(took * 4) / 2 + took / 2
            };
        }
        verifying.asked += 1;
        let cpu = Duration::from_nanos(verifying.cpu_ns * pairs.len() as u64);
        // The device is asked now and then, so that its times are known.
        !verifying.asked.is_multiple_of(MEASURE) && device.is_some_and(|device| cpu < device)
    }

    /// Answers a pair at once.
    fn answer(&mut self, number: u64, compared: Compared) {
        self.account.comparisons += 1;
        self.account.lines += 2;
        self.account.bytes += 128;
        let answer = Ok(compared);
        self.verifying.ready.push(PairAnswer { number, answer });
    }

    /// Takes what has ended.
    fn take_ended(&mut self) -> Answer<()> {
        let mut ended = Vec::new();
        for queue in 0..self.channels.len() {
            let Some(channel) = self.channels[queue].as_mut() else {
                continue;
            };
            let mut tell = |tag: u64, outcome| ended.push((tag, outcome));
            if let Err(trouble) = channel.poll(&mut tell) {
                self.give_up(queue, &trouble);
            }
        }
        // The CPU compares what queues had that failed.
        ended.extend(self.orphans.drain(..).map(|tag| (tag, Err(ItemError::Abandoned))));
        let (verifying, account, past) = (&mut self.verifying, &mut self.account, &mut self.past);
        ended
            .into_iter()
            .for_each(|(tag, outcome)| verifying.ended(account, past, tag, outcome));
        self.alive()
    }
}

/// What the first lines of a pair tell.
fn by_first_line(pair: &Pair<'_>) -> Option<Compared> {
    (0..64).step_by(8).find_map(|at| {
        (at..at + 8)
            .find(|offset| pair.differs_at(*offset))
            .map(|offset| Compared::Different(Some(offset)))
    })
}

impl Verify for DsaEngine {
    fn limits(&self) -> Limits {
        let copies = self.verifying.copies.is_some();
        Limits {
            at_once: if copies { AT_ONCE_COPIED } else { AT_ONCE },
            zeros: self
                .live()
                .all(|channel| channel.limits().does(Opcode::ComparePattern)),
        }
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        self.alive()?;
        let watch = self.watch();
        let taken = self.begin(first, pairs);
        self.account.pages += *taken.as_ref().unwrap_or(&0) as u64;
        self.stop(&watch);
        taken
    }

    fn poll(&mut self, wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        let watch = self.watch();
        let mut polled = self.take_ended();
        if polled.is_ok() && self.verifying.ready.is_empty() && !wait.is_zero() {
            self.wait(wait);
            polled = self.take_ended();
        }
        answers.append(&mut self.verifying.ready);
        self.stop(&watch);
        polled
    }

    /// Descriptors go on, and what they find is forgotten. A device that uses this process's addresses may read pages that
    /// have become others meanwhile: it writes none of them.
    fn abort(&mut self) {
        self.verifying.ready.clear();
        for at in 0..MOST {
            self.verifying.running[at].number = None;
        }
        self.channels
            .iter_mut()
            .flatten()
            .for_each(crate::channel::Channel::abandon);
    }
}

impl DsaEngine {
    /// Begins to compare pairs: those of them that the first lines do not decide.
    fn begin(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        if self.roomiest().is_none() || self.verifying.free.is_empty() {
            // What was aborted may have ended.
            self.take_ended()?;
        }
        let full = self.roomiest().is_none() || self.verifying.free.is_empty();
        let asked = |running: &Running| running.number.is_some();
        if full && (!self.verifying.ready.is_empty() || self.verifying.running.iter().any(asked)) {
            return Ok(0);
        }
        // With a queue full of what was aborted nobody would be waited for.
        let sooner = !full && self.cpu_is_sooner(pairs);
        if full || sooner {
            if sooner {
                self.past.cpu_sooner += pairs.len() as u64;
            } else {
                self.past.cpu_instead += pairs.len() as u64;
            }
            for (at, pair) in pairs.iter().enumerate() {
                self.answer(first + at as u64, pair.compare());
            }
            return Ok(pairs.len());
        }
        let Some(queue) = self.roomiest() else {
            return Ok(0);
        };
        let mut batch: Vec<Item> = Vec::with_capacity(pairs.len());
        let mut asked: Vec<&Pair<'_>> = Vec::with_capacity(pairs.len());
        let most = self.channels[queue]
            .as_ref()
            .map_or(1, |channel| channel.most_members());
        let mut taken = 0;
        for (at, pair) in pairs.iter().enumerate() {
            let number = first + at as u64;
            if let Some(compared) = by_first_line(pair).filter(|_| self.options.hybrid) {
                self.answer(number, compared);
                taken += 1;
                continue;
            }
            if batch.len() >= most.min(self.options.batch) {
                break;
            }
            let Some(tag) = self.verifying.free.pop() else {
                break;
            };
            match self.describe(queue, tag, pair) {
                Ok(descriptor) => {
                    self.verifying.running[tag] = Running {
                        number: Some(number),
                        with: match pair.with {
                            With::Slot { id, .. } => Some(id),
                            With::Zeros => None,
                        },
                        taken: pair.taken.address(),
                    };
                    batch.push((descriptor, tag as u64));
                    asked.push(pair);
                }
                Err(error) => {
                    self.verifying.free.push(tag);
                    self.verifying.ready.push(PairAnswer {
                        number,
                        answer: Err(error),
                    });
                }
            }
            taken += 1;
        }
        if batch.is_empty() {
            return Ok(taken);
        }
        let started = self.channels[queue]
            .as_mut()
            .map_or(Ok(0), |channel| channel.start(&batch));
        let started = started.unwrap_or_else(|trouble| {
            self.give_up(queue, &trouble);
            0
        });
        // What a full queue did not take the CPU compares.
        for ((_, tag), pair) in batch.iter().zip(asked).skip(started) {
            let at = usize::try_from(*tag).unwrap_or(0);
            let number = self.verifying.running[at].number;
            self.verifying.free(at);
            if let Some(number) = number {
                self.past.cpu_instead += 1;
                self.answer(number, pair.compare());
            }
        }
        Ok(taken)
    }
}
