//! What became of which pages, and why: by their states, by the page tables, and by the verdict on those that have a twin.

use crate::error::Error;
use crate::lookup::find::twin;
use crate::memory::hint::Hint;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::{Backing, Known, PageState};
use crate::merge::admission::{Admission, Facts, Obstacle, Verdict};
use crate::merge::swapped::Swapped;
use crate::store::session::Session;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::pagemap::Pagemap;
use std::collections::HashSet;
use std::ops::Range;
use vmm_dedup_protocol::control::Explanation;
use vmm_dedup_protocol::key::Key;

/// Explains pages, as of one moment.
pub(super) struct Explainer<'a> {
    pub(super) map: &'a PageMap,
    pub(super) session: &'a Session,
    pub(super) pagemap: &'a mut Pagemap,
    pub(super) swapped: &'a Swapped,
    pub(super) admission: Admission<'a>,
    /// Pages that wait until their 2 MiB have quiesced.
    pub(super) deferred: HashSet<Page>,
}

impl Explainer<'_> {
    /// Counts some pages of one chunk.
    ///
    /// # Errors
    /// [`Error::Pagemap`].
    pub(super) fn add(
        &mut self,
        chunk: usize,
        pages: Range<Page>,
        to: &mut Explanation,
    ) -> Result<(), Error> {
        let populated = self.populated(&pages)?;
        let swapped = self.swapped.out(self.pagemap, self.map.memory(), &pages);
        for page in pages.clone() {
            let facts = Facts {
                deferred: self.deferred.contains(&page),
                swapped: swapped.contains((page - pages.start) as usize),
            };
            let PageState { backing, known } = self.map.state(page);
            let class = match (backing, known) {
                (Backing::Slot(_), _) => &mut to.shared,
                (Backing::Zero, _) => &mut to.zero,
                (Backing::CopiedOnWrite(_) | Backing::OrphanedCopy(_), known) => match known {
                    Known::Pinned(_) => &mut to.may_be_pinned,
                    Known::Keyed(key) | Known::Candidate(key) => {
                        self.explain_twin(page, key, facts, to, |to| &mut to.broken)
                    }
                    _ if self.admission.heals => &mut to.broken,
                    _ => &mut to.may_be_pinned,
                },
                (Backing::OrphanedSlot(_), _) => &mut to.foreign,
                #[cfg(test)]
                (Backing::Dummy(_), _) => &mut to.waiting,
                (Backing::Private, Known::Pinned(_)) => &mut to.pinned,
                (Backing::Private, Known::Nothing) if !populated[(page - pages.start) as usize] => {
                    &mut to.unpopulated
                }
                (Backing::Private, _) if self.map.rests(page) => self.explain_rest(page, to),
                (Backing::Private, Known::Keyed(_)) => &mut to.huge,
                (Backing::Private, Known::Candidate(key)) => {
                    self.explain_twin(page, key, facts, to, |to| &mut to.unique)
                }
                (Backing::Private, known) => match known {
                    _ if self.map.chunk(chunk).huge => &mut to.huge,
                    _ if self.admission.monitor.probes().include(self.map, chunk, page) => &mut to.probe,
                    Known::Volatile => &mut to.volatile,
                    _ => &mut to.too_new,
                },
            };
            *class += 1;
        }
        Ok(())
    }

    /// The class of a private page that is left alone since the guest says so.
    fn explain_rest<'a>(&self, page: Page, to: &'a mut Explanation) -> &'a mut u64 {
        match self.map.hint(page).has(Hint::NEVER) {
            true => &mut to.withheld,
            false => &mut to.idle,
        }
    }

    /// The class of a page with a known key. If it has a twin, it is the verdict on merging them; else `alone`.
    fn explain_twin<'a>(
        &self,
        page: Page,
        key: Key,
        facts: Facts,
        to: &'a mut Explanation,
        alone: fn(&mut Explanation) -> &mut u64,
    ) -> &'a mut u64 {
        let Some(slot) = twin(self.session, page, key) else {
            return alone(to);
        };
        match self.admission.may_merge(self.map, page, Some(slot), facts) {
            Verdict::Refuse(Obstacle::Guest) => self.explain_rest(page, to),
            verdict => class_of(verdict, to),
        }
    }

    /// Which of some pages of one chunk hold private memory; asked only where the map does not tell.
    fn populated(&mut self, pages: &Range<Page>) -> Result<[bool; CHUNK_PAGES], Error> {
        let unknown = |page: Page| self.map.state(page) == PageState::UNTRACKED;
        if !pages.clone().any(unknown) {
            return Ok([false; CHUNK_PAGES]);
        }
        let range = self.map.memory().addresses(pages);
        let found = self.pagemap.populated(range.clone());
        let found = found.map_err(Error::Pagemap)?;
        Ok(marked(range.start, &found))
    }
}

/// Marks the pages in some stretches, counted from the page at `start`.
fn marked(start: usize, found: &[Range<usize>]) -> [bool; CHUNK_PAGES] {
    let mut marks = [false; CHUNK_PAGES];
    for part in found {
        marks[(part.start - start) / PAGE_SIZE..(part.end - start) / PAGE_SIZE].fill(true);
    }
    marks
}

/// The class of a page that has a twin.
fn class_of(verdict: Verdict, to: &mut Explanation) -> &mut u64 {
    match verdict {
        Verdict::Merge => &mut to.waiting,
        Verdict::Refuse(Obstacle::Suspended) => &mut to.suspended,
        Verdict::Refuse(Obstacle::Changed) => &mut to.shared,
        Verdict::Refuse(Obstacle::MayBePinned) => &mut to.may_be_pinned,
        Verdict::Refuse(Obstacle::Probe) => &mut to.probe,
        Verdict::Refuse(Obstacle::Huge) => &mut to.huge,
        Verdict::Refuse(Obstacle::NoMappings) => &mut to.over_vmas,
        Verdict::Refuse(Obstacle::Deferred) => &mut to.deferred,
        Verdict::Refuse(Obstacle::SwappedOut) => &mut to.swapped,
        Verdict::Refuse(Obstacle::Guest) => &mut to.idle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_class_of_its_own() {
        let classes = [
            (Verdict::Merge, "waiting"),
            (Verdict::Refuse(Obstacle::Suspended), "suspended"),
            (Verdict::Refuse(Obstacle::Changed), "shared"),
            (Verdict::Refuse(Obstacle::MayBePinned), "may_be_pinned"),
            (Verdict::Refuse(Obstacle::Probe), "probe"),
            (Verdict::Refuse(Obstacle::Huge), "huge"),
            (Verdict::Refuse(Obstacle::NoMappings), "over_vmas"),
            (Verdict::Refuse(Obstacle::Deferred), "deferred"),
            (Verdict::Refuse(Obstacle::SwappedOut), "swapped"),
            (Verdict::Refuse(Obstacle::Guest), "idle"),
        ];
        for (verdict, class) in classes {
            let mut explanation = Explanation::default();
            *class_of(verdict, &mut explanation) += 1;
            let counted = explanation.classes().into_iter().filter(|(_, pages)| *pages > 0);
            assert_eq!(Vec::from_iter(counted), [(class, 1)]);
        }
    }
}
