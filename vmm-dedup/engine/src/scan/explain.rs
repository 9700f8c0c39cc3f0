//! What became of which pages, and why: by their states, by the page tables, and by the verdict on those that have a twin.

use crate::error::Error;
use crate::lookup::find::twin;
use crate::memory::hint::Hint;
use crate::memory::layout::Page;
use crate::memory::page_state::{Backing, Known, PageState};
use crate::merge::admission::{Admission, Facts, Obstacle, Verdict};
use crate::merge::swapped::Swapped;
use crate::store::session::Session;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::pagemap::Pagemap;
use std::collections::HashSet;
use std::ops::Range;
use vmm_dedup_protocol::control::Explanation;

/// Explains pages, as of one moment.
pub(super) struct Explainer<'a> {
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
    pub(super) fn add(&mut self, pages: Range<Page>, to: &mut Explanation) -> Result<(), Error> {
        let populated = self.populated(&pages)?;
        let swapped = self
            .swapped
            .out(self.pagemap, self.admission.map.memory(), &pages);
        for page in pages.clone() {
            let populated = populated[(page - pages.start) as usize];
            let swapped = swapped.contains((page - pages.start) as usize);
            *self.class(page, populated, swapped, to) += 1;
        }
        Ok(())
    }

    fn class<'a>(&self, page: Page, populated: bool, swapped: bool, to: &'a mut Explanation) -> &'a mut u64 {
        let map = self.admission.map;
        let PageState { backing, known } = map.state(page);
        match (backing, known) {
            (Backing::Slot(_), _) => &mut to.shared,
            (Backing::Zero, _) => &mut to.zero,
            (Backing::OrphanedSlot(_), _) => &mut to.foreign,
            _ if backing.is_with_packer() => &mut to.packed,
            (Backing::CopiedOnWrite(_) | Backing::OrphanedCopy(_), Known::Pinned(_)) => &mut to.may_be_pinned,
            (Backing::Private, Known::Pinned(_)) => &mut to.pinned,
            (Backing::Private, Known::Nothing) if !populated => &mut to.unpopulated,
            (_, known) => {
                let key = match known {
                    Known::Keyed(key) if backing.is_copied() => Some(key),
                    known => known.candidate(),
                };
                let twin = key.and_then(|key| twin(self.session, page, key));
                let facts = Facts {
                    swapped,
                    deferred: self.deferred.contains(&page),
                    ..Facts::default()
                };
                let verdict = match twin {
                    Some(_) => self.admission.may_merge(page, twin, facts),
                    None => match self.admission.obstacle_to_any(page) {
                        // Nobody has its content, whatever else holds.
                        Some(obstacle) if key.is_none() || obstacle == Obstacle::Guest => {
                            Verdict::Refuse(obstacle)
                        }
                        _ => return without_twin(backing, known, to),
                    },
                };
                match verdict {
                    Verdict::Refuse(Obstacle::Guest) if map.hint(page).has(Hint::NEVER) => &mut to.withheld,
                    verdict => class_of(verdict, to),
                }
            }
        }
    }

    /// Which of some pages of one chunk hold private memory; asked only where the map does not tell.
    fn populated(&mut self, pages: &Range<Page>) -> Result<[bool; CHUNK_PAGES], Error> {
        let unknown = |page: Page| self.admission.map.state(page) == PageState::UNTRACKED;
        if !pages.clone().any(unknown) {
            return Ok([false; CHUNK_PAGES]);
        }
        let range = self.admission.map.memory().addresses(pages);
        let found = self.pagemap.populated(range.clone());
        let found = found.map_err(Error::Pagemap)?;
        Ok(marked(range.start, &found))
    }
}

/// The class of a page of which no twin is known, and which could share its slot if there were one.
fn without_twin(backing: Backing, known: Known, to: &mut Explanation) -> &mut u64 {
    match known {
        _ if backing.is_copied() => &mut to.broken,
        Known::Candidate(_) => &mut to.unique,
        Known::Keyed(_) => &mut to.huge,
        Known::Volatile => &mut to.volatile,
        _ => &mut to.too_new,
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
        Verdict::Refuse(Obstacle::Restless) => &mut to.restless,
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
            (Verdict::Refuse(Obstacle::Restless), "restless"),
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
