//! Work queues.

use std::collections::{BTreeMap, VecDeque};
use vmm_dedup_dsa_abi::config::{Mode, QueueConfig, QueueState};
use vmm_dedup_dsa_abi::portal::Kind;
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, DeviceAddress, Pasid, flags};

/// A descriptor's number: in the order of submission, over all queues.
pub(crate) type Sequence = u64;

/// Whose a descriptor is, and where its end is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) queue: usize,
    /// Its number; of a batch's member, the batch's.
    pub(crate) owner: Sequence,
    pub(crate) space: Option<Pasid>,
    /// Its place in a batch.
    pub(crate) member: Option<u16>,
    pub(crate) descriptor: Descriptor,
}

impl Job {
    /// Where its record goes, if it has a place for one.
    pub(crate) fn record_address(&self) -> Option<DeviceAddress> {
        let valid = self.descriptor.has(flags::COMPLETION_ADDRESS_VALID);
        valid.then(|| self.descriptor.completion())
    }

    /// Whether a record is written that says this.
    pub(crate) fn wants(&self, record: &CompletionRecord) -> bool {
        let success = record.status == vmm_dedup_dsa_abi::Status::Success as u8;
        self.record_address().is_some() && (!success || self.descriptor.has(flags::REQUEST_COMPLETION))
    }
}

/// A descriptor in a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) job: Job,
    pub(crate) since: u64,
}

/// A queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    pub(crate) config: QueueConfig,
    pub(crate) state: QueueState,
    pub(crate) waiting: VecDeque<Waiting>,
    /// All that have not ended, with their address spaces: those that wait, those that run, drains.
    pub(crate) outstanding: BTreeMap<Sequence, Option<Pasid>>,
    /// Drains that wait for those before them.
    pub(crate) drains: Vec<Job>,
}

impl Queue {
    /// Whether it is full for those with this portal.
    pub(crate) fn is_full(&self, kind: Kind) -> bool {
        let limited = matches!(kind, Kind::Limited | Kind::LimitedIms);
        let room = match self.config.mode() {
            Mode::Shared if limited => self.config.threshold(),
            _ => self.config.entries(),
        };
        self.waiting.len() >= usize::from(room)
    }

    /// The address space of a descriptor.
    pub(crate) fn space(&self, descriptor: &Descriptor) -> Option<Pasid> {
        let own = self.config.pasid()?;
        Some(match self.config.mode() {
            Mode::Dedicated => own,
            Mode::Shared => descriptor.pasid(),
        })
    }

    /// Whether a descriptor has not ended, nor been dropped.
    pub(crate) fn has(&self, number: Sequence) -> bool {
        self.outstanding.contains_key(&number)
    }

    /// Drops those that `which` says, without a word to anybody.
    pub(crate) fn drop_where(&mut self, which: impl Fn(Option<Pasid>) -> bool) {
        self.outstanding.retain(|_, space| !which(*space));
        let left = &self.outstanding;
        self.waiting
            .retain(|waiting| left.contains_key(&waiting.job.owner));
        self.drains.retain(|job| left.contains_key(&job.owner));
    }

    /// The word of its table that the device keeps.
    pub(crate) fn state_word(&self) -> u32 {
        let occupancy = u16::try_from(self.waiting.len()).unwrap_or(u16::MAX);
        QueueConfig::state_word(self.state, occupancy)
    }
}
