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
//! - No record within the time limit: the device is asked what is wrong, reset, and all that was in flight is submitted
//!   anew. After several resets it is given up.
//!
//! All operations that go through here only read what callers own, and write whole words of the driver's own buffers, so to do
//! one twice does no harm.
#![allow(unsafe_code)] // touches pages by address

use crate::area::{Addresses, Area};
use crate::latency::Latencies;
use crate::way::{QueueLimits, Trouble, WorkQueue};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, DeviceAddress, Opcode, Status};
use vmm_dedup_protocol::PAGE_SIZE;

/// Most members of a batch here.
pub(crate) const MOST_MEMBERS: usize = 1024;
/// Times that one descriptor is submitted.
const TRIES: u8 = 24;
/// Resets after which a device is given up, unless it has worked for [`FORGIVEN`] since.
const RESETS: u32 = 3;
/// After this time a reset is forgotten.
const FORGIVEN: Duration = Duration::from_secs(60);
/// Shorter times are not slept.
const SHORTEST_SLEEP: Duration = Duration::from_micros(120);
/// So much earlier a sleep ends: the kernel wakes late.
const WAKE: Duration = Duration::from_micros(60);
/// Shorter times are not slept by who can be late: the kernel takes some microseconds of CPU to let a thread sleep.
const SHORTEST_NAP: Duration = Duration::from_micros(20);

/// What a queue's driver has met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Descriptors submitted, those in batches included.
    pub descriptors: u64,
    /// Batches submitted.
    pub batches: u64,
    /// Page faults after which a descriptor went on.
    pub faults: u64,
    /// Descriptors submitted again for other reasons.
    pub again: u64,
    /// Submissions that a full queue turned away.
    pub full: u64,
    /// Records that did not come in time.
    pub late: u64,
    /// Resets.
    pub resets: u64,
}

/// Why a descriptor has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemError {
    /// The device cannot read there.
    Fault(DeviceAddress),
    /// The device does not do it.
    Refused(u8),
    /// Nobody wants it any more.
    Abandoned,
}

/// A descriptor to be submitted, with a number of the caller's.
pub(crate) type Item = (Descriptor, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is to be submitted alone.
    ToDo,
    /// The device has it.
    Submitted,
    /// The caller has been told.
    Done,
}

/// A descriptor in a slot.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// What is left of it.
    descriptor: Descriptor,
    tag: u64,
    /// Bytes of it that were done before.
    done: u32,
    tries: u8,
    state: State,
}

#[derive(Debug)]
struct Slot {
    members: Vec<Member>,
    /// The batch's record has not been seen.
    batch: bool,
    /// Members that the caller has not been told of.
    open: usize,
    abandoned: bool,
    /// When its last descriptor was submitted.
    since: Instant,
    /// When it is likely to have ended.
    due: Instant,
    /// What a model had borrowed of this thread's time by then, ns.
    borrowed_ns: u64,
    /// Nothing was before it in the queue, and nothing of it was submitted twice: its time says something.
    clean: bool,
}

/// A work queue and what is in flight in it.
pub(crate) struct Channel {
    queue: Box<dyn WorkQueue>,
    limits: QueueLimits,
    members: usize,
    area: Area,
    slots: Vec<Slot>,
    free: Vec<usize>,
    busy: VecDeque<usize>,
    /// Entries of the queue that may be in use.
    entries: usize,
    /// What the device was given, if it does not use this process's addresses.
    space: Addresses,
    latencies: [Latencies; 2],
    time_limit: Duration,
    resets: VecDeque<Instant>,
    /// Something had ended before its waiter woke up: nobody knows when.
    overslept: bool,
    /// Since when it has turned everything away.
    refused: Option<Instant>,
    counters: Counters,
}

// Where things are in a slot.
const LIST: usize = 0;

impl Channel {
    /// Takes a queue into use, at most `in_flight` of its entries. A record that has not come after `time_limit` is not
    /// waited for any more.
    pub(crate) fn new(
        mut queue: Box<dyn WorkQueue>,
        time_limit: Duration,
        in_flight: usize,
    ) -> io::Result<Self> {
        let limits = queue.limits();
        let members = limits.members.clamp(1, MOST_MEMBERS);
        let slots = limits.entries.min(in_flight).max(1);
        let mut space = Addresses::default();
        let area = Area::new(slots * stride(members), &mut *queue, &mut space)?;
        let slot = || Slot {
            members: Vec::with_capacity(members),
            batch: false,
            open: 0,
            abandoned: false,
            since: Instant::now(),
            due: Instant::now(),
            borrowed_ns: 0,
            clean: true,
        };
        Ok(Self {
            queue,
            limits,
            members,
            area,
            slots: (0..slots).map(|_| slot()).collect(),
            free: (0..slots).rev().collect(),
            busy: VecDeque::with_capacity(slots),
            entries: 0,
            space,
            latencies: [Latencies::new(), Latencies::new()],
            time_limit,
            resets: VecDeque::new(),
            overslept: false,
            refused: None,
            counters: Counters::default(),
        })
    }

    pub(crate) fn limits(&self) -> QueueLimits {
        self.limits
    }

    pub(crate) fn name(&self) -> &str {
        self.queue.name()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }

    pub(crate) fn borrowed_cpu_ns(&self) -> u64 {
        self.queue.borrowed_cpu_ns()
    }

    pub(crate) fn uses_process_addresses(&self) -> bool {
        self.queue.uses_process_addresses()
    }

    /// Most members of a batch.
    pub(crate) fn most_members(&self) -> usize {
        self.members
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.is_empty()
    }

    /// Batches, and descriptors alone, that are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.entries
    }

    /// The tags of all that the caller was not told of.
    pub(crate) fn open_tags(&self) -> impl Iterator<Item = u64> {
        let members = self.busy.iter().flat_map(|at| &self.slots[*at].members);
        members
            .filter(|member| member.state != State::Done)
            .map(|member| member.tag)
    }

    /// Whether a batch can be started.
    pub(crate) fn has_room(&self) -> bool {
        self.rooms() > 0
    }

    /// Batches that can be started.
    pub(crate) fn rooms(&self) -> usize {
        self.free
            .len()
            .min(self.limits.entries.saturating_sub(self.entries))
    }

    /// Times of an operation.
    pub(crate) fn latencies(&self, opcode: Opcode) -> &Latencies {
        &self.latencies[kind(opcode)]
    }

    /// Gives the device a file to read. Returns where it sees it; `None` if it uses this process's addresses.
    pub(crate) fn map(
        &mut self,
        bytes: usize,
        file: BorrowedFd<'_>,
    ) -> Result<Option<DeviceAddress>, Trouble> {
        self.give(bytes, file, false)
    }

    /// The same; the device may write the file, which is the driver's own.
    pub(crate) fn map_writable(
        &mut self,
        bytes: usize,
        file: BorrowedFd<'_>,
    ) -> Result<Option<DeviceAddress>, Trouble> {
        self.give(bytes, file, true)
    }

    fn give(
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
        let taken = &items[..items.len().min(self.members)];
        if taken.is_empty() || !self.has_room() {
            return Ok(0);
        }
        let Some(at) = self.free.pop() else {
            return Ok(0);
        };
        let slot = &mut self.slots[at];
        slot.members.clear();
        slot.members.extend(taken.iter().map(|(descriptor, tag)| Member {
            descriptor: *descriptor,
            tag: *tag,
            done: 0,
            tries: 0,
            state: State::ToDo,
        }));
        (slot.batch, slot.abandoned, slot.clean) = (false, false, self.busy.is_empty());
        slot.open = taken.len();
        let last_due = self.busy.back().map(|last| self.slots[*last].due);
        if !self.submit(at)? {
            self.free.push(at);
            let since = *self.refused.get_or_insert_with(Instant::now);
            if self.busy.is_empty() && since.elapsed() > self.time_limit {
                let name = self.queue.name();
                return Err(Trouble::Gone(format!(
                    "{name} takes nothing for {:?}",
                    self.time_limit
                )));
            }
            return Ok(0);
        }
        self.refused = None;
        self.busy.push_back(at);
        let latencies = &self.latencies[kind(taken[0].0.opcode().unwrap_or(Opcode::Nop))];
        let alone = Instant::now() + latencies.expect(taken.len());
        let behind = last_due.map(|due| due + latencies.transfers(taken.len()));
        self.slots[at].due = behind.map_or(alone, |behind| behind.max(alone));
        self.slots[at].borrowed_ns = self.queue.borrowed_cpu_ns();
        Ok(taken.len())
    }

    /// Submits what is to be done of a slot: all of it as a batch, or members alone. Returns whether anything was.
    fn submit(&mut self, at: usize) -> Result<bool, Trouble> {
        let all = self.slots[at]
            .members
            .iter()
            .all(|member| member.state == State::ToDo);
        if all && self.slots[at].members.len() > 1 {
            return self.submit_batch(at);
        }
        let mut any = false;
        for index in 0..self.slots[at].members.len() {
            if self.slots[at].members[index].state == State::ToDo && self.entries < self.limits.entries {
                let descriptor = self.prepare(at, index)?;
                if !self.queue.submit(&descriptor)? {
                    self.counters.full += 1;
                    break;
                }
                self.submitted(at, index);
                self.entries += 1;
                any = true;
            }
        }
        if any {
            let (now, borrowed_ns) = (Instant::now(), self.queue.borrowed_cpu_ns());
            let slot = &mut self.slots[at];
            let opcode = slot.members.first().and_then(|member| member.descriptor.opcode());
            let alone = self.latencies[kind(opcode.unwrap_or(Opcode::Nop))].expect(1);
            (slot.since, slot.due) = (now, now + alone);
            slot.borrowed_ns = borrowed_ns;
        }
        Ok(any)
    }

    fn submit_batch(&mut self, at: usize) -> Result<bool, Trouble> {
        let count = self.slots[at].members.len();
        for index in 0..count {
            let descriptor = self.prepare(at, index)?;
            self.area
                .write_descriptor(self.list(at) + index * 64, &descriptor);
        }
        let record = self.record(at, count);
        self.area.clear(record);
        let list = self.area.address(self.list(at));
        let batch = Descriptor::batch(list, u32::try_from(count).unwrap_or(u32::MAX));
        let batch = batch.and_then(|batch| batch.with_completion(self.area.address(record)));
        let mut batch = batch.map_err(|error| Trouble::Gone(error.to_string()))?;
        let opcode = self.slots[at].members[0].descriptor.opcode();
        let expected = self.latencies[kind(opcode.unwrap_or(Opcode::Nop))].expect(count);
        if let Some(vector) = self.queue.vector().filter(|_| expected > SHORTEST_NAP) {
            batch = batch.with_interrupt(vector);
        }
        if !self.queue.submit(&batch)? {
            self.counters.full += 1;
            return Ok(false);
        }
        (0..count).for_each(|index| self.submitted(at, index));
        self.entries += 1;
        self.counters.batches += 1;
        let slot = &mut self.slots[at];
        (slot.batch, slot.since) = (true, Instant::now());
        Ok(true)
    }

    /// Clears a member's record and names it.
    fn prepare(&self, at: usize, index: usize) -> Result<Descriptor, Trouble> {
        let record = self.record(at, index);
        self.area.clear(record);
        let descriptor = self.slots[at].members[index].descriptor;
        let address = self.area.address(record);
        descriptor
            .with_completion(address)
            .map_err(|error| Trouble::Gone(error.to_string()))
    }

    fn submitted(&mut self, at: usize, index: usize) {
        let member = &mut self.slots[at].members[index];
        member.state = State::Submitted;
        member.tries += 1;
        self.counters.descriptors += 1;
    }

    fn list(&self, at: usize) -> usize {
        at * stride(self.members) + LIST
    }

    /// The record of a member; behind them that of the batch.
    fn record(&self, at: usize, index: usize) -> usize {
        self.list(at) + self.members * 64 + index * 32
    }

    /// Nobody wants what is in flight: what it reads may go. Those that asked are still told when it has ended.
    pub(crate) fn abandon(&mut self) {
        for at in &self.busy {
            self.slots[*at].abandoned = true;
        }
    }

    /// Tells of all that has ended, and goes on with what did not end well.
    pub(crate) fn poll(
        &mut self,
        tell: &mut dyn FnMut(u64, Result<CompletionRecord, ItemError>),
    ) -> Result<(), Trouble> {
        self.look_at_all(tell)?;
        self.overslept = false;
        if let Some(at) = self.late() {
            // This thread may have been the one that was late.
            let record = self.awaited(at);
            self.queue.relax(self.area.status(record));
            self.look_at_all(tell)?;
            if self.late().is_some() {
                self.counters.late += 1;
                self.recover(tell)?;
            }
        }
        Ok(())
    }

    /// A slot that has taken too long.
    fn late(&self) -> Option<usize> {
        let late = |at: &&usize| self.slots[**at].since.elapsed() > self.time_limit;
        self.busy.iter().find(late).copied()
    }

    fn look_at_all(
        &mut self,
        tell: &mut dyn FnMut(u64, Result<CompletionRecord, ItemError>),
    ) -> Result<(), Trouble> {
        for _ in 0..self.busy.len() {
            let Some(at) = self.busy.pop_front() else {
                break;
            };
            self.look(at, tell);
            if self.slots[at].open == 0 && !self.slots[at].batch {
                self.free.push(at);
                continue;
            }
            self.busy.push_back(at);
            if self.slots[at]
                .members
                .iter()
                .any(|member| member.state == State::ToDo)
            {
                self.submit(at)?;
            }
        }
        Ok(())
    }

    /// Looks at a slot's records.
    fn look(&mut self, at: usize, tell: &mut dyn FnMut(u64, Result<CompletionRecord, ItemError>)) {
        let count = self.slots[at].members.len();
        let was_batch = self.slots[at].batch;
        if was_batch {
            // Members end before their batch does.
            if self.area.record(self.record(at, count)).is_none() {
                return;
            }
            self.slots[at].batch = false;
            self.entries -= 1;
        }
        for index in 0..count {
            if self.slots[at].members[index].state != State::Submitted {
                continue;
            }
            let record = self.area.record(self.record(at, index));
            if record.is_none() && !was_batch {
                continue;
            }
            if !was_batch {
                self.entries -= 1;
            }
            self.settle(at, index, record, tell);
        }
        let slot = &self.slots[at];
        if slot.open == 0
            && slot.clean
            && let Some(member) = slot.members.first()
        {
            let opcode = member.descriptor.opcode().unwrap_or(Opcode::Nop);
            // A model's work is not the device's time.
            let borrowed = self.queue.borrowed_cpu_ns() - slot.borrowed_ns;
            let took = slot
                .since
                .elapsed()
                .saturating_sub(Duration::from_nanos(borrowed));
            let latencies = &mut self.latencies[kind(opcode)];
            // Else each sleep would be taken for the device's time, and the next one be longer.
            let most = latencies.expect(count);
            let took = if self.overslept { took.min(most) } else { took };
            latencies.note(count, took);
        }
    }

    /// What becomes of a member that has ended, or was not begun.
    fn settle(
        &mut self,
        at: usize,
        index: usize,
        record: Option<CompletionRecord>,
        tell: &mut dyn FnMut(u64, Result<CompletionRecord, ItemError>),
    ) {
        let abandoned = self.slots[at].abandoned;
        let mut member = self.slots[at].members[index];
        let outcome = match record.map(|record| (record, record.status())) {
            _ if abandoned => Some(Err(ItemError::Abandoned)),
            Some((record, Some(Ok(status)))) if status.is_done() => {
                let completed = record.completed.saturating_add(member.done);
                Some(Ok(record.with_result(record.result, completed)))
            }
            _ if member.tries >= TRIES => Some(Err(last_error(record))),
            Some((record, Some(Ok(Status::PageFault)))) => self.go_on(&mut member, &record).err().map(Err),
            // Not begun; or failed in a way that may pass.
            None | Some((_, Some(Ok(Status::Hardware | Status::Translation | Status::PageResponse)))) => {
                self.counters.again += 1;
                None
            }
            Some(_) => Some(Err(last_error(record))),
        };
        let slot = &mut self.slots[at];
        if let Some(outcome) = outcome {
            tell(member.tag, outcome);
            member.state = State::Done;
            slot.open -= 1;
        } else {
            member.state = State::ToDo;
            slot.clean = false;
        }
        slot.members[index] = member;
    }

    /// Makes a member what is left of it behind a page fault, and touches the page.
    fn go_on(&mut self, member: &mut Member, record: &CompletionRecord) -> Result<(), ItemError> {
        let Some(fault) = record.fault() else {
            return Err(ItemError::Refused(record.status));
        };
        let wrong = Err(ItemError::Fault(fault.address));
        let left = member.descriptor;
        if fault.write || !reads(&left, fault.address.0) {
            return wrong;
        }
        if self.queue.uses_process_addresses() {
            // SAFETY: the address is in a page of an operand that the descriptor reads, which the caller keeps readable:
            // the slot is not abandoned.
            unsafe { touch(fault.address.0) };
        } else if !self.space.has(fault.address.0) {
            return wrong;
        }
        let Some(rest) = left.rest(fault.completed, record.value(), record.result != 0) else {
            return wrong;
        };
        self.counters.faults += 1;
        member.done += fault.completed;
        member.descriptor = rest;
        Ok(())
    }

    /// The record of a slot that is written next.
    fn awaited(&self, at: usize) -> usize {
        let slot = &self.slots[at];
        let submitted = |member: &Member| member.state == State::Submitted;
        let index = if slot.batch {
            slot.members.len()
        } else {
            slot.members.iter().position(submitted).unwrap_or(0)
        };
        self.record(at, index)
    }

    /// Whether something has ended that [`Self::poll`] would tell of.
    pub(crate) fn has_ended(&self) -> bool {
        self.busy
            .iter()
            .any(|at| self.area.record(self.awaited(*at)).is_some())
    }

    /// When a slot is likely to have ended. A model's work on this thread delays its device.
    fn due(&self, at: usize) -> Instant {
        let slot = &self.slots[at];
        slot.due + Duration::from_nanos(self.queue.borrowed_cpu_ns() - slot.borrowed_ns)
    }

    /// Waits for something to end, at most so long.
    pub(crate) fn wait(&mut self, most: Duration) {
        let Some(at) = self.busy.front().copied() else {
            return;
        };
        let (start, record) = (Instant::now(), self.awaited(at));
        loop {
            let (now, due) = (Instant::now(), self.due(at));
            let left = most.saturating_sub(now - start);
            if left.is_zero() || self.area.record(record).is_some() {
                return;
            }
            let until = due.saturating_duration_since(now).min(left);
            if until > SHORTEST_SLEEP {
                self.queue.nap(until - WAKE);
                self.overslept = self.area.record(record).is_some();
            } else {
                self.queue.relax(self.area.status(record));
            }
        }
    }

    /// Waits for all that is in flight, for about so long at most: for callers that can be late, and spare the CPU. It
    /// sleeps until the last one is likely to have ended, and when that takes longer again and again.
    pub(crate) fn wait_for_all(&mut self, most: Duration) {
        let Some(at) = self.busy.back().copied() else {
            return;
        };
        let (start, record) = (Instant::now(), self.awaited(at));
        loop {
            let (now, due) = (Instant::now(), self.due(at));
            if now - start >= most || self.area.record(record).is_some() {
                return;
            }
            let early = due.saturating_duration_since(now).min(most);
            let overdue = now.saturating_duration_since(due) > SHORTEST_NAP;
            if early > SHORTEST_NAP || overdue {
                self.queue.nap(early.max(SHORTEST_NAP));
                // The first moment at which a model can work.
                self.queue.relax(self.area.status(record));
                self.overslept = self.area.record(record).is_some();
            } else {
                self.queue.relax(self.area.status(record));
            }
        }
    }

    /// Resets the device, and submits again what was in flight.
    fn recover(
        &mut self,
        tell: &mut dyn FnMut(u64, Result<CompletionRecord, ItemError>),
    ) -> Result<(), Trouble> {
        let trouble = self.queue.trouble();
        if let Some(trouble @ Trouble::Gone(_)) = trouble {
            return Err(trouble);
        }
        self.resets.retain(|at| at.elapsed() < FORGIVEN);
        if self.resets.len() >= RESETS as usize {
            let text = trouble.map_or("it does not answer".to_owned(), |trouble| trouble.to_string());
            return Err(Trouble::Gone(format!(
                "{text}, after {RESETS} resets in {FORGIVEN:?}"
            )));
        }
        self.resets.push_back(Instant::now());
        self.counters.resets += 1;
        self.queue.reset()?;
        // The device has forgotten all: no record is written any more, and every slot is the driver's.
        self.entries = 0;
        for at in std::mem::take(&mut self.busy) {
            self.slots[at].batch = false;
            for index in 0..self.slots[at].members.len() {
                if self.slots[at].members[index].state == State::Submitted {
                    let record = self.area.record(self.record(at, index));
                    self.settle(at, index, record, tell);
                }
            }
            if self.slots[at].open == 0 {
                self.free.push(at);
            } else {
                self.slots[at].since = Instant::now();
                self.busy.push_back(at);
                self.submit(at)?;
            }
        }
        Ok(())
    }
}

impl Counters {
    /// Both together.
    #[must_use]
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors + other.descriptors,
            batches: self.batches + other.batches,
            faults: self.faults + other.faults,
            again: self.again + other.again,
            full: self.full + other.full,
            late: self.late + other.late,
            resets: self.resets + other.resets,
        }
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel")
            .field("queue", &self.queue.name())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

/// Bytes of a slot with so many members.
fn stride(members: usize) -> usize {
    (members * 64 + (members + 1) * 32).next_multiple_of(PAGE_SIZE)
}

/// Which table an operation's times are in.
fn kind(opcode: Opcode) -> usize {
    usize::from(opcode != Opcode::Compare)
}

fn last_error(record: Option<CompletionRecord>) -> ItemError {
    match record {
        Some(record) => match record.fault() {
            Some(fault) => ItemError::Fault(fault.address),
            None => ItemError::Refused(record.status),
        },
        None => ItemError::Refused(0),
    }
}

/// Whether an address lies in a page that a descriptor reads.
fn reads(descriptor: &Descriptor, address: u64) -> bool {
    let page = PAGE_SIZE as u64;
    let size = u64::from(descriptor.size());
    let within = |start: u64| {
        let (first, end) = (start / page, start.saturating_add(size).div_ceil(page));
        (first..end).contains(&(address / page))
    };
    match descriptor.opcode() {
        Some(Opcode::Compare) => within(descriptor.source()) || within(descriptor.destination()),
        Some(Opcode::ComparePattern | Opcode::CrcGenerate) => within(descriptor.source()),
        _ => false,
    }
}

/// Has the kernel bring the page of an address.
///
/// # Safety
/// It must be readable.
unsafe fn touch(address: u64) {
    let byte = usize::try_from(address).unwrap_or(0) as *const u8;
    // SAFETY: as promised by the caller; volatile, so that it is not left out.
    unsafe { byte.read_volatile() };
}
