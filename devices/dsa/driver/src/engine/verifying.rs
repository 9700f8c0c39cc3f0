//! Pairs that were taken for verification, and where copies of them are.

use super::page::PAGE;
use crate::channel::{Channel, ItemError};
use vmm_dedup::compare::{Account, Answer, Arena, Compared, DeviceWork, Error, PageId, PairAnswer};
use vmm_dedup_dsa_abi::{Comparison, CompletionRecord, DeviceAddress};
use vmm_dedup_protocol::PAGE_SIZE;

/// Pairs in flight.
pub(super) const MOST: usize = 1024;
/// Pairs on their way.
#[derive(Default)]
pub(super) struct Verifying {
    /// By tag. Those without a number were aborted, and keep their place until the device is done with it.
    pub(super) running: Vec<Running>,
    pub(super) free: Vec<usize>,
    pub(super) ready: Vec<PairAnswer>,
    /// Copies of the taken pages, one for each tag, for devices that do not use this process's addresses, and where each
    /// queue's device sees them.
    pub(super) copies: Option<(Arena, Vec<Option<DeviceAddress>>)>,
    /// Ns that the CPU takes for a pair of equal pages, as it was seen to.
    pub(super) cpu_ns: u64,
    pub(super) asked: u64,
}

/// A pair that the device has.
#[derive(Clone, Copy)]
pub(super) struct Running {
    /// `None` if it was aborted, or none runs.
    pub(super) number: Option<u64>,
    pub(super) with: Option<PageId>,
    /// The address of the taken page.
    pub(super) taken: usize,
}

impl Verifying {
    /// With room for pairs in flight through these queues.
    pub(super) fn new(channels: &mut [Option<Channel>]) -> Answer<Self> {
        let idle = Running {
            number: None,
            with: None,
            taken: 0,
        };
        let mut verifying = Self {
            running: vec![idle; MOST],
            free: (0..MOST).rev().collect(),
            ..Self::default()
        };
        let mut live = channels.iter().flatten();
        if live.all(Channel::uses_process_addresses) {
            return Ok(verifying);
        }
        let failed = |error: &dyn std::fmt::Display| Error::Device(error.to_string());
        let arena = Arena::new(MOST).map_err(|error| failed(&error))?;
        let mut at = Vec::with_capacity(channels.len());
        for channel in channels.iter_mut().flatten() {
            let mapped = channel.map(MOST * PAGE_SIZE, arena.file(), false);
            at.push(mapped.map_err(|trouble| failed(&trouble))?);
        }
        verifying.copies = Some((arena, at));
        Ok(verifying)
    }

    /// A pair has ended.
    pub(super) fn ended(
        &mut self,
        account: &mut Account,
        past: &mut DeviceWork,
        tag: u64,
        outcome: Result<CompletionRecord, ItemError>,
    ) {
        let Some(at) = usize::try_from(tag).ok().filter(|at| *at < MOST) else {
            return;
        };
        let running = self.running[at];
        let Some(number) = running.number else {
            self.free(at);
            return;
        };
        self.free(at);
        let fault = || match running.with {
            Some(id) => Error::Fault(id),
            None => Error::Address(running.taken),
        };
        account.comparisons += 1;
        let lines = match &outcome {
            Ok(record) => match record.comparison() {
                Some(Comparison::DiffersAt(offset)) => u64::from(offset) / 64 + 1,
                _ => u64::from(PAGE) / 64,
            },
            Err(_) => 1,
        };
        account.lines += 2 * lines;
        account.bytes += 2 * lines * 64;
        let answer = match outcome.map(|record| record.comparison()) {
            Ok(Some(Comparison::Equal)) => Ok(Compared::Equal),
            Ok(Some(Comparison::DiffersAt(offset))) => {
                let offset = u16::try_from(offset)
                    .ok()
                    .filter(|offset| usize::from(*offset) < PAGE_SIZE);
                Ok(Compared::Different(offset))
            }
            // The CPU compares this pair.
            Ok(None) | Err(_) => {
                past.cpu_instead += 1;
                Err(fault())
            }
        };
        self.ready.push(PairAnswer { number, answer });
    }

    /// A tag can be used again.
    pub(super) fn free(&mut self, tag: usize) {
        self.running[tag].number = None;
        self.free.push(tag);
    }
}
