//! Pages become slots.
//!
//! The pool copies a page once, from the staging buffer into a slot that nobody knows of, and does everything with that
//! copy. The slots of one message lie to each other as the pages do in the guest, short gaps included, so that guests of
//! the same layout can map all of it in one piece. A slot in a gap is free for others; nobody looks at it through such a
//! mapping.
//!
//! The slots of a guest's huge page lie as those of one, see [`crate::memory::huge`].

use crate::ledger::allocator::Run;
use crate::ledger::epochs::MemberId;
use crate::memory::pool::Publication;
use crate::requests::exchange::Exchange;
use crate::requests::peers::Service;
use crate::requests::violation::Violation;
use std::hint::black_box;
use std::os::fd::OwnedFd;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{Kind, NO_SLOT, Staged, Wish, encode};
use vmm_dedup_protocol::{HUGE_PAGES, SERIES, Slot};
use zerocopy::IntoBytes;

/// A service may have series made of one page in this many of its own: what it asks for costs others nothing much.
const PAGES_PER_EXTRA_SLOT: u64 = 64;

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
        self.unused
            .extend(self.run.into_iter().flat_map(|(_, run)| run.slots()));
        self.unused
    }
}

/// Whether a service that has been given so many series may have one more.
fn may_have_series(service: &Service) -> bool {
    let extra = (service.series + 1) * u64::from(SERIES - 1);
    extra * PAGES_PER_EXTRA_SLOT <= service.pages
}

impl Exchange {
    /// Pages of a service that lie in its staging buffer. Returns the reply.
    pub(crate) fn publish(
        &mut self,
        id: MemberId,
        service: &mut Service,
        pages: &[u64],
    ) -> Result<Vec<u8>, Violation> {
        let staged = pages.iter().map(|raw| Staged::try_new(*raw));
        let mut layout = Layout::new(staged.collect::<Result<_, _>>()?);
        self.check_references(id, service.pages, pages.len())?;
        self.reserve(2 * pages.len())?;
        black_box(
            layout
                .pages
                .iter()
                .fold(0, |sum, page| sum ^ self.touch(page.key)),
        );
        // Which pages are shared would show in who has them as one.
        let secure = self.pool.is_secure();
        if let Some(slots) = (!secure && layout.is_huge_page())
            .then(|| self.publish_huge_page(id, &layout.pages, &service.staging))
            .flatten()
        {
            return Ok(encode(Kind::Published, &[slots.as_bytes()]));
        }
        let slots: Result<Vec<u32>, Violation> = (0..pages.len())
            .map(|page| {
                let slot = self.publish_page(id, service, &mut layout, page)?;
                Ok(slot.map_or(NO_SLOT, Slot::number))
            })
            .collect();
        self.pool.give_back(layout.into_unused());
        Ok(encode(Kind::Published, &[slots?.as_bytes()]))
    }

    /// Finds or makes the slot of one page.
    fn publish_page(
        &mut self,
        id: MemberId,
        service: &mut Service,
        layout: &mut Layout,
        page: usize,
    ) -> Result<Option<Slot>, Violation> {
        let Staged { key, wish, .. } = layout.pages[page];
        let asked = self.pending.answered(key, id);
        let Some(slot) = self.take_slot(id, layout, page) else {
            self.counters.refused_full += 1;
            match (asked, self.pool.is_beyond_share(id)) {
                (true, false) => self.pass_over(key),
                // Others may have the page, and room for it.
                (true, true) => self.repeat_news(key),
                (false, _) => {}
            }
            return Ok(None);
        };
        let (line, slot) = match self.pool.publish(id, slot, key, (&service.staging, page)) {
            Publication::New(line) => {
                self.counters.published += 1;
                self.forget_sighting(line);
                (line, slot)
            }
            Publication::Hit { line, twin } => {
                layout.unused.push(slot);
                let wanted = wish == Wish::Series && !self.pool.is_secure();
                let series = (wanted && may_have_series(service))
                    .then(|| self.pool.make_series(id, line, twin))
                    .flatten();
                let known = match series {
                    Some(first) => {
                        service.series += 1;
                        first
                    }
                    None => {
                        self.pool.apply(id, twin, 1)?;
                        twin
                    }
                };
                (line, known)
            }
            Publication::NoPlace => {
                self.counters.refused_full += 1;
                layout.unused.push(slot);
                return Ok(None);
            }
            Publication::Unverified => {
                self.counters.unverified += 1;
                if asked {
                    // It was written meanwhile. Others may still have the page.
                    self.repeat_news(key);
                }
                layout.unused.push(slot);
                return Ok(None);
            }
        };
        if key.is_full() {
            // Whoever knows the page by its hash must find it by that.
            self.pool.mark(line);
            self.forget_sighting(key);
        }
        Ok(Some(slot))
    }

    /// Publishes the pages of a huge page as one; `None`, and nothing has happened, if they have to go one by one.
    fn publish_huge_page(&mut self, id: MemberId, pages: &[Staged], staging: &OwnedFd) -> Option<Vec<u32>> {
        let lines: Vec<Key> = pages.iter().map(|page| page.key).collect();
        let slots = self.pool.publish_huge_page(id, &lines, staging)?;
        for line in lines {
            self.pending.answered(line, id);
            self.forget_sighting(line);
        }
        self.counters.published += slots.len() as u64;
        Some(slots.into_iter().map(Slot::number).collect())
    }

    /// The place of a page, with memory; `None` if the store is full, or as good as full for this member.
    fn take_slot(&mut self, id: MemberId, layout: &mut Layout, page: usize) -> Option<Slot> {
        if let Some(slot) = layout.slot(page) {
            return Some(slot);
        }
        let run = self.pool.allocate_run(id, layout.span(page))?;
        layout.extend(page, run, |part| self.pool.populate(&part));
        layout.slot(page)
    }
}
