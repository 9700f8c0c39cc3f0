//! DSA as an engine: keys, verification, deltas, and searches by comparisons, through one or several work queues.
//!
//! *What the device reads.* A queue that uses this process's addresses reads pages where they are. Another one reads files
//! that it was given; pages that were taken are copied into a buffer for it.
//!
//! *What it does not tell.* A comparison gives the offset of the first difference, and no order: the CPU looks at that byte
//! of both pages.
//!
//! *Hybrid.* The CPU compares the first line of two pages itself, and asks the device only if they are equal: most pages
//! that differ do so there.
//!
//! *Several queues.* Batches go to the queue with most room. A queue that fails is left out, and what it had is done by
//! others or the CPU; when none is left the CPU ends the call at hand, and the next one is an error.

mod deltas;
mod keys;
mod page;
mod scratch;
mod search;
mod verify;
mod verifying;

use crate::channel::{Channel, Item, ItemError};
use crate::way::{Trouble, WorkQueue};
use scratch::Scratch;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use verifying::Verifying;
use vmm_dedup::compare::{Account, Answer, DeviceWork, Engine, Error, Meanwhile, PageId, PageView};
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, DeviceAddress};
use vmm_dedup_protocol::PAGE_SIZE;

/// How an engine is to work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The CPU looks at the first line of two pages before the device does.
    pub hybrid: bool,
    /// Levels of a tree that are compared at once, 1 to 4: those below the first are guesses.
    pub levels: u32,
    /// Most members of a batch: 1 gives each page a descriptor of its own.
    pub batch: usize,
    /// Most batches, or descriptors alone, that a queue has in flight: 1 waits for each before the next is submitted.
    pub in_flight: usize,
    /// What takes the device longer than this is taken for lost.
    pub time_limit: Duration,
    /// Comparisons that the CPU would do sooner are left to it.
    pub only_if_sooner: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            hybrid: true,
            levels: 2,
            batch: 1024,
            in_flight: 16,
            time_limit: Duration::from_millis(250),
            only_if_sooner: true,
        }
    }
}

/// Files that the devices were given.
struct Given {
    pages: usize,
    /// Where each queue's device sees it.
    at: Vec<Option<DeviceAddress>>,
}

/// DSA as an engine.
pub struct DsaEngine {
    /// Queues; `None` for those that failed.
    channels: Vec<Option<Channel>>,
    options: Options,
    given: BTreeMap<PageId, Given>,
    verifying: Verifying,
    /// Where deltas are made.
    scratch: Option<Scratch>,
    account: Account,
    /// What queues had done that failed, and what was left to the CPU.
    past: DeviceWork,
    /// Why the last queue was given up.
    failure: Option<String>,
    /// What queues had that were given up: tags.
    orphans: Vec<u64>,
    /// What is to be logged when no pages of a guest are away: who reads the log may wait for one of them.
    notes: Vec<String>,
}

/// In the tags of jobs; those of pairs do not have it.
const JOB: u64 = 1 << 63;

/// The job that a tag is of.
fn job_of(tag: u64) -> Option<usize> {
    usize::try_from(tag & !JOB).ok()
}

impl DsaEngine {
    /// Drives these queues, which nobody else may do.
    ///
    /// # Errors
    /// If there are none, one cannot be used, or the devices cannot be given memory.
    pub fn new(queues: Vec<Box<dyn WorkQueue>>, options: Options) -> Answer<Self> {
        let mut channels = Vec::with_capacity(queues.len());
        for queue in queues {
            let name = queue.name().to_owned();
            if let Some(why) = queue.limits().unfit() {
                return Err(Error::Device(format!("{name} cannot be used: {why}")));
            }
            let channel = Channel::new(queue, options.time_limit, options.in_flight, options.batch);
            let channel = channel.map_err(|error| Error::Device(format!("no memory for {name}: {error}")))?;
            channels.push(Some(channel));
        }
        if channels.is_empty() {
            return Err(Error::Device("no work queue was named".to_owned()));
        }
        Ok(Self {
            verifying: Verifying::new(&mut channels)?,
            scratch: None,
            channels,
            options,
            given: BTreeMap::new(),
            account: Account::default(),
            past: DeviceWork::default(),
            failure: None,
            orphans: Vec::new(),
            notes: Vec::new(),
        })
    }

    fn live(&self) -> impl Iterator<Item = &Channel> {
        self.channels.iter().flatten()
    }

    /// The queue with most room for batches of `size`.
    fn roomiest(&self) -> Option<usize> {
        let rooms = self.channels.iter().enumerate();
        let rooms = rooms.filter_map(|(at, channel)| Some((at, channel.as_ref()?)));
        let best = rooms.filter(|(_, channel)| channel.has_room());
        best.min_by_key(|(_, channel)| channel.in_flight())
            .map(|(at, _)| at)
    }

    /// Leaves a queue out. Of the last one the error tells that the next call ends with, which the service logs.
    fn give_up(&mut self, at: usize, trouble: &Trouble) {
        if let Some(channel) = self.channels[at].take() {
            let (name, left) = (channel.name(), self.live().count());
            if left > 0 {
                self.notes.push(format!(
                    "DSA's {name} is given up, {left} queues are left: {trouble}"
                ));
            }
            self.past = self.past.and(channel.work());
            self.past.queues_lost += 1;
            self.orphans.extend(channel.open_tags());
            self.failure = Some(format!("{}: {trouble}", channel.name()));
        }
    }

    fn log_notes(&mut self) {
        self.notes.drain(..).for_each(|note| log::warn!("{note}"));
        for channel in self.channels.iter_mut().flatten() {
            if let Some(note) = channel.take_note() {
                log::warn!("DSA's {}: {note}", channel.name());
            }
        }
    }

    /// An error, if no queue is left.
    fn alive(&self) -> Answer<()> {
        if self.live().next().is_some() {
            return Ok(());
        }
        let why = self.failure.clone();
        Err(Error::Device(
            why.unwrap_or_else(|| "no queue is left".to_owned()),
        ))
    }

    /// Where a queue's device sees a page that it was given.
    fn seen_at(&self, queue: usize, page: PageId) -> Option<DeviceAddress> {
        let (first, given) = self.given.range(..=page).next_back()?;
        let at = page.0 - first.0;
        let start = (at < given.pages as u64).then_some(given.at[queue]?)?;
        start.checked_add(at * PAGE_SIZE as u64)
    }

    /// Whether all queues could read a page: those that use this process's addresses can read whatever there is.
    fn may_read(&self, page: PageId) -> bool {
        (0..self.channels.len()).all(|queue| match &self.channels[queue] {
            Some(channel) if !channel.uses_process_addresses() => self.seen_at(queue, page).is_some(),
            _ => true,
        })
    }

    /// Where a queue's device sees a page of the caller's.
    fn address(&self, queue: usize, page: PageId, view: &PageView) -> Option<DeviceAddress> {
        let direct = self.channels[queue].as_ref()?.uses_process_addresses();
        if direct {
            Some(DeviceAddress(std::ptr::from_ref(view) as u64))
        } else {
            self.seen_at(queue, page)
        }
    }

    /// Has all of these jobs done and waits for that. `make` gives the descriptor of a job for a queue, `read` the result
    /// that is in its record; jobs that have none, or that no queue does, are left without. A batch is of one operation.
    fn run<T>(
        &mut self,
        jobs: usize,
        make: impl Fn(&Self, usize, usize) -> Option<Descriptor>,
        read: impl Fn(usize, &CompletionRecord) -> Option<T>,
    ) -> Vec<Option<T>> {
        self.run_meanwhile(jobs, make, read, &mut Meanwhile::nothing())
    }

    /// The same. When the devices have all of them, and the thread would wait, work of the caller's is done first.
    fn run_meanwhile<T>(
        &mut self,
        jobs: usize,
        make: impl Fn(&Self, usize, usize) -> Option<Descriptor>,
        read: impl Fn(usize, &CompletionRecord) -> Option<T>,
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Option<T>> {
        let mut results: Vec<Option<T>> = Vec::with_capacity(jobs);
        results.resize_with(jobs, || None);
        let mut note = |job: usize, record: &CompletionRecord| {
            if let Some(place) = results.get_mut(job) {
                *place = read(job, record);
            }
        };
        // The next one is the last: those of a queue that failed come first.
        let mut todo: Vec<usize> = (0..jobs).rev().collect();
        let mut batch: Vec<Item> = Vec::new();
        loop {
            let mut full = false;
            while !todo.is_empty()
                && let Some(queue) = self.roomiest()
            {
                self.fill(queue, &mut todo, &mut batch, &make);
                let Some(channel) = self.channels[queue].as_mut() else {
                    break;
                };
                if batch.is_empty() {
                    continue;
                }
                let started = channel.start(&batch);
                let count = *started.as_ref().unwrap_or(&0);
                let left = batch[count..].iter().rev();
                todo.extend(left.filter_map(|(_, tag)| job_of(*tag)));
                if let Err(trouble) = started {
                    self.give_up(queue, &trouble);
                } else if count == 0 {
                    full = true;
                    break;
                }
            }
            let lost = self.collect(&mut note);
            todo.extend(lost);
            let busy = self.live().any(|channel| !channel.is_idle());
            if !busy && (todo.is_empty() || self.live().next().is_none()) {
                return results;
            }
            if !full && !todo.is_empty() && self.roomiest().is_some() {
                // Waiting first would leave the devices with less to do than they can have.
                continue;
            }
            const MOST: Duration = Duration::from_millis(10);
            if todo.is_empty() && !meanwhile.is_done() {
                meanwhile.run();
                self.channels.iter_mut().flatten().for_each(Channel::was_away);
            } else if todo.is_empty() {
                let channels = self.channels.iter_mut().flatten();
                channels.for_each(|channel| channel.wait_for_all(MOST));
            } else if let [Some(only)] = &mut self.channels[..] {
                only.wait_for_room(MOST);
            } else {
                self.wait(MOST);
            }
        }
    }

    /// Makes a batch of the next jobs, of one operation. Jobs without a descriptor are done with.
    fn fill(
        &self,
        queue: usize,
        todo: &mut Vec<usize>,
        batch: &mut Vec<Item>,
        make: &impl Fn(&Self, usize, usize) -> Option<Descriptor>,
    ) {
        batch.clear();
        let Some(channel) = &self.channels[queue] else {
            return;
        };
        let most = channel.most_members().min(self.options.batch).max(1);
        let mut size = 1;
        while batch.len() < size
            && let Some(job) = todo.last().copied()
        {
            let made = make(self, queue, job);
            let opcode = made.and_then(|descriptor| descriptor.opcode());
            if let (None, Some(opcode), true) = (batch.first(), opcode, most > 1) {
                size = channel.latencies(opcode).batch(todo.len(), channel.rooms(), most);
            }
            if batch
                .first()
                .is_some_and(|(first, _)| opcode.is_some() && first.opcode() != opcode)
            {
                return;
            }
            todo.pop();
            batch.extend(made.map(|descriptor| (descriptor, job as u64 | JOB)));
        }
    }

    /// Takes what has ended, and gives up queues that fail. Returns the jobs of those that have no record.
    fn collect(&mut self, note: &mut impl FnMut(usize, &CompletionRecord)) -> Vec<usize> {
        let mut pairs = Vec::new();
        for queue in 0..self.channels.len() {
            let Some(channel) = self.channels[queue].as_mut() else {
                continue;
            };
            let mut ended = |tag: u64, outcome: Result<CompletionRecord, ItemError>| {
                if tag & JOB == 0 {
                    pairs.push((tag, outcome));
                } else if let (Some(job), Ok(record)) = (job_of(tag), &outcome) {
                    note(job, record);
                }
            };
            if let Err(trouble) = channel.poll(&mut ended) {
                self.give_up(queue, &trouble);
            }
        }
        let (jobs, orphans): (Vec<u64>, Vec<u64>) =
            { self.orphans.drain(..) }.partition(|tag| tag & JOB != 0);
        pairs.extend(orphans.into_iter().map(|tag| (tag, Err(ItemError::Abandoned))));
        let (verifying, account, past) = (&mut self.verifying, &mut self.account, &mut self.past);
        pairs
            .into_iter()
            .for_each(|(tag, outcome)| verifying.ended(account, past, tag, outcome));
        jobs.into_iter().filter_map(job_of).collect()
    }

    /// Waits for something to end, at most so long.
    fn wait(&mut self, most: Duration) {
        let mut busy: Vec<&mut Channel> = { self.channels.iter_mut().flatten() }
            .filter(|channel| !channel.is_idle())
            .collect();
        match &mut busy[..] {
            [] => {}
            [only] => only.wait(most),
            // In turns, so that none is waited for while another one has ended.
            several => {
                let start = Instant::now();
                while start.elapsed() < most && several.iter().all(|channel| !channel.has_ended()) {
                    several
                        .iter_mut()
                        .for_each(|channel| channel.wait(Duration::from_micros(5)));
                }
            }
        }
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        self.live().map(Channel::borrowed_cpu_ns).sum()
    }

    /// Begins to measure the time of a call.
    fn watch(&self) -> Watch {
        Watch {
            borrowed_ns: self.borrowed_cpu_ns(),
            napped: self.live().map(Channel::napped).sum(),
            start: Instant::now(),
        }
    }

    /// Notes the time of a call: what a model in this process took is not the driver's.
    fn stop(&mut self, watch: &Watch) {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let wall = watch.start.elapsed();
        let napped: Duration = self.live().map(Channel::napped).sum();
        let awake = wall.saturating_sub(napped.saturating_sub(watch.napped));
        let borrowed = self.borrowed_cpu_ns().saturating_sub(watch.borrowed_ns);
        self.account.wall_ns += ns(wall);
        self.account.cpu_ns += ns(awake).saturating_sub(borrowed);
        self.account.device_cpu_ns += borrowed;
    }
}

/// When a call began, and what had been by then. Its CPU time is taken for the time in which it does not sleep: what the kernel
/// knows of a thread's CPU time it tells so slowly that asking would be a part of each comparison.
struct Watch {
    start: Instant,
    borrowed_ns: u64,
    napped: Duration,
}

impl std::fmt::Debug for DsaEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DsaEngine")
            .field("channels", &self.channels)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Drop for DsaEngine {
    fn drop(&mut self) {
        self.log_notes();
    }
}

impl Engine for DsaEngine {
    fn name(&self) -> &'static str {
        "dsa"
    }

    fn map(&mut self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Answer<()> {
        let mut at = Vec::with_capacity(self.channels.len());
        for queue in 0..self.channels.len() {
            let mapped = self.channels[queue]
                .as_mut()
                .map(|channel| channel.map(pages * PAGE_SIZE, file, false));
            at.push(match mapped {
                None => None,
                Some(Ok(place)) => place,
                Some(Err(trouble)) => {
                    self.give_up(queue, &trouble);
                    None
                }
            });
        }
        self.log_notes();
        self.alive()?;
        self.given.insert(first, Given { pages, at });
        Ok(())
    }

    fn unmap(&mut self, first: PageId, _pages: usize) -> Answer<()> {
        let Some(given) = self.given.remove(&first) else {
            return Ok(());
        };
        for (queue, at) in given.at.into_iter().enumerate() {
            if let (Some(channel), Some(at)) = (self.channels[queue].as_mut(), at)
                && let Err(trouble) = channel.unmap(at, given.pages * PAGE_SIZE)
            {
                self.give_up(queue, &trouble);
            }
        }
        self.log_notes();
        self.alive()
    }

    fn device_work(&self) -> DeviceWork {
        self.live()
            .map(Channel::work)
            .fold(self.past, |all, work| all.and(work))
    }

    fn account(&self) -> Account {
        self.account
    }
}
