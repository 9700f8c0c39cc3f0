//! The device's work: queues, batches, what is in flight. It obeys what registers and commands have made of
//! [`Control`], and tells it of errors.

use crate::batch::Batch;
use crate::board::Board;
use crate::check::wrong_with;
use crate::control::Control;
use crate::dice::{Dice, Faults};
use crate::endings::{Ending, Endings};
use crate::lens::Lens;
use crate::operate::operate;
use crate::queue::{Job, Queue, Sequence, Waiting};
use crate::shape::{Shape, Timing};
use vmm_dedup_dsa_abi::config::{Mode, QueueState};
use vmm_dedup_dsa_abi::registers::{DeviceState, ErrorDetails, SoftwareError};
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, Opcode, Pasid, Status, flags, portal};

/// Drains of one queue that wait at a time; more stay in the queue.
const MOST_DRAINS: usize = 16;

/// How a descriptor comes to a portal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A posted write, which is not answered: MOVDIR64B.
    Posted,
    /// A deferrable write: ENQCMD.
    Deferrable,
}

/// What became of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The queue has it.
    Taken,
    /// Whoever used ENQCMD is told to try again.
    Retry,
    /// It is lost; a software error tells of it.
    Lost,
}

/// What the device has done. All are totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Descriptors that ended, those in batches included.
    pub descriptors: u64,
    /// Batches that ended.
    pub batches: u64,
    /// Bytes that they read, or wrote where an operation does not read.
    pub bytes: u64,
    /// Time in which the way to memory was busy, ns.
    pub busy_ns: u64,
}

/// What can be dispatched next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Unit {
    /// The head of this queue.
    Queue(usize),
    /// The next member, or the end, of this batch.
    Batch(usize),
}

/// What the device works on.
#[derive(Debug)]
pub(crate) struct Works {
    pub(crate) shape: Shape,
    pub(crate) timing: Timing,
    pub(crate) control: Control,
    pub(crate) queues: Vec<Queue>,
    pub(crate) dice: Dice,
    batches: Vec<Batch>,
    endings: Endings,
    /// When the way to memory is free again.
    free_at: u64,
    pub(crate) numbers: Sequence,
    /// What was dispatched last, so that others have their turn.
    last: Unit,
    pub(crate) account: Account,
}

impl Works {
    /// After power-on.
    pub(crate) fn new(shape: Shape, timing: Timing, faults: Faults) -> Self {
        let queues = vec![Queue::default(); shape.queues.queues().into()];
        let control = Control::new(&shape);
        Self {
            shape,
            timing,
            control,
            queues,
            dice: Dice::new(faults),
            batches: Vec::new(),
            endings: Endings::default(),
            free_at: 0,
            numbers: 0,
            last: Unit::Queue(0),
            account: Account::default(),
        }
    }

    /// A descriptor is written to a portal: 64 bytes at an offset in BAR 2, at a time, ns.
    pub(crate) fn submit(
        &mut self,
        offset: u64,
        way: Way,
        bytes: &[u8; 64],
        now: u64,
        board: &dyn Board,
    ) -> Submitted {
        let descriptor = Descriptor::from_bytes(*bytes);
        let place = portal::at(offset).filter(|(queue, _)| usize::from(*queue) < self.queues.len());
        let Some((number, kind)) = place else {
            return Submitted::Lost;
        };
        let index = usize::from(number);
        let queue = &self.queues[index];
        let on = queue.state == QueueState::Enabled && self.control.state() == DeviceState::Enabled;
        let shared = queue.config.mode() == Mode::Shared;
        let refused = match way {
            Way::Deferrable => {
                if !on || !shared || queue.is_full(kind) || self.dice.happens(self.dice.faults.retries) {
                    return Submitted::Retry;
                }
                None
            }
            Way::Posted if !on => Some(SoftwareError::QUEUE_DISABLED),
            Way::Posted if shared => Some(SoftwareError::PORTAL),
            Way::Posted if queue.is_full(kind) => Some(SoftwareError::QUEUE_FULL),
            Way::Posted => None,
        };
        let space = queue.space(&descriptor);
        if let Some(error) = refused {
            let details = ErrorDetails {
                error,
                queue: Some(number),
                operation: Some((descriptor.opcode_code(), space.map_or(0, |space| space.number()))),
                ..ErrorDetails::default()
            };
            self.control.note_error(details, board);
            return Submitted::Lost;
        }
        let owner = self.next_number();
        let job = Job {
            queue: index,
            owner,
            space,
            member: None,
            descriptor,
        };
        let queue = &mut self.queues[index];
        queue.outstanding.insert(owner, space);
        queue.waiting.push_back(Waiting { job, since: now });
        Submitted::Taken
    }

    fn next_number(&mut self) -> Sequence {
        self.numbers += 1;
        self.numbers
    }

    /// Does all that is due by a time, ns: commands aside.
    pub(crate) fn advance(&mut self, now: u64, board: &dyn Board) {
        loop {
            let dispatch = self.next_dispatch();
            let ending = self.endings.next();
            match (dispatch, ending) {
                (Some((start, unit)), ending) if start <= now && ending.is_none_or(|at| start < at) => {
                    self.dispatch(unit, start, board);
                }
                (_, Some(at)) if at <= now => {
                    if let Some(ending) = self.endings.pop() {
                        self.end(&ending, board);
                    }
                }
                _ => break,
            }
        }
    }

    /// When there is something to do, ns: commands aside.
    pub(crate) fn next_event(&self) -> Option<u64> {
        let dispatch = self.next_dispatch().map(|(start, _)| start);
        [dispatch, self.endings.next()].into_iter().flatten().min()
    }

    /// What begins first, and when. Of those that could begin at the same time, those come first that were not last; then
    /// batches, then queues by priority.
    fn next_dispatch(&self) -> Option<(u64, Unit)> {
        if self.control.state() == DeviceState::Halted {
            return None;
        }
        let batches = (0..).zip(&self.batches).map(|(at, batch)| {
            let start = batch.begins().max(self.free_at);
            (start, Unit::Batch(at) == self.last, 0, Unit::Batch(at))
        });
        let busy = self.batches.len() >= usize::from(self.shape.engines);
        let queues = self.queues.iter().enumerate().filter_map(|(at, queue)| {
            let head = queue.waiting.front()?;
            let waits = match head.job.descriptor.opcode() {
                Some(Opcode::Batch) => busy,
                Some(Opcode::Drain) => queue.drains.len() >= MOST_DRAINS,
                _ => false,
            };
            let start = head.since.max(self.free_at);
            let rank = 16 - queue.config.priority();
            (!waits).then_some((start, Unit::Queue(at) == self.last, rank, Unit::Queue(at)))
        });
        batches.chain(queues).min().map(|(start, .., unit)| (start, unit))
    }

    fn dispatch(&mut self, unit: Unit, start: u64, board: &dyn Board) {
        self.last = unit;
        match unit {
            Unit::Queue(at) => {
                if let Some(waiting) = self.queues[at].waiting.pop_front() {
                    self.begin(waiting.job, start, board);
                }
            }
            Unit::Batch(at) => self.dispatch_member(at, start, board),
        }
    }

    /// Begins a descriptor from a queue.
    fn begin(&mut self, job: Job, start: u64, board: &dyn Board) {
        if self.dice.halts() {
            self.halt(board);
            return;
        }
        let wrong = self.check(&job, board);
        match (job.descriptor.opcode(), wrong) {
            (Some(Opcode::Batch), None) => {
                let list = self.timing.transfer_ns(u64::from(job.descriptor.size()) * 64);
                let ready = start.saturating_add(self.timing.list_ns).saturating_add(list);
                let mut batch = Batch::new(job, ready);
                self.fetch(&mut batch, board);
                self.batches.push(batch);
            }
            (Some(Opcode::Drain), None) => {
                self.queues[job.queue].drains.push(job);
                self.release_drains(job.queue, start);
            }
            (_, wrong) => {
                self.run(job, wrong, start, true, board);
            }
        }
    }

    /// Does a descriptor, or takes the record that says why not. Returns when it ends, and whether it succeeded.
    fn run(
        &mut self,
        job: Job,
        wrong: Option<CompletionRecord>,
        start: u64,
        ends: bool,
        board: &dyn Board,
    ) -> (u64, bool) {
        let hardware = self.dice.happens(self.dice.faults.hardware);
        let mut record = match wrong {
            Some(record) => record,
            None if hardware => CompletionRecord::new(Status::Hardware),
            None => {
                let mut lens = Lens {
                    memory: board.memory(),
                    space: job.space,
                    dice: &mut self.dice,
                    blocks: job.descriptor.has(flags::BLOCK_ON_FAULT),
                };
                operate(&job.descriptor, &mut lens)
            }
        };
        if self.dice.happens(self.dice.faults.lies) {
            record = lie(&job.descriptor, record);
        }
        let bytes = if wrong.is_some() {
            0
        } else {
            job.descriptor.traffic()
        };
        let busy = self.timing.transfer_ns(bytes);
        self.free_at = start.saturating_add(busy);
        self.account.bytes += bytes;
        self.account.busy_ns += busy;
        let faults = self.dice.faults;
        let late = if self.dice.delays() { faults.late_ns } else { 0 };
        let at = { self.free_at }
            .saturating_add(self.timing.latency_ns)
            .saturating_add(late);
        let told = !self.dice.loses();
        self.endings.push(at, job, record, told, ends);
        (at, record.status == Status::Success as u8)
    }

    /// What is wrong with a descriptor.
    fn check(&self, job: &Job, board: &dyn Board) -> Option<CompletionRecord> {
        let config = &self.queues[job.queue].config;
        wrong_with(job, config, &self.shape, board)
    }

    /// Reads the next member of a batch.
    fn fetch(&mut self, batch: &mut Batch, board: &dyn Board) {
        batch.next = None;
        let Some(address) = batch.next_address() else {
            return;
        };
        let mut bytes = [0; 64];
        let faults = self.dice.happens(self.dice.faults.list_faults);
        if faults || board.memory().read(batch.job.space, address, &mut bytes).is_err() {
            batch.list_fault = Some(address);
            return;
        }
        batch.next = Some(Descriptor::from_bytes(bytes));
    }

    /// Begins the next member of a batch, or ends the batch.
    fn dispatch_member(&mut self, at: usize, start: u64, board: &dyn Board) {
        let mut batch = self.batches[at];
        let next = batch.next.filter(|_| !batch.is_fenced_off());
        let Some(descriptor) = next else {
            self.batches.remove(at);
            let end = batch.last_end.max(start);
            let told = !self.dice.loses();
            self.endings.push(end, batch.job, batch.record(), told, true);
            return;
        };
        if self.dice.halts() {
            self.halt(board);
            return;
        }
        let job = Job {
            member: Some(u16::try_from(batch.dispatched).unwrap_or(u16::MAX)),
            descriptor,
            ..batch.job
        };
        let wrong = self.check(&job, board);
        let (end, success) = self.run(job, wrong, start, false, board);
        batch.last_end = batch.last_end.max(end);
        batch.failed |= !success;
        batch.dispatched += 1;
        self.fetch(&mut batch, board);
        self.batches[at] = batch;
    }

    /// Tells of a descriptor's end, unless it was dropped meanwhile.
    fn end(&mut self, ending: &Ending, board: &dyn Board) {
        let Ending {
            at,
            job,
            record,
            told,
            ends,
            ..
        } = *ending;
        if !self.queues[job.queue].has(job.owner) {
            return;
        }
        self.account.descriptors += 1;
        self.account.batches +=
            u64::from(job.descriptor.opcode() == Some(Opcode::Batch) && job.member.is_none());
        let failure = tell(&job, &record, told, self.shape.vectors(), board);
        if let Some(error) = failure {
            let number = u8::try_from(job.queue).ok();
            self.control.note_error(
                ErrorDetails {
                    error: error as u8,
                    queue: number,
                    operation: Some((
                        job.descriptor.opcode_code(),
                        job.space.map_or(0, |space| space.number()),
                    )),
                    batch_index: job.member,
                    write: error == Status::RecordFault,
                    fault_address: match error {
                        Status::RecordFault | Status::RecordAlignment => job.descriptor.completion().0,
                        _ => record.fault_address,
                    },
                },
                board,
            );
        }
        if ends {
            self.queues[job.queue].outstanding.remove(&job.owner);
            self.release_drains(job.queue, at);
        }
    }

    /// Ends drains that have nothing left to wait for.
    fn release_drains(&mut self, queue: usize, now: u64) {
        while let Some(drain) = self.queues[queue].drains.first().copied() {
            let first = self.queues[queue].outstanding.keys().next();
            if first != Some(&drain.owner) {
                return;
            }
            self.queues[queue].drains.remove(0);
            let at = now.saturating_add(self.timing.latency_ns);
            self.endings
                .push(at, drain, CompletionRecord::new(Status::Success), true, true);
        }
    }

    /// Drops what some queues have, by address space.
    pub(crate) fn drop_where(
        &mut self,
        queues: impl Iterator<Item = usize>,
        which: impl Fn(Option<Pasid>) -> bool,
        now: u64,
    ) {
        for queue in queues {
            self.queues[queue].drop_where(&which);
            self.release_drains(queue, now);
        }
        let queues = &self.queues;
        self.batches
            .retain(|batch| queues[batch.job.queue].has(batch.job.owner));
    }

    /// Drops what all queues have.
    pub(crate) fn drop_all(&mut self) {
        self.drop_where(0..self.queues.len(), |_| true, 0);
    }

    /// The device fails: what it had is dropped.
    fn halt(&mut self, board: &dyn Board) {
        self.drop_all();
        self.batches.clear();
        self.endings.clear();
        self.control.halt(self.dice.faults.halts_for_good, board);
    }
}

/// Writes the record and raises the interrupt. Returns what only a software error can tell.
fn tell(job: &Job, record: &CompletionRecord, told: bool, vectors: u16, board: &dyn Board) -> Option<Status> {
    let status = record.status().and_then(Result::ok);
    if let Some(error @ (Status::RecordFault | Status::RecordAlignment)) = status {
        return Some(error);
    }
    if !told {
        return None;
    }
    if let Some(address) = job.record_address().filter(|_| job.wants(record)) {
        let bytes = record.to_bytes();
        if board.memory().write_record(job.space, address.0, &bytes).is_err() {
            return Some(Status::RecordFault);
        }
    }
    if job.descriptor.has(flags::REQUEST_INTERRUPT) && job.descriptor.interrupt_handle() < vectors {
        board.interrupt(job.descriptor.interrupt_handle());
    }
    status.filter(|status| !status.is_done() && job.record_address().is_none())
}

/// Another result than the right one.
fn lie(descriptor: &Descriptor, record: CompletionRecord) -> CompletionRecord {
    match (descriptor.opcode(), record.status()) {
        (Some(Opcode::Compare | Opcode::ComparePattern), Some(Ok(Status::Success))) => match record.result {
            0 => record.with_result(1, descriptor.size() / 2),
            _ => record.with_result(0, descriptor.size()),
        },
        (Some(Opcode::CrcGenerate | Opcode::CopyCrc), Some(Ok(Status::Success))) => {
            record.with_value(record.value() ^ 0x0001_0000)
        }
        _ => record,
    }
}
