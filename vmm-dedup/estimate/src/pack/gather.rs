//! Where the pages without a twin are, and the index of their lines.

use crate::contents::{Survey, content, is_zero};
use crate::error::Error;
use crate::memory::Memory;
use crate::process::PAGE;
use crate::sample::Sample;
use crate::scan::{Place, Reading, scan};
use vmm_dedup_packed::{LineHashes, LineIndex, Page, Position};
use vmm_dedup_protocol::key::Salt;

/// Nobody prepares collisions for an estimate.
const SALT: Salt = Salt(0);

/// Pages without a twin, numbered from 0 in the order of their memories and addresses.
pub(super) struct Gathered<'a> {
    memories: &'a [Memory],
    /// By number.
    places: Vec<Place>,
    index: LineIndex,
}

impl<'a> Gathered<'a> {
    /// Finds them by two scans.
    pub(super) fn take(memories: &'a [Memory], reading: &Reading<'_>) -> Result<Self, Error> {
        let survey = Survey::take(memories, Sample::ALL, reading)?;
        let unique = survey.unique();
        drop(survey);
        let found = scan(memories, reading, Vec::new, |found, place, page| {
            if !is_zero(page) && unique.contains(&content(page)) {
                // The scan shows whole pages.
                if let Ok(page) = <&Page>::try_from(page) {
                    found.push((place, LineHashes::of(page, SALT)));
                }
            }
        })?;
        drop(unique);
        let mut found: Vec<(Place, LineHashes)> = found.into_iter().flatten().collect();
        found.sort_unstable_by_key(|(place, _)| (place.memory, place.at));
        let pages = found.len();
        let mut index = LineIndex::try_new(pages).ok_or(Error::NoMemory { pages })?;
        for (place, lines) in &found {
            if let Some(position) = position(*place) {
                index.enter(position, *lines);
            }
        }
        Ok(Self {
            memories,
            places: found.into_iter().map(|(place, _)| place).collect(),
            index,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn index(&self) -> &LineIndex {
        &self.index
    }

    /// A page's position; every place of a memory has one.
    pub(super) fn position(&self, number: u32) -> Option<Position> {
        position(self.places[number as usize])
    }

    /// The page at a position, if it has no twin.
    pub(super) fn number(&self, at: Position) -> Option<u32> {
        let key = |place: &Place| (place.memory, place.at / PAGE);
        let found = self.places.binary_search_by_key(&(at.memory(), at.frame()), key);
        u32::try_from(found.ok()?).ok()
    }

    /// Hashes of a page's lines, as the index has them.
    pub(super) fn lines(page: &Page) -> LineHashes {
        LineHashes::of(page, SALT)
    }

    /// Reads a page. `false` if it has gone: a live process gave it up.
    pub(super) fn read(&self, number: u32, page: &mut Page) -> Result<bool, Error> {
        let place = self.places[number as usize];
        let range = place.at..place.at + PAGE;
        let read = self.memories[place.memory as usize].read(std::slice::from_ref(&range), page)?;
        Ok(read == page.len())
    }
}

fn position(place: Place) -> Option<Position> {
    Position::try_new(place.memory, place.at / PAGE)
}
