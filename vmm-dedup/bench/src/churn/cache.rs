//! A guest's page cache: blocks of memory that hold pages of files, and of which those used longest ago are recycled.

use super::files::Files;
use crate::content::{mix, pick};
use std::collections::VecDeque;

/// Files among which the guests' orders of reading differ.
const WINDOW: usize = 8;
/// One of so many files in the cache is used again in a round; each guest has its own.
const USED_AGAIN: usize = 16;

/// The cache.
#[derive(Debug)]
pub(super) struct Cache {
    guest: usize,
    /// The file that is read next.
    next: usize,
    /// What is in the cache, the least recently used first.
    held: VecDeque<Held>,
}

/// What is in the cache of one file.
#[derive(Debug)]
struct Held {
    /// `None`: blocks that were never used.
    file: Option<usize>,
    /// Blocks, and the pages that they hold; the one to go first is the last. There are some.
    blocks: Vec<(usize, usize)>,
}

impl Cache {
    /// An empty cache.
    pub(super) fn new(guest: usize, blocks: usize) -> Self {
        let unused = Held {
            file: None,
            blocks: (0..blocks).rev().map(|block| (block, 0)).collect(),
        };
        Self {
            guest,
            next: 0,
            held: VecDeque::from([unused]),
        }
    }

    /// Uses some files again, so that they stay.
    pub(super) fn use_some_again(&mut self, round: usize) {
        let guest = self.guest;
        let (again, others): (Vec<Held>, Vec<Held>) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|held| held.file.is_some_and(|file| is_used(guest, round, file)));
        self.held = others.into_iter().chain(again).collect();
    }

    /// Reads the next files, at most so many pages and, if there are any, one file at least: blocks, and the pages that they
    /// hold now.
    pub(super) fn read_next(&mut self, files: &Files, most: usize) -> Vec<(usize, usize)> {
        let (first, mut pages) = (self.next, 0);
        while pages + files.pages(self.next).len() <= most || self.next == first {
            pages += files.pages(self.next).len();
            self.next += 1;
        }
        // The numbers count on when the files begin anew, so all guests end with the same.
        let mut turn: Vec<usize> = (first..self.next).collect();
        turn.sort_by_key(|number| ((number - first) / WINDOW, mix(self.guest << 40 | number)));
        turn.into_iter()
            .flat_map(|number| self.read(files, files.number(number)))
            .collect()
    }

    /// Reads what is not in the cache of a file.
    fn read(&mut self, files: &Files, file: usize) -> Vec<(usize, usize)> {
        let at = self.held.iter().position(|held| held.file == Some(file));
        let mut blocks = at
            .and_then(|at| self.held.remove(at))
            .map_or(Vec::new(), |held| held.blocks);
        let missing: Vec<usize> = files
            .pages(file)
            .filter(|page| !blocks.iter().any(|(_, held)| held == page))
            .collect();
        let mut read = Vec::new();
        for page in missing {
            let Some(block) = self.recycle() else { break };
            read.push((block, page));
        }
        blocks.extend(read.iter().rev());
        if !blocks.is_empty() {
            self.held.push_back(Held {
                file: Some(file),
                blocks,
            });
        }
        read
    }

    fn recycle(&mut self) -> Option<usize> {
        let oldest = self.held.front_mut()?;
        let recycled = oldest.blocks.pop();
        if oldest.blocks.is_empty() {
            self.held.pop_front();
        }
        recycled.map(|(block, _)| block)
    }
}

fn is_used(guest: usize, round: usize, file: usize) -> bool {
    pick(guest << 50 | round << 32 | file, USED_AGAIN) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};

    #[test]
    fn the_file_used_longest_ago_makes_room() {
        let files = Files::of_lengths(&[4; 64]);
        let mut cache = Cache::new(0, 16);
        let mut holds: HashMap<usize, usize> = cache.read_next(&files, 16).into_iter().collect();
        assert_eq!(holds.len(), 16);
        let oldest = cache.held[0].file;
        cache.held.rotate_left(1); // it is used again
        let second = cache.held[0].file;
        holds.extend(cache.read_next(&files, 4));
        let held: HashSet<usize> = holds.values().map(|page| page / 4).collect();
        assert!(held.contains(&oldest.unwrap()) && !held.contains(&second.unwrap()));
        assert_eq!((holds.len(), held.len()), (16, 4));
    }

    #[test]
    fn a_file_that_is_there_is_not_read_again() {
        let files = Files::of_lengths(&[4, 4, 4]);
        let mut cache = Cache::new(0, 16);
        assert_eq!(cache.read_next(&files, 12).len(), 12);
        assert_eq!(cache.read_next(&files, 12), []);
    }

    #[test]
    fn guests_read_the_same_files_in_another_order() {
        let files = Files::of_lengths(&[4; 64]);
        let [one, other] = [0, 1].map(|guest| Cache::new(guest, 128).read_next(&files, 128));
        assert_ne!(one, other);
        let pages = |read: &[(usize, usize)]| read.iter().map(|(_, page)| *page).collect::<HashSet<_>>();
        assert_eq!(pages(&one), pages(&other));
    }
}
