//! Slots: lists of descriptors with their records, in memory that driver and device share.

use super::item::Item;
use super::member::{Member, State};
use crate::area::{Addresses, Area};
use crate::way::{Trouble, WorkQueue};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, Opcode};
use vmm_dedup_protocol::PAGE_SIZE;

/// A slot in use.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) members: Vec<Member>,
    /// The batch's record has not been seen.
    pub(super) batch: bool,
    /// Members that the caller has not been told of.
    pub(super) open: usize,
    pub(super) abandoned: bool,
    /// When its last descriptor was submitted.
    pub(super) since: Instant,
    /// When it is likely to have ended.
    pub(super) due: Instant,
    /// What a model had borrowed of this thread's time by then, ns.
    pub(super) borrowed_ns: u64,
    /// Nothing was before it in the queue, and nothing of it was submitted twice: its time says something.
    pub(super) clean: bool,
}

impl Slot {
    fn new(members: usize) -> Self {
        Self {
            members: Vec::with_capacity(members),
            batch: false,
            open: 0,
            abandoned: false,
            since: Instant::now(),
            due: Instant::now(),
            borrowed_ns: 0,
            clean: true,
        }
    }

    /// What its members do: all the same.
    pub(super) fn opcode(&self) -> Opcode {
        let first = self.members.first();
        first
            .and_then(|member| member.descriptor.opcode())
            .unwrap_or(Opcode::Nop)
    }

    /// Whether a member is to be submitted.
    pub(super) fn has_work(&self) -> bool {
        self.members.iter().any(|member| member.state == State::ToDo)
    }

    /// Whether the device has something of it.
    fn is_in_flight(&self) -> bool {
        self.batch || self.members.iter().any(|member| member.state == State::Submitted)
    }

    /// Whether no member was submitted yet.
    pub(super) fn is_new(&self) -> bool {
        self.members.iter().all(|member| member.state == State::ToDo)
    }

    /// Whether nothing of it is in flight or to be done.
    pub(super) fn is_over(&self) -> bool {
        self.open == 0 && !self.batch
    }
}

/// All slots of a queue.
#[derive(Debug)]
pub(super) struct Slots {
    /// Most members of a batch.
    members: usize,
    area: Area,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// In the order in which they were begun.
    busy: VecDeque<usize>,
}

impl Slots {
    /// So many slots for batches of up to `members`.
    pub(super) fn new(
        count: usize,
        members: usize,
        queue: &mut dyn WorkQueue,
        space: &mut Addresses,
    ) -> io::Result<Self> {
        Ok(Self {
            members,
            area: Area::new(
                (count * stride(members)).next_multiple_of(PAGE_SIZE),
                queue,
                space,
            )?,
            slots: (0..count).map(|_| Slot::new(members)).collect(),
            free: (0..count).rev().collect(),
            busy: VecDeque::with_capacity(count),
        })
    }

    /// Most members of a batch.
    pub(super) fn most_members(&self) -> usize {
        self.members
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn busy(&self) -> &VecDeque<usize> {
        &self.busy
    }

    pub(super) fn at(&self, at: usize) -> &Slot {
        &self.slots[at]
    }

    pub(super) fn at_mut(&mut self, at: usize) -> &mut Slot {
        &mut self.slots[at]
    }

    /// Takes a free slot for these members; it is not yet among the busy ones.
    pub(super) fn take(&mut self, items: &[Item]) -> Option<usize> {
        let at = self.free.pop()?;
        let slot = &mut self.slots[at];
        slot.members.clear();
        let members = items
            .iter()
            .map(|(descriptor, tag)| Member::new(*descriptor, *tag));
        slot.members.extend(members);
        slot.open = items.len();
        (slot.batch, slot.abandoned, slot.clean) = (false, false, self.busy.is_empty());
        Some(at)
    }

    /// The device has something of it.
    pub(super) fn push(&mut self, at: usize) {
        self.busy.push_back(at);
    }

    /// Takes the one that has been busy longest, to [`Self::push`] or [`Self::give_back`] it.
    pub(super) fn pop(&mut self) -> Option<usize> {
        self.busy.pop_front()
    }

    /// It is free: the device writes none of its records any more.
    pub(super) fn give_back(&mut self, at: usize) {
        self.free.push(at);
    }

    /// The tags of all that the caller was not told of.
    pub(super) fn open_tags(&self) -> impl Iterator<Item = u64> {
        let members = self.busy.iter().flat_map(|at| &self.slots[*at].members);
        members
            .filter(|member| member.state != State::Done)
            .map(|member| member.tag)
    }

    /// Nobody wants what is in flight.
    pub(super) fn abandon(&mut self) {
        for at in &self.busy {
            self.slots[*at].abandoned = true;
        }
    }

    /// A busy slot of which the device has had something for longer than this; if it is `stuck`, one that has
    /// waited so long to be taken. Else those that wait for others, which end, would be taken for lost. What a model has worked on this thread, ns in
    /// all, is not the device's time.
    pub(super) fn late(&self, now: Instant, limit: Duration, borrowed_ns: u64, stuck: bool) -> Option<usize> {
        let late = |at: &&usize| {
            let slot = &self.slots[**at];
            let borrowed = Duration::from_nanos(borrowed_ns.saturating_sub(slot.borrowed_ns));
            let long = now.saturating_duration_since(slot.since) > limit + borrowed;
            long && (stuck || slot.is_in_flight())
        };
        self.busy.iter().find(late).copied()
    }

    /// Since when the device has had something of the busy slots, at the earliest.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.busy.iter().map(|at| self.slots[*at].since).min()
    }

    /// Clears a member's record and names it.
    pub(super) fn prepare(&self, at: usize, index: usize) -> Result<Descriptor, Trouble> {
        let record = self.record_offset(at, index);
        self.area.clear(record);
        let descriptor = self.slots[at].members[index].descriptor;
        let address = self.area.address(record);
        descriptor
            .with_completion(address)
            .map_err(|error| Trouble::Gone(error.to_string()))
    }

    /// The batch of all members, whose list it writes.
    pub(super) fn prepare_batch(&self, at: usize) -> Result<Descriptor, Trouble> {
        let count = self.slots[at].members.len();
        for index in 0..count {
            let descriptor = self.prepare(at, index)?;
            self.area
                .write_descriptor(self.list_offset(at) + index * 64, &descriptor);
        }
        let record = self.record_offset(at, count);
        self.area.clear(record);
        let list = self.area.address(self.list_offset(at));
        let batch = Descriptor::batch(list, u32::try_from(count).unwrap_or(u32::MAX));
        let batch = batch.and_then(|batch| batch.with_completion(self.area.address(record)));
        batch.map_err(|error| Trouble::Gone(error.to_string()))
    }

    /// The record of a member, if it was written; behind them that of the batch.
    pub(super) fn record(&self, at: usize, index: usize) -> Option<CompletionRecord> {
        self.area.record(self.record_offset(at, index))
    }

    /// The status of the record that is written next.
    pub(super) fn awaited_status(&self, at: usize) -> &AtomicU64 {
        self.area.status(self.awaited(at))
    }

    /// Whether the record has been written that is written next.
    pub(super) fn has_ended(&self, at: usize) -> bool {
        self.area.record(self.awaited(at)).is_some()
    }

    /// Where the record is that is written next.
    fn awaited(&self, at: usize) -> usize {
        let slot = &self.slots[at];
        let submitted = |member: &Member| member.state == State::Submitted;
        let index = if slot.batch {
            slot.members.len()
        } else {
            slot.members.iter().position(submitted).unwrap_or(0)
        };
        self.record_offset(at, index)
    }

    fn list_offset(&self, at: usize) -> usize {
        at * stride(self.members)
    }

    fn record_offset(&self, at: usize, index: usize) -> usize {
        self.list_offset(at) + self.members * 64 + index * 32
    }
}

/// Bytes of a slot with so many members. Slots begin at all lines of a page, so that a cache keeps those of many.
const fn stride(members: usize) -> usize {
    (members * 64 + (members + 1) * 32).next_multiple_of(64)
}
