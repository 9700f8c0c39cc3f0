//! Descriptors on their way through one work queue.
//!
//! # Slots
//!
//! A slot has a list of descriptors and a record for each and for the batch. It is used again only when every record that
//! the device was to write has been seen, or the device has been reset: a record that comes late would else be taken for
//! the answer to another question.
//!
//! # What becomes of a descriptor that does not end well
//!
//! - A page fault: the page is touched, if the address is one of the descriptor's, and what is left is submitted alone.
//! - Not done, since the batch's list faulted, a member in front of a fence failed, or its record was lost: it is submitted
//!   alone.
//! - Refused: an error of that item.
//! - No record within the time limit: the device is asked what is wrong, and what it has is aborted. If it cannot abort, has
//!   halted, says that it failed, or was helped before, it is reset. All that was in flight is submitted anew. After several
//!   times within a minute, or if nothing helps, it is given up.
//!
//! All operations that go through here only read what callers own, and write whole words of the driver's own buffers, so to do
//! one twice does no harm.

mod item;
mod member;
mod recovery;
mod slots;
mod waiting;

pub(crate) use item::{Item, ItemError};

use crate::area::Addresses;
use crate::latency::Latencies;
use crate::way::{QueueLimits, Trouble, WorkQueue};
use member::{Reach, State};
use recovery::Resets;
use slots::Slots;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use vmm_dedup::compare::DeviceWork;
use vmm_dedup_dsa_abi::{CompletionRecord, DeviceAddress, Opcode};

/// Most members of a batch here.
pub(crate) const MOST_MEMBERS: usize = 1024;
/// Shorter times are not slept by who can be late: the kernel takes some microseconds of CPU to let a thread sleep.
const SHORTEST_NAP: Duration = Duration::from_micros(10);

/// Who is told of a descriptor's end, by its number.
type Tell<'a> = dyn FnMut(u64, Result<CompletionRecord, ItemError>) + 'a;

/// A work queue and what is in flight in it.
pub(crate) struct Channel {
    /// Dropped before the slots: it ends what writes their records.
    queue: Box<dyn WorkQueue>,
    limits: QueueLimits,
    slots: Slots,
    /// Entries of the queue that may be in use.
    entries: usize,
    /// Whether the device uses this process's addresses.
    direct: bool,
    /// What the device was given, if it does not.
    space: Addresses,
    latencies: [Latencies; 2],
    time_limit: Duration,
    /// When it was last seen to take or to end something.
    moved: Instant,
    /// Nothing can be late before.
    late_from: Instant,
    resets: Resets,
    /// Something had ended before its waiter woke up: nobody knows when.
    overslept: bool,
    /// For how long the thread has slept.
    napped: Duration,
    /// Since when it has turned everything away.
    refused: Option<Instant>,
    work: DeviceWork,
}

impl Channel {
    /// Takes a queue into use, at most `in_flight` of its entries, for batches of at most so many members. A record that has
    /// not come after `time_limit` is not waited for any more.
    pub(crate) fn new(
        mut queue: Box<dyn WorkQueue>,
        time_limit: Duration,
        in_flight: usize,
        members: usize,
    ) -> io::Result<Self> {
        let limits = queue.limits();
        let members = limits.members.min(members).clamp(1, MOST_MEMBERS);
        let count = limits.entries.min(in_flight).max(1);
        let mut space = Addresses::default();
        let slots = Slots::new(count, members, &mut *queue, &mut space)?;
        Ok(Self {
            direct: queue.uses_process_addresses(),
            queue,
            limits,
            slots,
            entries: 0,
            space,
            latencies: [Latencies::new(), Latencies::new()],
            time_limit,
            moved: Instant::now(),
            late_from: Instant::now(),
            resets: Resets::default(),
            overslept: false,
            napped: Duration::ZERO,
            refused: None,
            work: DeviceWork::default(),
        })
    }

    pub(crate) fn limits(&self) -> QueueLimits {
        self.limits
    }

    pub(crate) fn name(&self) -> &str {
        self.queue.name()
    }

    /// Why the device was helped, if it was: for the log.
    pub(crate) fn take_note(&mut self) -> Option<String> {
        self.resets.note.take()
    }

    /// What the device was given to do.
    pub(crate) fn work(&self) -> &DeviceWork {
        &self.work
    }

    pub(crate) fn borrowed_cpu_ns(&self) -> u64 {
        self.queue.borrowed_cpu_ns()
    }

    /// For how long the thread has slept in waiting.
    pub(crate) fn napped(&self) -> Duration {
        self.napped
    }

    pub(crate) fn uses_process_addresses(&self) -> bool {
        self.direct
    }

    /// Most members of a batch.
    pub(crate) fn most_members(&self) -> usize {
        self.slots.most_members()
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.busy().is_empty()
    }

    /// Batches, and descriptors alone, that are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.entries
    }

    /// The tags of all that the caller was not told of.
    pub(crate) fn open_tags(&self) -> impl Iterator<Item = u64> {
        self.slots.open_tags()
    }

    /// Whether a batch can be started.
    pub(crate) fn has_room(&self) -> bool {
        self.rooms() > 0
    }

    /// Batches that can be started.
    pub(crate) fn rooms(&self) -> usize {
        self.slots
            .free()
            .min(self.limits.entries.saturating_sub(self.entries))
    }

    /// Times of an operation.
    pub(crate) fn latencies(&self, opcode: Opcode) -> &Latencies {
        &self.latencies[kind(opcode)]
    }

    /// Gives the device a file to read (`writable`: and to write, as it is the driver's own). Returns where it sees it;
    /// `None` if it uses this process's addresses.
    pub(crate) fn map(
        &mut self,
        bytes: usize,
        file: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<Option<DeviceAddress>, Trouble> {
        if self.uses_process_addresses() {
            return Ok(None);
        }
        let full = || Trouble::Gone("no addresses are left for the device".to_owned());
        let at = self.space.take(bytes as u64).ok_or_else(full)?;
        if let Err(trouble) = self.queue.map(at, bytes, file, writable) {
            self.space.give_back(at);
            return Err(trouble);
        }
        Ok(Some(at))
    }

    /// Ends [`Self::map`].
    pub(crate) fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble> {
        self.space.give_back(at);
        self.queue.unmap(at, bytes)
    }

    /// Begins to do descriptors, all of the same operation, in one batch. Returns how many it took, from the first on: 0 if
    /// there is no room. Their operands must stay until they are told of or [`Self::abandon`] is called.
    pub(crate) fn start(&mut self, items: &[Item]) -> Result<usize, Trouble> {
        let taken = &items[..items.len().min(self.slots.most_members())];
        if taken.is_empty() || !self.has_room() {
            return Ok(0);
        }
        let Some(at) = self.slots.take(taken) else {
            return Ok(0);
        };
        let now = Instant::now();
        if !self.submit(at, now)? {
            self.slots.give_back(at);
            let since = *self.refused.get_or_insert_with(Instant::now);
            if self.is_idle() && since.elapsed() > self.time_limit {
                let name = self.queue.name();
                return Err(Trouble::Gone(format!(
                    "{name} takes nothing for {:?}",
                    self.time_limit
                )));
            }
            return Ok(0);
        }
        self.refused = None;
        let last_due = self.slots.busy().back().map(|last| self.slots.at(*last).due);
        self.slots.push(at);
        let slot = self.slots.at_mut(at);
        if let Some(due) = last_due {
            let transfers = self.latencies[kind(slot.opcode())].transfers(taken.len());
            slot.due = slot.due.max(due + transfers);
        }
        Ok(taken.len())
    }

    /// Submits what is to be done of a slot: all of it as a batch, or members alone. Returns whether anything was.
    fn submit(&mut self, at: usize, now: Instant) -> Result<bool, Trouble> {
        let borrowed_ns = self.queue.borrowed_cpu_ns();
        let slot = self.slots.at(at);
        let any = if slot.members.len() > 1 && slot.is_new() {
            self.submit_batch(at)?
        } else {
            self.submit_alone(at)?
        };
        if any {
            self.moved = now;
            let slot = self.slots.at_mut(at);
            let members = if slot.batch { slot.members.len() } else { 1 };
            let expected = self.latencies[kind(slot.opcode())].expect(members);
            (slot.since, slot.due, slot.borrowed_ns) = (now, now + expected, borrowed_ns);
        }
        Ok(any)
    }

    fn submit_alone(&mut self, at: usize) -> Result<bool, Trouble> {
        let mut any = false;
        for index in 0..self.slots.at(at).members.len() {
            let to_do = self.slots.at(at).members[index].state == State::ToDo;
            if to_do && self.entries < self.limits.entries {
                let descriptor = self.slots.prepare(at, index)?;
                if !self.queue.submit(&descriptor)? {
                    self.work.full += 1;
                    break;
                }
                self.slots.at_mut(at).members[index].submitted(&mut self.work);
                self.entries += 1;
                any = true;
            }
        }
        Ok(any)
    }

    fn submit_batch(&mut self, at: usize) -> Result<bool, Trouble> {
        let mut batch = self.slots.prepare_batch(at)?;
        let slot = self.slots.at_mut(at);
        let expected = self.latencies[kind(slot.opcode())].expect(slot.members.len());
        if let Some(vector) = self.queue.vector().filter(|_| expected > SHORTEST_NAP) {
            batch = batch.with_interrupt(vector);
        }
        if !self.queue.submit(&batch)? {
            self.work.full += 1;
            return Ok(false);
        }
        let members = slot.members.iter_mut();
        members.for_each(|member| member.submitted(&mut self.work));
        slot.batch = true;
        self.entries += 1;
        self.work.batches += 1;
        Ok(true)
    }

    /// Nobody wants what is in flight: what it reads may go. Those that asked are still told when it has ended.
    pub(crate) fn abandon(&mut self) {
        self.slots.abandon();
    }

    /// Tells of all that has ended, and goes on with what did not end well.
    pub(crate) fn poll(&mut self, tell: &mut Tell<'_>) -> Result<(), Trouble> {
        if self.is_idle() {
            return Ok(());
        }
        let now = Instant::now();
        self.look_at_all(now, tell)?;
        self.overslept = false;
        if now < self.late_from {
            return Ok(());
        }
        if let Some(at) = self.late(now) {
            // This thread may have been the one that was late.
            self.queue.relax(self.slots.awaited_status(at));
            let now = Instant::now();
            self.look_at_all(now, tell)?;
            if self.late(now).is_some() {
                self.work.late += 1;
                self.recover(tell)?;
            }
        }
        self.late_from = self.slots.oldest().unwrap_or(now) + self.time_limit;
        Ok(())
    }

    /// Whether the device has nothing, and takes nothing, for too long.
    fn is_stuck(&self, now: Instant) -> bool {
        self.entries == 0 && now.saturating_duration_since(self.moved) > self.time_limit
    }

    fn late(&self, now: Instant) -> Option<usize> {
        let (borrowed_ns, stuck) = (self.queue.borrowed_cpu_ns(), self.is_stuck(now));
        self.slots.late(now, self.time_limit, borrowed_ns, stuck)
    }

    fn look_at_all(&mut self, now: Instant, tell: &mut Tell<'_>) -> Result<(), Trouble> {
        for _ in 0..self.slots.busy().len() {
            let Some(at) = self.slots.pop() else {
                break;
            };
            self.look(at, now, tell);
            if self.slots.at(at).is_over() {
                self.slots.give_back(at);
                continue;
            }
            self.slots.push(at);
            if self.slots.at(at).has_work() {
                self.submit(at, now)?;
            }
        }
        Ok(())
    }

    /// Looks at a slot's records, at this time.
    fn look(&mut self, at: usize, now: Instant, tell: &mut Tell<'_>) {
        let count = self.slots.at(at).members.len();
        let was_batch = self.slots.at(at).batch;
        if was_batch {
            // Members end before their batch does.
            if self.slots.record(at, count).is_none() {
                return;
            }
            self.slots.at_mut(at).batch = false;
            self.entries -= 1;
        }
        let mut ended = was_batch;
        for index in 0..count {
            if self.slots.at(at).members[index].state != State::Submitted {
                continue;
            }
            let record = self.slots.record(at, index);
            if record.is_none() && !was_batch {
                continue;
            }
            if !was_batch {
                self.entries -= 1;
            }
            ended = true;
            self.settle(at, index, record, tell);
        }
        if ended {
            self.moved = now;
            self.note_time(at, now);
        }
    }

    /// A batch, or members of a slot that were alone, were seen to have ended.
    fn note_time(&mut self, at: usize, now: Instant) {
        let slot = self.slots.at(at);
        // A model's work is not the device's time.
        let borrowed = self.queue.borrowed_cpu_ns() - slot.borrowed_ns;
        let took = { now - slot.since }.saturating_sub(Duration::from_nanos(borrowed));
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.work.latency.observe(ns);
        if slot.open > 0 || !slot.clean {
            return;
        }
        let (count, latencies) = (slot.members.len(), &mut self.latencies[kind(slot.opcode())]);
        // Else each sleep would be taken for the device's time, and the next one be longer.
        let most = latencies.expect(count);
        let took = if self.overslept { took.min(most) } else { took };
        latencies.note(count, took);
    }

    /// A member has ended, or was not begun.
    fn settle(&mut self, at: usize, index: usize, record: Option<CompletionRecord>, tell: &mut Tell<'_>) {
        let reach = if self.direct {
            Reach::Process
        } else {
            Reach::Given(&self.space)
        };
        let slot = self.slots.at_mut(at);
        let member = &mut slot.members[index];
        if let Some(outcome) = member.ended(record, slot.abandoned, &reach, &mut self.work) {
            tell(member.tag, outcome);
            slot.open -= 1;
        } else {
            slot.clean = false;
        }
    }

    /// Has the device forget what is in flight, and submits that again.
    fn recover(&mut self, tell: &mut Tell<'_>) -> Result<(), Trouble> {
        let (abort, text) = self.resets.plan(self.queue.trouble())?;
        let aborted = abort && self.queue.abort();
        let how = if aborted { "aborted" } else { "reset" };
        self.resets.note = Some(format!("{text}: what it had is {how} and submitted again"));
        if !aborted {
            self.work.resets += 1;
            self.queue.reset()?;
        }
        // The device has forgotten all: no record is written any more, and every slot is the driver's.
        self.entries = 0;
        for _ in 0..self.slots.busy().len() {
            let Some(at) = self.slots.pop() else {
                break;
            };
            self.slots.at_mut(at).batch = false;
            for index in 0..self.slots.at(at).members.len() {
                if self.slots.at(at).members[index].state == State::Submitted {
                    let record = self.slots.record(at, index);
                    self.settle(at, index, record, tell);
                }
            }
            if self.slots.at(at).is_over() {
                self.slots.give_back(at);
            } else {
                let now = Instant::now();
                let borrowed_ns = self.queue.borrowed_cpu_ns();
                let slot = self.slots.at_mut(at);
                (slot.since, slot.borrowed_ns) = (now, borrowed_ns);
                self.slots.push(at);
                self.submit(at, now)?;
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel")
            .field("queue", &self.queue.name())
            .field("work", &self.work)
            .finish_non_exhaustive()
    }
}

/// Which table an operation's times are in.
fn kind(opcode: Opcode) -> usize {
    usize::from(opcode != Opcode::Compare)
}
