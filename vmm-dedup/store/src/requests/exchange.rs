//! What services tell of their pages: which keys they sighted, which they withdraw, which slots they map. What they
//! publish is in `publication`.

use crate::ledger::epochs::MemberId;
use crate::ledger::lifetime::ReferenceViolation;
use crate::ledger::pending::PendingPublications;
use crate::ledger::references::Unbalanced;
use crate::ledger::sightings::{PASSED_OVER, Sighting, Sightings};
use crate::memory::pool::Pool;
use crate::requests::violation::Violation;
use std::hint::black_box;
use std::time::Instant;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{Ask, Batch, Kind, MAX_BATCH, encode};
use zerocopy::IntoBytes;

/// Counters of what services tell.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExchangeCounters {
    pub(crate) published: u64,
    pub(crate) unverified: u64,
    pub(crate) refused_full: u64,
    pub(crate) sightings: u64,
    pub(crate) withdrawals: u64,
    pub(crate) batches: u64,
    /// Keys in the news whose pages did not enter: slots that came back, and pages that were not published.
    pub(crate) needless_news: u64,
}

/// What a batch changes in all, slot by slot. A slot that it drops and takes again neither leaves the index nor comes back to it:
/// each time would be news for all services.
fn net(batch: &Batch<'_>) -> Result<Vec<(Slot, i32)>, Violation> {
    let mut changes = batch.refs().collect::<Result<Vec<_>, _>>()?;
    changes.sort_unstable_by_key(|(slot, _)| *slot);
    let mut net: Vec<(Slot, i64)> = Vec::with_capacity(changes.len());
    for (slot, delta) in changes {
        match net.last_mut() {
            Some((last, sum)) if *last == slot => *sum += i64::from(delta),
            _ => net.push((slot, i64::from(delta))),
        }
    }
    let narrow = |(slot, sum): (Slot, i64)| match i32::try_from(sum) {
        Ok(sum) => Ok((slot, sum)),
        Err(_) => Err(ReferenceViolation::from(Unbalanced::Overflow { slot }).into()),
    };
    net.into_iter().map(narrow).collect()
}

/// The pool, and what services have told of pages that are not in it.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) pool: Pool,
    pub(crate) sightings: Sightings,
    pub(super) pending: PendingPublications,
    pub(crate) counters: ExchangeCounters,
}

impl Exchange {
    pub(crate) fn new(pool: Pool, sightings: Sightings) -> Self {
        Self {
            pool,
            sightings,
            pending: PendingPublications::default(),
            counters: ExchangeCounters::default(),
        }
    }

    /// News that nobody would have needed, so far. Who causes them pays for them.
    pub(crate) fn needless_news(&self) -> u64 {
        self.counters.needless_news
    }

    /// A batch of a member whose VM has so many pages. Returns the reply. [`Pool::reclaim`] must follow, also after a
    /// violation: slots that have left the index must not be freed before the epoch advances.
    pub(crate) fn batch(
        &mut self,
        id: MemberId,
        pages: u64,
        batch: &Batch<'_>,
    ) -> Result<Vec<u8>, Violation> {
        self.counters.batches += 1;
        self.forget_pending(id);
        self.reserve(batch.ambiguous().len() + 2 * batch.refs().len())?;
        self.prefetch(batch)?;
        let asks = self.sight(id, batch)?;
        self.withdraw(id, batch)?;
        for key in batch.ambiguous() {
            self.pool.mark(key?);
        }
        for (slot, delta) in net(batch)? {
            if let Some(line) = self.pool.apply(id, slot, delta)? {
                self.counters.needless_news += 1;
                self.sightings.remove(line);
            }
        }
        let count = self.sightings.of(id);
        if count > pages {
            return Err(Violation::TooMany {
                what: "sightings",
                count,
                pages,
            });
        }
        self.check_references(id, pages, 0)?;
        self.pool.acknowledge(id, batch.epoch)?;
        Ok(encode(Kind::BatchReply, &[asks.as_bytes()]))
    }

    /// Makes room for so many entries in the index.
    pub(super) fn reserve(&mut self, entries: usize) -> Result<(), Violation> {
        self.pool.reserve(entries).map_err(Violation::Resources)
    }

    /// Refuses more references than twice the VM's pages: a page may be shared anew before the batch arrives that tells
    /// where it was before.
    pub(super) fn check_references(&self, id: MemberId, pages: u64, more: usize) -> Result<(), Violation> {
        let count = self.pool.references(id) + more as u64;
        if count > 2 * pages + MAX_BATCH as u64 {
            return Err(Violation::TooMany {
                what: "references",
                count,
                pages,
            });
        }
        Ok(())
    }

    /// Checks all keys, and brings what they will be looked up in into the cache.
    fn prefetch(&self, batch: &Batch<'_>) -> Result<(), Violation> {
        let mut sum = 0;
        for key in batch.sightings() {
            sum ^= self.touch(key?);
        }
        for key in batch.withdrawals() {
            sum ^= self.sightings.touch(key?);
        }
        black_box(sum);
        Ok(())
    }

    /// Reads where a key will be looked up. The value means nothing.
    pub(super) fn touch(&self, key: Key) -> u64 {
        self.sightings.touch(key) ^ self.pool.index().touch(key)
    }

    /// Takes in sightings. Returns what is wanted of them.
    ///
    /// A key that the index has is not remembered, so its service must look it up again: the key entered after the service looked,
    /// the service missed an entry that was being moved, or another key with the same tag entered. The news does not always tell:
    /// it has the other key then, or is older than the look.
    fn sight(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<Vec<u32>, Violation> {
        let mut asks = Vec::new();
        let mut room = self.pool.room_for(id);
        let now = Instant::now();
        for (at, key) in (0u32..).zip(batch.sightings()) {
            let key = key?;
            let known = match key.is_full() {
                true => self.pool.index().slot_of_key(key).is_some(),
                false => self.pool.index().line(key).is_some(),
            };
            if known {
                asks.push(Ask::LookUp.of(at));
                continue;
            }
            match self.sightings.sight(key, id) {
                Sighting::First | Sighting::NoRoom => {}
                Sighting::Again(_) if room == 0 => {
                    self.counters.refused_full += 1;
                    // What its user may not have others may, when they sight it.
                    if !self.pool.is_beyond_share(id) {
                        self.pass_over(key);
                    }
                }
                Sighting::Again(_) => {
                    if self.pending.may_ask(key, id, now) {
                        self.pending.ask(key, id, now);
                        asks.push(Ask::Publish.of(at));
                        room -= 1;
                    }
                }
            }
        }
        self.counters.sightings += batch.sightings().len() as u64;
        Ok(asks)
    }

    /// The store is full. Nobody sights a key again that nobody asks for, so it is remembered until there is room: not more keys
    /// than the store may have slots, which is all that there can be room for at once.
    pub(super) fn pass_over(&mut self, key: Key) {
        if self.sightings.of(PASSED_OVER) < u64::from(self.pool.max_slots()) {
            self.sightings.pass_over(key);
        }
    }

    /// There may be room again for pages that were passed over: whoever has them sights them anew. To be called once a second.
    pub(crate) fn use_room(&mut self) {
        let room = usize::try_from(self.pool.room()).unwrap_or(usize::MAX);
        // Where the host has no memory for it, one page tries.
        let most = if self.pool.is_short_of_memory() {
            1
        } else {
            MAX_BATCH
        };
        for key in self.sightings.passed_over(room.min(most)) {
            self.repeat_news(key);
        }
    }

    fn withdraw(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<(), Violation> {
        for key in batch.withdrawals() {
            self.sightings.withdraw(key?, id);
        }
        self.counters.withdrawals += batch.withdrawals().len() as u64;
        Ok(())
    }

    /// What a service was asked for and has not published may be asked of others. They have sighted it already, maybe all of them:
    /// the news makes them sight it anew.
    fn forget_pending(&mut self, id: MemberId) {
        for key in self.pending.forget(id, Instant::now()) {
            self.repeat_news(key);
        }
    }

    /// The same for what services were asked for too long ago. To be called once a second.
    pub(crate) fn expire_pending(&mut self) {
        for key in self.pending.expire(Instant::now()) {
            self.repeat_news(key);
        }
    }

    /// Whoever has a page of a key sights it anew; who was first before is not taken for a second one then.
    pub(super) fn repeat_news(&mut self, key: Key) {
        self.counters.needless_news += 1;
        self.sightings.remove(key);
        self.pool.repeat_news(key);
    }

    /// A service's connection has gone: what it was asked for is asked of others.
    pub(crate) fn disconnect(&mut self, id: MemberId) {
        for key in self.pending.leave(id) {
            self.repeat_news(key);
        }
    }

    /// Forgets some of what it sighted. Returns whether there is more; `step` counts the calls.
    pub(crate) fn forget_some(&mut self, id: MemberId, step: usize) -> bool {
        self.sightings.sweep_some(id, step)
    }

    /// A key has entered the index, and is no mere sighting any more.
    pub(super) fn forget_sighting(&mut self, key: Key) {
        self.sightings.remove(key);
    }
}
