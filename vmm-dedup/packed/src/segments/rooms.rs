//! Segments by the largest class that they have a gap for.

use crate::class::Class;

const _: () = assert!(Class::COUNT == u64::BITS as usize);

/// A segment that has no gap for any class, or no memory.
const NOWHERE: u8 = u8::MAX;

/// Lists of segments, one for each class, and which of them are not empty.
#[derive(Debug)]
pub(super) struct Rooms {
    lists: [Vec<u32>; Class::COUNT],
    filled: u64,
    /// Of each segment: its list, and where in it.
    at: Vec<(u8, u32)>,
}

impl Default for Rooms {
    fn default() -> Self {
        Self {
            lists: std::array::from_fn(|_| Vec::new()),
            filled: 0,
            at: Vec::new(),
        }
    }
}

impl Rooms {
    /// Makes room for what is said of a segment later. `false` without memory.
    pub(super) fn reserve(&mut self, number: u32) -> bool {
        let count = number as usize + 1;
        let more = count.saturating_sub(self.at.len());
        if self.at.try_reserve(more).is_err() {
            return false;
        }
        self.at.resize(count.max(self.at.len()), (NOWHERE, 0));
        true
    }

    /// The segment with the smallest room that is enough.
    pub(super) fn tightest(&self, class: Class) -> Option<u32> {
        let enough = self.filled >> class.number() << class.number();
        let list = self.lists.get(enough.trailing_zeros() as usize)?;
        list.last().copied()
    }

    /// What room a segment has now.
    pub(super) fn set(&mut self, number: u32, room: Option<Class>) {
        // There are 64 classes.
        let list = room.and_then(|room| u8::try_from(room.number()).ok());
        let list = list.unwrap_or(NOWHERE);
        if self.at.get(number as usize).is_some_and(|(now, _)| *now == list) {
            return;
        }
        self.remove(number);
        let Some(entries) = self.lists.get_mut(usize::from(list)) else {
            return;
        };
        let Ok(position) = u32::try_from(entries.len()) else {
            return;
        };
        // Without memory for an entry the segment's gaps stay unused until something in it changes.
        if entries.try_reserve(1).is_err() {
            return;
        }
        entries.push(number);
        self.filled |= 1 << list;
        if let Some(at) = self.at.get_mut(number as usize) {
            *at = (list, position);
        }
    }

    /// Takes a segment out.
    pub(super) fn remove(&mut self, number: u32) {
        let Some(at) = self.at.get_mut(number as usize) else {
            return;
        };
        let (list, position) = std::mem::replace(at, (NOWHERE, 0));
        let Some(entries) = self.lists.get_mut(usize::from(list)) else {
            return;
        };
        entries.swap_remove(position as usize);
        if let Some(moved) = entries.get(position as usize) {
            self.at[*moved as usize].1 = position;
        }
        if entries.is_empty() {
            self.filled &= !(1 << list);
        }
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        let entries: usize = self.lists.iter().map(Vec::capacity).sum();
        entries * size_of::<u32>() + self.at.capacity() * size_of::<(u8, u32)>()
    }
}
