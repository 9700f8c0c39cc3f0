//! Compaction: the emptiest segments are emptied into the others.

use super::all::Segments;
use super::place::Place;
use super::segment::Owner;
use super::source::Source;
use crate::class::Class;

/// A cell that has moved. When this is told, its bytes are at the new place, and the old one names them no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Whose it is.
    pub owner: Owner,
    /// Where it was.
    pub from: Place,
    /// Where it is.
    pub to: Place,
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Cells that moved.
    pub moves: u64,
    /// Bytes that were copied.
    pub moved_bytes: u64,
    /// Segments whose memory returned to the source.
    pub released: u64,
}

impl<S: Source> Segments<S> {
    /// Empties segments, the emptiest first, as long as the others have room for all that is in them, and until more than
    /// `most_bytes` were copied. Takes no memory but a buffer of one page. `moved` is told of each cell that moves.
    pub fn compact(&mut self, most_bytes: u64, moved: &mut dyn FnMut(Move)) -> Compacted {
        let before = self.counts;
        let mut buffer = Vec::with_capacity(Class::MOST_BYTES);
        let mut released = 0;
        while self.counts.moved_bytes - before.moved_bytes < most_bytes {
            let Some(victim) = self.emptiest() else {
                break;
            };
            // So that no cell of it finds room in itself.
            self.rooms.remove(victim);
            let emptied = self.empty(victim, &mut buffer, moved);
            self.shelve(victim);
            if !emptied {
                break;
            }
            released += 1;
        }
        Compacted {
            moves: self.counts.moves - before.moves,
            moved_bytes: self.counts.moved_bytes - before.moved_bytes,
            released,
        }
    }

    /// The segment with the fewest bytes taken, if the others have as many free.
    fn emptiest(&self) -> Option<u32> {
        let numbered = || {
            let segments = self.segments.iter().zip(0u32..);
            segments.filter_map(|(segment, number)| Some((segment.as_ref()?, number)))
        };
        let (victim, number) = numbered().min_by_key(|(segment, _)| segment.taken())?;
        let free: usize = numbered().map(|(segment, _)| segment.free()).sum();
        (free - victim.free() >= victim.taken()).then_some(number)
    }

    /// Moves a segment's cells to others; `false` if one of them finds no room.
    fn empty(&mut self, victim: u32, buffer: &mut Vec<u8>, moved: &mut dyn FnMut(Move)) -> bool {
        loop {
            let Some(segment) = self.segment_mut(victim) else {
                return true;
            };
            let Some(cell) = segment.first() else {
                return true;
            };
            buffer.clear();
            buffer.extend_from_slice(segment.get(cell.start).unwrap_or(&[]));
            let Some(to) = self.move_to(victim, buffer, cell.owner, moved) else {
                return false;
            };
            if let Some(segment) = self.segment_mut(victim) {
                segment.remove(cell.start);
            }
            self.counts.moves += 1;
            self.counts.moved_bytes += buffer.len() as u64;
            moved(Move {
                owner: cell.owner,
                from: self.size.join(victim, cell.start),
                to,
            });
        }
    }

    /// Finds room for a cell in another segment, if need be by closing the gaps of one.
    fn move_to(
        &mut self,
        victim: u32,
        bytes: &[u8],
        owner: Owner,
        moved: &mut dyn FnMut(Move),
    ) -> Option<Place> {
        let class = Class::holding(bytes.len())?;
        if let Some(number) = self.rooms.tightest(class) {
            return self.insert(number, bytes, owner);
        }
        let others = self
            .segments
            .iter()
            .zip(0u32..)
            .filter(|(_, number)| *number != victim);
        let others = others.filter_map(|(segment, number)| Some((segment.as_ref()?.free(), number)));
        let (free, number) = others.max()?;
        if free < class.bytes() {
            return None;
        }
        self.close_gaps(number, moved);
        self.insert(number, bytes, owner)
    }

    fn close_gaps(&mut self, number: u32, moved: &mut dyn FnMut(Move)) {
        let (size, mut moves) = (self.size, 0);
        let mut buffer = Vec::with_capacity(Class::MOST_BYTES);
        let Some(segment) = self.segment_mut(number) else {
            return;
        };
        let bytes = segment.slide(&mut buffer, |owner, from, to| {
            moves += 1;
            moved(Move {
                owner,
                from: size.join(number, from),
                to: size.join(number, to),
            });
        });
        self.counts.moves += moves;
        self.counts.moved_bytes += bytes as u64;
        self.shelve(number);
    }
}
