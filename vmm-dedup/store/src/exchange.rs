//! What a service's messages do to the state.

use crate::epochs::MemberId;
use crate::error::Violation;
use crate::relay::Question;
use crate::sightings::Sighting;
use crate::slots::Change;
use crate::state::{Connection, Phase, Service, State};
use std::hint::black_box;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{Batch, Kind, MAX_BATCH, Message, encode};
use zerocopy::IntoBytes;

/// After this long, a page that somebody was asked for and did not deliver is asked of the next who has it.
const ASK_PATIENCE: Duration = Duration::from_secs(2);

impl State {
    /// Handles one message. Returns the reply, if it has one.
    pub(crate) fn handle(
        &mut self,
        id: MemberId,
        message: &Message<'_>,
    ) -> Result<Option<Vec<u8>>, Violation> {
        match message {
            Message::Hello(hello) => self.hello(id, hello).map(|()| None),
            Message::Batch(batch) => {
                let done = self.batch(id, batch);
                // Also after a violation: slots that left the index must not be reused before the epoch advances.
                self.settle();
                done.map(Some)
            }
            Message::Publish(keys) => self.publish(id, keys).map(Some),
            Message::Report(stats) => self.report(id, stats).map(|()| None),
            Message::StatsRequest(request) => match self.connections[&id].phase {
                Phase::Greeting => Err(Violation::Unexpected("StatsRequest before Hello")),
                _ => Ok(Some(self.stats(*request))),
            },
            Message::Refused(refused) => self.announce(id, refused).map(|()| None),
            Message::Set(set) => self.ask(id, Question::Set(*set)),
            Message::Explain(explain) => self.ask(id, Question::Explain(*explain)),
            Message::Done(serial) => self.answer_done(id, *serial).map(|()| None),
            Message::Explained(explained) => self.answer_explained(id, explained).map(|()| None),
            Message::NotDone(not_done) => self.answer_not_done(id, not_done).map(|()| None),
            Message::Goodbye => self.goodbye(id).map(|()| None),
            Message::Welcome(_) => Err(Violation::Unexpected("Welcome")),
            Message::BatchReply(_) => Err(Violation::Unexpected("BatchReply")),
            Message::Published(_) => Err(Violation::Unexpected("Published")),
            Message::Stats(_) => Err(Violation::Unexpected("Stats")),
            Message::Segment(_) => Err(Violation::Unexpected("Segment")),
            Message::SegmentRetired(_) => Err(Violation::Unexpected("SegmentRetired")),
            Message::Index(_) => Err(Violation::Unexpected("Index")),
            Message::Error(_) => Err(Violation::Unexpected("Error")),
        }
    }

    pub(crate) fn service_mut(&mut self, id: MemberId) -> Option<&mut Service> {
        match self.connections.get_mut(&id) {
            Some(Connection {
                phase: Phase::Service(service),
                ..
            }) => Some(service),
            _ => None,
        }
    }

    /// A service maps nothing any more.
    fn goodbye(&mut self, id: MemberId) -> Result<(), Violation> {
        let Some(service) = self.service_mut(id) else {
            return Err(Violation::Unexpected("Goodbye"));
        };
        service.leaving = true;
        Ok(())
    }

    fn batch(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<Vec<u8>, Violation> {
        let Some(service) = self.service_mut(id) else {
            return Err(Violation::Unexpected("Batch"));
        };
        let pages = service.pages;
        self.counters.batches += 1;
        self.forget_asked(id);
        self.reserve(batch.ambiguous().len() + 2 * batch.refs().len())?;
        self.touch(batch)?;
        let wanted = self.sight(id, batch)?;
        self.withdraw(id, batch)?;
        for key in batch.ambiguous() {
            self.mark(key?);
        }
        for change in batch.refs() {
            let (slot, delta) = change?;
            match self.lifetime.apply(id, slot, delta)? {
                Change::None => {}
                Change::Dropped => {
                    let line = self.segments.line_key(slot, self.salt);
                    self.catalog.remove(line, slot);
                    if self.config.ordered {
                        let segments = &self.segments;
                        self.catalog.unorder(slot, |other| segments.compare(slot, other));
                    }
                }
                Change::Resurrected => self.enter(self.segments.line_key(slot, self.salt), slot),
            }
            if delta > 0 {
                self.note_shared(slot);
            }
        }
        let count = self.service_mut(id).map_or(0, |s| s.sightings);
        if count > pages {
            return Err(Violation::TooMany {
                what: "sightings",
                count,
                pages,
            });
        }
        // Twice the pages: a page may be shared anew before the batch arrives that tells where it was before.
        let count = self.lifetime.references(id).map_or(0, |r| r.total());
        if count > 2 * pages + MAX_BATCH as u64 {
            return Err(Violation::TooMany {
                what: "references",
                count,
                pages,
            });
        }
        self.lifetime.acknowledge(id, batch.epoch)?;
        Ok(encode(Kind::BatchReply, &[wanted.as_bytes()]))
    }

    /// Checks all keys, and brings what they will be looked up in into the cache.
    fn touch(&self, batch: &Batch<'_>) -> Result<(), Violation> {
        let mut sum = 0;
        for key in batch.sightings() {
            let key = key?;
            sum ^= self.sightings.touch(key) ^ self.catalog.reader().touch(key);
        }
        for key in batch.withdrawals() {
            sum ^= self.sightings.touch(key?);
        }
        black_box(sum);
        Ok(())
    }

    /// Takes in sightings. Returns which ones should be published.
    fn sight(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<Vec<u32>, Violation> {
        let (mut wanted, mut asked, mut remembered) = (Vec::new(), Vec::new(), 0);
        let full = self.is_full();
        let now = Instant::now();
        for (at, key) in (0u32..).zip(batch.sightings()) {
            let key = key?;
            let known = match key.is_full() {
                true => self.catalog.reader().slot_of_key(key).is_some(),
                false => self.catalog.reader().line(key).is_some(),
            };
            if known {
                continue;
            }
            match self.sightings.sight(key, id) {
                Sighting::First => remembered += 1,
                Sighting::Again(_) if full => self.counters.refused_full += 1,
                Sighting::Again(_) => {
                    let pending = self
                        .asked
                        .get(&key)
                        .is_some_and(|(_, at)| now - *at < ASK_PATIENCE);
                    if !pending {
                        self.asked.insert(key, (id, now));
                        asked.push(key);
                        wanted.push(at);
                    }
                }
            }
        }
        self.counters.sightings += batch.sightings().len() as u64;
        if let Some(service) = self.service_mut(id) {
            service.sightings += remembered;
            service.asked = asked;
        }
        Ok(wanted)
    }

    fn withdraw(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<(), Violation> {
        let mut withdrawn = 0;
        for key in batch.withdrawals() {
            withdrawn += u64::from(self.sightings.withdraw(key?, id));
        }
        self.counters.withdrawals += batch.withdrawals().len() as u64;
        if let Some(service) = self.service_mut(id) {
            service.sightings -= withdrawn;
        }
        Ok(())
    }

    /// Removes a sighting, whoever made it.
    pub(crate) fn forget_sighting(&mut self, key: Key) {
        if let Some(service) = self
            .sightings
            .remove(key)
            .and_then(|owner| self.service_mut(owner))
        {
            service.sightings -= 1;
        }
    }

    /// What a connection was asked to publish and did not is not waited for.
    pub(crate) fn forget_asked(&mut self, id: MemberId) {
        let Some(service) = self.service_mut(id) else {
            return;
        };
        for key in std::mem::take(&mut service.asked) {
            if self.asked.get(&key).is_some_and(|(of, _)| *of == id) {
                self.asked.remove(&key);
            }
        }
    }

    /// Puts a slot into the index. Its keys are no mere sightings any more.
    pub(crate) fn enter(&mut self, line: Key, slot: Slot) {
        let (segments, salt) = (&self.segments, self.salt);
        self.catalog.insert(line, slot, |slot| segments.hash(slot, salt));
        if self.config.ordered {
            self.catalog.order(slot, |other| segments.compare(slot, other));
        }
        self.forget_sighting(line);
    }

    /// A line key is ambiguous: its slots are found by their hashes from now on.
    pub(crate) fn mark(&mut self, line: Key) {
        let (segments, salt) = (&self.segments, self.salt);
        self.catalog.mark(line, |slot| segments.hash(slot, salt));
    }

    fn is_full(&self) -> bool {
        let slots = self.lifetime.slots();
        slots.live() + slots.limbo() + self.segments.cooling() >= self.segments.max_slots().into()
    }
}
