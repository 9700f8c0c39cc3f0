//! Segments, and what is put into them.

use super::account::{Accounts, Counts};
use super::error::{NoCell, PutError};
use super::place::{Place, SegmentBytes};
use super::rooms::Rooms;
use super::segment::{Owner, Segment};
use super::source::{NoMemory, Source};
use crate::class::Class;

/// Segments of one size, and what is in them.
pub struct Segments<S: Source> {
    source: S,
    pub(super) size: SegmentBytes,
    /// By number; `None`: its memory was given back, and the number is free.
    pub(super) segments: Vec<Option<Segment<S::Memory>>>,
    free_numbers: Vec<u32>,
    /// Segments by the largest class that they have a gap for.
    pub(super) rooms: Rooms,
    pub(super) counts: Counts,
}

impl<S: Source> std::fmt::Debug for Segments<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segments")
            .field("size", &self.size)
            .field("accounts", &self.accounts())
            .finish_non_exhaustive()
    }
}

impl<S: Source> Segments<S> {
    /// None yet; memory is taken from `source` when the first cell comes.
    #[must_use]
    pub fn new(source: S, size: SegmentBytes) -> Self {
        Self {
            source,
            size,
            segments: Vec::new(),
            free_numbers: Vec::new(),
            rooms: Rooms::default(),
            counts: Counts::default(),
        }
    }

    /// Keeps a copy of `bytes` for `owner`.
    ///
    /// # Errors
    /// [`PutError`]; then nothing has changed but the count of refusals.
    pub fn put(&mut self, bytes: &[u8], owner: Owner) -> Result<Place, PutError> {
        let put = self.try_put(bytes, owner);
        match put {
            Ok(_) => self.counts.puts += 1,
            Err(_) => self.counts.refused += 1,
        }
        put
    }

    fn try_put(&mut self, bytes: &[u8], owner: Owner) -> Result<Place, PutError> {
        let length = bytes.len();
        let class = Class::holding(length).ok_or(PutError::TooLong { length })?;
        let place = match self.rooms.tightest(class) {
            Some(number) => self.insert(number, bytes, owner),
            None => None,
        };
        match place {
            Some(place) => Ok(place),
            None => {
                let number = self.grow()?;
                let place = self.insert(number, bytes, owner);
                place.ok_or(self.no_memory())
            }
        }
    }

    /// The bytes at a place.
    ///
    /// # Errors
    /// [`NoCell`] if no cell begins there.
    pub fn get(&self, place: Place) -> Result<&[u8], NoCell> {
        let (segment, start) = self.locate(place)?;
        segment.get(start).ok_or(NoCell(place))
    }

    /// Whose cell a place holds.
    ///
    /// # Errors
    /// [`NoCell`] if no cell begins there.
    pub fn owner(&self, place: Place) -> Result<Owner, NoCell> {
        let (segment, start) = self.locate(place)?;
        segment.owner(start).ok_or(NoCell(place))
    }

    /// Gives up the cell at a place. A segment whose last cell goes returns to the source.
    ///
    /// # Errors
    /// [`NoCell`] if no cell begins there.
    pub fn free(&mut self, place: Place) -> Result<(), NoCell> {
        let (number, start) = self.size.split(place);
        let segment = self.segment_mut(number).ok_or(NoCell(place))?;
        segment.remove(start).ok_or(NoCell(place))?;
        self.counts.frees += 1;
        self.shelve(number);
        Ok(())
    }

    /// The source, for instance to change its limit.
    pub fn source_mut(&mut self) -> &mut S {
        &mut self.source
    }

    /// What there is and what it takes.
    #[must_use]
    pub fn accounts(&self) -> Accounts {
        let mut accounts = Accounts::of(&self.counts);
        for segment in self.segments.iter().flatten() {
            segment.account(&mut accounts);
            accounts.bytes += self.size.bytes() as u64;
        }
        let table = self.segments.capacity() * size_of::<Option<Segment<S::Memory>>>();
        let numbers = self.free_numbers.capacity() * size_of::<u32>();
        accounts.metadata_bytes += (table + numbers + self.rooms.metadata_bytes()) as u64;
        accounts
    }

    fn locate(&self, place: Place) -> Result<(&Segment<S::Memory>, u16), NoCell> {
        let (number, start) = self.size.split(place);
        let segment = self.segments.get(number as usize).and_then(Option::as_ref);
        Ok((segment.ok_or(NoCell(place))?, start))
    }

    pub(super) fn segment_mut(&mut self, number: u32) -> Option<&mut Segment<S::Memory>> {
        self.segments.get_mut(number as usize).and_then(Option::as_mut)
    }

    /// Puts bytes into a segment; `None` if it has no gap for them, or there is no memory for the bookkeeping.
    pub(super) fn insert(&mut self, number: u32, bytes: &[u8], owner: Owner) -> Option<Place> {
        let start = self.segment_mut(number)?.insert(bytes, owner);
        self.shelve(number);
        Some(self.size.join(number, start?))
    }

    /// After a change: a segment without cells returns to the source, any other stands where its room is.
    pub(super) fn shelve(&mut self, number: u32) {
        let Some(segment) = self.segment_mut(number) else {
            return;
        };
        if segment.is_empty() {
            self.rooms.remove(number);
            let slot = self.segments.get_mut(number as usize);
            if let Some(segment) = slot.and_then(Option::take) {
                self.source.give_back(segment.into_memory());
                self.free_numbers.push(number);
            }
        } else {
            let room = segment.room();
            self.rooms.set(number, room);
        }
    }

    /// Takes memory for one more segment, which has no cell yet.
    fn grow(&mut self) -> Result<u32, PutError> {
        let count = self.segments.len();
        let number = match self.free_numbers.last() {
            Some(number) => *number,
            None => {
                let number = u32::try_from(count)
                    .ok()
                    .filter(|n| *n < self.size.most_segments());
                let number = number.ok_or(PutError::NoPlace {
                    segments: count,
                    segment_bytes: self.size.bytes(),
                })?;
                // Whoever gives the number back later needs room for it.
                let table = self.segments.try_reserve(1);
                let numbers = self.free_numbers.try_reserve(count + 1);
                let rooms = self.rooms.reserve(number);
                if table.is_err() || numbers.is_err() || !rooms {
                    return Err(self.no_memory());
                }
                number
            }
        };
        let memory = self.source.take(self.size.bytes());
        let memory = memory.map_err(|NoMemory| self.no_memory())?;
        let segment = Segment::new(memory, self.size);
        match self.segments.get_mut(number as usize) {
            Some(slot) => {
                *slot = Some(segment);
                self.free_numbers.pop();
            }
            None => self.segments.push(Some(segment)),
        }
        Ok(number)
    }

    fn no_memory(&self) -> PutError {
        PutError::NoMemory {
            segment_bytes: self.size.bytes(),
        }
    }
}
