//! What a service's messages do to the state.

use crate::epochs::MemberId;
use crate::error::Violation;
use crate::relay::Question;
use crate::segments::Run;
use crate::sightings::Sighting;
use crate::slots::Change;
use crate::state::{Connection, Phase, Service, State};
use std::hint::black_box;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash, PageWords, line_words};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::{Batch, Kind, MAX_BATCH, Message, NO_SLOT, encode};
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

    fn service_mut(&mut self, id: MemberId) -> Option<&mut Service> {
        match self.connections.get_mut(&id) {
            Some(Connection {
                phase: Phase::Service(service),
                ..
            }) => Some(service),
            _ => None,
        }
    }

    fn batch(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<Vec<u8>, Violation> {
        let Some(service) = self.service_mut(id) else {
            return Err(Violation::Unexpected("Batch"));
        };
        let pages = service.pages;
        self.counters.batches += 1;
        self.forget_asked(id);
        self.reserve(batch.sightings().len() + 2 * batch.refs().len())?;
        self.touch(batch)?;
        let wanted = self.sight(id, batch)?;
        self.withdraw(id, batch)?;
        for change in batch.refs() {
            let (slot, delta) = change?;
            match self.lifetime.apply(id, slot, delta)? {
                Change::None => {}
                Change::Dropped => {
                    let line = self.line_key(slot);
                    self.catalog.remove(line, slot);
                }
                Change::Resurrected => self.enter(self.catalog.hash_of(slot), self.line_key(slot), slot),
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
                false => self.catalog.reader().is_marked(key),
            };
            if known {
                continue;
            }
            match self.sightings.sight(key, id) {
                Sighting::First => remembered += 1,
                Sighting::Again(_) if !key.is_full() => {
                    self.forget_sighting(key);
                    self.catalog.mark(key);
                }
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
            // Those of this batch that were forgotten again have been subtracted already.
            service.sightings = service.sightings.wrapping_add(remembered);
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
    fn forget_sighting(&mut self, key: Key) {
        if let Some(service) = self
            .sightings
            .remove(key)
            .and_then(|owner| self.service_mut(owner))
        {
            service.sightings = service.sightings.wrapping_sub(1);
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

    fn publish(&mut self, id: MemberId, keys: &[u64]) -> Result<Vec<u8>, Violation> {
        let Some(service) = self.service_mut(id) else {
            return Err(Violation::Unexpected("Publish"));
        };
        let (staging, pages) = (service.staging.clone(), service.pages);
        if let Some(raw) = keys
            .iter()
            .find(|raw| !Key::try_new(**raw).is_some_and(Key::is_full))
        {
            return Err(vmm_dedup_protocol::message::Malformed::Value {
                field: "key",
                value: *raw,
            }
            .into());
        }
        let count = self.lifetime.references(id).map_or(0, |r| r.total()) + keys.len() as u64;
        if count > 2 * pages + MAX_BATCH as u64 {
            return Err(Violation::TooMany {
                what: "references",
                count,
                pages,
            });
        }
        self.reserve(2 * keys.len())?;
        let mut run = None;
        let slots = self.publish_pages(id, keys, &staging, &mut run);
        while let Some(slot) = next_of(&mut run) {
            if let Some(number) = self.segments.free(slot) {
                self.broadcast(&encode(Kind::SegmentRetired, &[number.as_bytes()]), None);
            }
        }
        Ok(encode(Kind::Published, &[slots?.as_bytes()]))
    }

    fn publish_pages(
        &mut self,
        id: MemberId,
        keys: &[u64],
        staging: &Mapping,
        run: &mut Option<Run>,
    ) -> Result<Vec<u32>, Violation> {
        let mut slots = Vec::with_capacity(keys.len());
        let mut page = [0; PAGE_WORDS];
        for (at, key) in keys.iter().filter_map(|raw| Key::try_new(*raw)).enumerate() {
            // The peer may write the staging buffer at any time. What is hashed, compared and stored is this copy.
            staging.read_page(at, &mut page);
            let rest = u32::try_from(keys.len() - at).unwrap_or(u32::MAX);
            let slot = self.publish_page(id, key, &page, run, rest)?;
            slots.push(slot.map_or(NO_SLOT, Slot::number));
        }
        Ok(slots)
    }

    /// Finds or makes the slot of one page. `run` holds slots that were allocated for this message, `rest` is how
    /// many pages are left of it.
    fn publish_page(
        &mut self,
        id: MemberId,
        key: Key,
        page: &PageWords,
        run: &mut Option<Run>,
        rest: u32,
    ) -> Result<Option<Slot>, Violation> {
        if self.asked.get(&key).is_some_and(|(of, _)| *of == id) {
            self.asked.remove(&key);
        }
        let hash = PageHash::of(page, self.salt);
        if hash.key() != key {
            self.counters.unverified += 1;
            return Ok(None);
        }
        if let Some(slot) = self.catalog.reader().slot_of(hash) {
            if !self.segments.equals(slot, page) {
                return Ok(None);
            }
            self.lifetime.apply(id, slot, 1)?;
            return Ok(Some(slot));
        }
        let line = Key::of_lines(&line_words(|at| page[at]), self.salt);
        if !self.catalog.admits(hash, line) {
            self.counters.refused_full += 1;
            return Ok(None);
        }
        if run.is_none() {
            let Some((allocated, new)) = self.allocate_run(rest) else {
                self.counters.refused_full += 1;
                return Ok(None);
            };
            if let Some(number) = new {
                let file = self.segments.file(number);
                self.broadcast(&encode(Kind::Segment, &[number.as_bytes()]), Some(&file));
            }
            self.segments.populate(&allocated);
            *run = Some(allocated);
        }
        let Some(slot) = next_of(run) else { return Ok(None) };
        self.segments.write(slot, page);
        self.lifetime.publish(id, slot);
        self.enter(hash, line, slot);
        self.counters.published += 1;
        Ok(Some(slot))
    }

    /// Takes slots for up to this many pages. A kernel that has no memory or descriptors left for a new segment makes
    /// the store as large as it is: no service's fault.
    fn allocate_run(&mut self, pages: u32) -> Option<(Run, Option<u32>)> {
        let allocated = self.segments.allocate_run(pages);
        if let Err(e) = &allocated
            && !self.short_of_memory
        {
            log::error!("the store cannot grow for now (raise the limits on memory and open files?): {e}");
        }
        self.short_of_memory = allocated.is_err();
        allocated.ok().flatten()
    }

    /// Puts a slot into the index. Its keys are no mere sightings any more.
    fn enter(&mut self, hash: PageHash, line: Key, slot: Slot) {
        if self.catalog.insert(hash, line, slot) {
            self.forget_sighting(line);
        }
        self.forget_sighting(hash.key());
    }

    fn line_key(&self, slot: Slot) -> Key {
        Key::of_lines(&self.segments.key_words(slot), self.salt)
    }

    fn is_full(&self) -> bool {
        let slots = self.lifetime.slots();
        slots.live() + slots.limbo() + self.segments.cooling() >= self.segments.max_slots().into()
    }
}

/// Takes the next slot of a run.
fn next_of(run: &mut Option<Run>) -> Option<Slot> {
    let Run { first, len } = run.take()?;
    let next = first.checked_add_in_segment(1);
    *run = next.filter(|_| len > 1).map(|first| Run { first, len: len - 1 });
    Some(first)
}
