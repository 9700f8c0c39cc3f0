//! Pages become slots.
//!
//! A page is copied once, from the staging buffer into a slot that nobody knows of, and everything is done with that
//! copy: the peer may write the staging buffer at any time. The slots of one message lie to each other as the pages
//! do in the guest, short gaps included, so that guests of the same layout can map all of it in one piece. A slot
//! in a gap is free for others; nobody looks at it through such a mapping.
//!
//! The slots of a guest's huge page lie as those of one, see [`crate::huge`].

use crate::epochs::MemberId;
use crate::error::Violation;
use crate::segments::Run;
use crate::state::State;
use vmm_dedup_protocol::HUGE_PAGES;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::{Kind, MAX_BATCH, NO_SLOT, Staged, Wish, encode};
use zerocopy::IntoBytes;

/// The slots of one message.
#[derive(Debug)]
struct Layout {
    pages: Vec<Staged>,
    /// Where each page should be, counted in slots from the first one.
    places: Vec<u32>,
    /// Slots for the places from this one on.
    run: Option<(u32, Run)>,
    /// Slots that were taken and not used.
    unused: Vec<Slot>,
}

impl Layout {
    fn new(pages: Vec<Staged>) -> Self {
        let mut next = 0;
        let place = |page: &Staged| {
            let place = next + u32::from(page.gap);
            next = place + 1;
            place
        };
        Self {
            places: pages.iter().map(place).collect(),
            pages,
            run: None,
            unused: Vec::new(),
        }
    }

    /// Whether a huge page is wanted for all of it.
    fn is_huge_page(&self) -> bool {
        let wish = self.pages.first().is_some_and(|page| page.wish == Wish::HugePage);
        wish && self.pages.len() == HUGE_PAGES && self.span(0) as usize == HUGE_PAGES
    }

    /// The slot for a page, if the current run has it. Pages are asked for in order.
    fn slot(&mut self, page: usize) -> Option<Slot> {
        let place = self.places[page];
        loop {
            let (next, Run { first, len }) = self.run.take()?;
            let rest = first.checked_add_in_segment(1).filter(|_| len > 1);
            self.run = rest.map(|first| (next + 1, Run { first, len: len - 1 }));
            if next == place {
                return Some(first);
            }
            self.unused.push(first);
        }
    }

    /// Slots wanted for a page and those behind it.
    fn span(&self, page: usize) -> u32 {
        self.places[self.places.len() - 1] - self.places[page] + 1
    }

    /// Takes over a run for a page and those behind it; calls `populate` for the parts that will be written.
    fn extend(&mut self, page: usize, run: Run, mut populate: impl FnMut(Run)) {
        let start = self.places[page];
        let places = self.places[page..].iter().map(|place| place - start);
        let mut part: Option<(u32, u32)> = None;
        for place in places.take_while(|place| *place < run.len).chain([u32::MAX]) {
            part = match part {
                Some((from, to)) if to == place => Some((from, to + 1)),
                done => {
                    if let Some((from, to)) = done
                        && let Some(first) = run.first.checked_add_in_segment(from)
                    {
                        populate(Run {
                            first,
                            len: to - from,
                        });
                    }
                    Some((place, place.saturating_add(1)))
                }
            };
        }
        self.run = Some((start, run));
    }

    /// All slots that were taken and not used.
    fn into_unused(mut self) -> Vec<Slot> {
        if let Some((_, Run { first, len })) = self.run {
            let rest = (0..len).filter_map(|n| first.checked_add_in_segment(n));
            self.unused.extend(rest);
        }
        self.unused
    }
}

impl State {
    /// Pages of a service that lie in its staging buffer.
    pub(crate) fn publish(&mut self, id: MemberId, pages: &[u64]) -> Result<Vec<u8>, Violation> {
        let Some(service) = self.service_mut(id) else {
            return Err(Violation::Unexpected("Publish"));
        };
        let (staging, declared) = (service.staging.clone(), service.pages);
        let staged = pages.iter().map(|raw| Staged::try_new(*raw));
        let mut layout = Layout::new(staged.collect::<Result<_, _>>()?);
        let count = self.lifetime.references(id).map_or(0, |r| r.total()) + pages.len() as u64;
        if count > 2 * declared + MAX_BATCH as u64 {
            return Err(Violation::TooMany {
                what: "references",
                count,
                pages: declared,
            });
        }
        self.reserve(2 * pages.len())?;
        if let Some(slots) = layout
            .is_huge_page()
            .then(|| self.publish_huge_page(id, &layout.pages, &staging))
            .flatten()
        {
            return Ok(encode(Kind::Published, &[slots.as_bytes()]));
        }
        let slots: Result<Vec<u32>, Violation> = (0..pages.len())
            .map(|page| {
                let slot = self.publish_page(id, &mut layout, page, &staging)?;
                Ok(slot.map_or(NO_SLOT, Slot::number))
            })
            .collect();
        self.give_back(layout.into_unused());
        Ok(encode(Kind::Published, &[slots?.as_bytes()]))
    }

    /// Finds or makes the slot of one page.
    fn publish_page(
        &mut self,
        id: MemberId,
        layout: &mut Layout,
        page: usize,
        staging: &Mapping,
    ) -> Result<Option<Slot>, Violation> {
        let key = layout.pages[page].key;
        self.note_answered(id, key);
        let Some(slot) = self.take_slot(layout, page) else {
            self.counters.refused_full += 1;
            return Ok(None);
        };
        self.segments.fill(slot, staging, page);
        let line = self.segments.line_key(slot, self.salt);
        let found = if key.is_full() {
            self.segments.hash(slot, self.salt).key()
        } else {
            line
        };
        if found != key {
            self.counters.unverified += 1;
            layout.unused.push(slot);
            return Ok(None);
        }
        let slot = match self.twin(line, slot) {
            Some(twin) => {
                layout.unused.push(slot);
                let series = layout.pages[page].wish == Wish::Series;
                match series.then(|| self.make_series(id, line, twin)).flatten() {
                    Some(first) => first,
                    None => {
                        self.lifetime.apply(id, twin, 1)?;
                        twin
                    }
                }
            }
            None if self.admits(line, slot) => {
                self.lifetime.publish(id, slot);
                self.enter(line, slot);
                self.counters.published += 1;
                slot
            }
            None => {
                self.counters.refused_full += 1;
                layout.unused.push(slot);
                return Ok(None);
            }
        };
        if key.is_full() {
            // Whoever knows the page by its hash must find it by that.
            self.mark(line);
            self.forget_sighting(key);
        }
        Ok(Some(slot))
    }

    /// A slot in the index that holds the same page as this one, which is not in it.
    fn twin(&self, line: Key, slot: Slot) -> Option<Slot> {
        let twin = match self.catalog.reader().line(line)? {
            Line::Sole(twin) | Line::Series(twin) => twin,
            Line::Marked(_) => {
                let hash = self.segments.hash(slot, self.salt);
                self.catalog.reader().slot_of(hash)?
            }
        };
        self.segments.equal(twin, slot).then_some(twin)
    }

    fn admits(&self, line: Key, slot: Slot) -> bool {
        self.catalog.admits(line, || self.segments.hash(slot, self.salt))
    }

    /// The place of a page, with memory; `None` if the store is full.
    fn take_slot(&mut self, layout: &mut Layout, page: usize) -> Option<Slot> {
        if let Some(slot) = layout.slot(page) {
            return Some(slot);
        }
        let run = self.allocate_run(layout.span(page))?;
        layout.extend(page, run, |part| self.segments.populate(&part));
        layout.slot(page)
    }

    /// Slots that nobody was ever given are free again.
    pub(crate) fn give_back(&mut self, slots: Vec<Slot>) {
        for slot in slots {
            if let Some(number) = self.segments.free(slot) {
                self.broadcast(&encode(Kind::SegmentRetired, &[number.as_bytes()]), None);
            }
        }
    }

    /// A service that was asked for a page has published it, or tried.
    pub(crate) fn note_answered(&mut self, id: MemberId, key: Key) {
        if self.asked.get(&key).is_some_and(|(of, _)| *of == id) {
            self.asked.remove(&key);
        }
    }

    /// Takes slots for up to this many pages. A kernel that has no memory or descriptors left for a new segment makes
    /// the store as large as it is: no service's fault.
    pub(crate) fn allocate_run(&mut self, pages: u32) -> Option<Run> {
        let allocated = self.segments.allocate_run(pages);
        if let Err(e) = &allocated
            && !self.short_of_memory
        {
            log::error!("the store cannot grow for now (raise the limits on memory and open files?): {e}");
        }
        self.short_of_memory = allocated.is_err();
        let (run, new) = allocated.ok().flatten()?;
        self.announce_segment(new);
        Some(run)
    }

    /// Tells everyone of a segment that was made.
    pub(crate) fn announce_segment(&mut self, new: Option<u32>) {
        if let Some(number) = new {
            let file = self.segments.file(number);
            self.broadcast(&encode(Kind::Segment, &[number.as_bytes()]), Some(&file));
        }
    }
}
