//! What the VMM has just read from files into guest memory, as it says itself: a guess at what other VMs hold as well, for guests
//! without an agent.
//!
//! The thread that completes a read makes a note of it. It waits for nobody, allocates nothing and makes no system call. A note for which
//! there is no room is lost, and so is one that meets another thread's for too long: nothing depends on it.

use std::mem;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Notes that wait for the scanning thread.
const ROOM: usize = 1024;
/// How often a thread looks whether another one is done with its note.
const TRIES: usize = 64;

/// Notes that nobody has looked at yet: host addresses.
#[derive(Debug)]
pub(crate) struct Reads {
    notes: Mutex<Vec<Range<usize>>>,
}

impl Reads {
    pub(crate) fn new() -> Self {
        Self {
            notes: Mutex::new(Vec::with_capacity(ROOM)),
        }
    }

    /// A read has just filled these addresses.
    pub(crate) fn note(&self, addresses: Range<usize>) {
        let Some(mut notes) = self.try_lock() else { return };
        // Pieces of one read often follow each other.
        if let Some(last) = notes.last_mut().filter(|last| last.end == addresses.start) {
            last.end = addresses.end;
        } else if notes.len() < ROOM {
            notes.push(addresses);
        }
    }

    /// Takes all notes.
    pub(crate) fn take(&self) -> Vec<Range<usize>> {
        if self.try_lock().is_none_or(|notes| notes.is_empty()) {
            return Vec::new();
        }
        let room = Vec::with_capacity(ROOM);
        let Some(mut notes) = self.try_lock() else {
            return Vec::new();
        };
        mem::replace(&mut *notes, room)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Vec<Range<usize>>>> {
        for _ in 0..TRIES {
            match self.notes.try_lock() {
                Ok(notes) => return Some(notes),
                Err(TryLockError::Poisoned(notes)) => return Some(notes.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_taken_once_and_those_beyond_the_room_are_lost() {
        let reads = Reads::new();
        assert!(reads.take().is_empty());
        reads.note(4096..8192);
        reads.note(8192..12288);
        reads.note(0..10);
        assert_eq!(reads.take(), [4096..12288, 0..10]);
        (0..2 * ROOM).for_each(|note| reads.note(note * 10..note * 10 + 5));
        assert_eq!(reads.take().len(), ROOM);
        assert!(reads.take().is_empty());
    }

    #[test]
    fn who_holds_the_notes_is_not_waited_for() {
        let reads = Reads::new();
        let held = reads.notes.lock().unwrap();
        reads.note(0..4096);
        assert!(reads.take().is_empty());
        drop(held);
        assert!(reads.take().is_empty());
    }
}
