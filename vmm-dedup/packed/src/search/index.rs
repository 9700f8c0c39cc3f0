//! The index of single lines: which pages have a line.

use crate::page::{LINE_BYTES, Page};
use twox_hash::XxHash3_64;
use vmm_dedup_protocol::key::{Salt, line_offsets};

/// Lines of a page that are indexed.
const KEYED_LINES: usize = 4;
/// Entries of a bucket: half a cache line.
const WAYS: usize = 4;
/// Frames are numbered in so many bits: addresses of 56 bits.
const FRAME_BITS: u32 = 44;

/// Where a page is: which memory, and which frame of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(u64);

impl Position {
    /// The page of a frame; `None` if the memory's number (20 bits) or the frame's (44) is too large.
    #[must_use]
    pub fn try_new(memory: u32, frame: u64) -> Option<Self> {
        let fits = u64::from(memory) >> (u64::BITS - FRAME_BITS) == 0 && frame >> FRAME_BITS == 0;
        fits.then_some(Self(u64::from(memory) << FRAME_BITS | frame))
    }

    /// Which memory.
    #[must_use]
    pub fn memory(self) -> u32 {
        // 20 bits are left.
        #[allow(clippy::cast_possible_truncation)]
        let memory = (self.0 >> FRAME_BITS) as u32;
        memory
    }

    /// Which frame of it.
    #[must_use]
    pub fn frame(self) -> u64 {
        self.0 & ((1 << FRAME_BITS) - 1)
    }

    /// So many frames further in the same memory.
    #[must_use]
    pub fn further(self, frames: u64) -> Option<Self> {
        Self::try_new(self.memory(), self.frame().checked_add(frames)?)
    }
}

/// Hashes of the four lines that line keys read; 0 for a line of zeros, which says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineHashes([u32; KEYED_LINES]);

impl LineHashes {
    /// Hashes a page's lines with the secret of its trust domain, each by itself and together with its place.
    #[must_use]
    pub fn of(page: &Page, salt: Salt) -> Self {
        let mut hashes = [0; KEYED_LINES];
        for ((hash, offset), place) in hashes.iter_mut().zip(line_offsets()).zip(0u64..) {
            let line = &page[offset..][..LINE_BYTES];
            if line.iter().any(|byte| *byte != 0) {
                // Half of a hash is a hash.
                #[allow(clippy::cast_possible_truncation)]
                let half = XxHash3_64::oneshot_with_seed(salt.0.wrapping_add(place), line) as u32;
                *hash = half.max(1);
            }
        }
        Self(hashes)
    }

    fn present(self) -> impl Iterator<Item = u32> {
        self.0.into_iter().filter(|hash| *hash != 0)
    }
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// 0: none.
    hash: u32,
    /// In `positions`.
    page: u32,
}

const _: () = assert!(size_of::<[Entry; WAYS]>() == 32);

/// Which pages have a line, for a fixed number of pages: 24 bytes for each.
pub struct LineIndex {
    buckets: Box<[[Entry; WAYS]]>,
    /// Of the pages that were entered last, in a ring.
    positions: Box<[Position]>,
    /// Pages entered.
    entered: u64,
    /// Entries that pushed another one out.
    pushed_out: u64,
}

impl std::fmt::Debug for LineIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LineIndex")
            .field("entered", &self.entered)
            .field("pushed_out", &self.pushed_out)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl LineIndex {
    /// An index for so many pages, at least one. `None` without memory for it, or for 2^32 pages and more.
    #[must_use]
    pub fn try_new(pages: usize) -> Option<Self> {
        let pages = pages.max(1);
        u32::try_from(pages).ok()?;
        // An entry for every second line. More find hardly more, since most bases come by the neighbour, and cost more than
        // they bring.
        let buckets = (pages * KEYED_LINES).div_ceil(2 * WAYS);
        Some(Self {
            buckets: filled(buckets, [Entry::default(); WAYS])?,
            positions: filled(pages, Position(0))?,
            entered: 0,
            pushed_out: 0,
        })
    }

    /// Its size in bytes, which never changes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.buckets) + size_of_val(&*self.positions)
    }

    /// Entries that pushed out another one.
    #[must_use]
    pub fn pushed_out(&self) -> u64 {
        self.pushed_out
    }

    fn bucket(&self, hash: u32) -> usize {
        // The hash as a fraction of all buckets.
        let bucket = (u64::from(hash) * self.buckets.len() as u64) >> u32::BITS;
        usize::try_from(bucket).unwrap_or(0)
    }

    /// Enters a page. Once as many as the index is made for were entered, the oldest is forgotten for it.
    pub fn enter(&mut self, at: Position, lines: LineHashes) {
        let count = self.positions.len() as u64;
        let Ok(page) = u32::try_from(self.entered % count) else {
            return;
        };
        self.entered += 1;
        self.positions[page as usize] = at;
        for hash in lines.present() {
            let bucket = self.bucket(hash);
            let entries = &mut self.buckets[bucket];
            let free = entries.iter().position(|entry| entry.hash == 0);
            let way = free.unwrap_or_else(|| {
                self.pushed_out += 1;
                // Any of them, so that none stays for ever.
                page as usize % WAYS
            });
            entries[way] = Entry { hash, page };
        }
    }

    /// Where pages are that have one of the lines, as far as the index knows, once for each line: at most four a line. What
    /// they hold may have changed since.
    pub fn look_up(&self, lines: LineHashes) -> impl Iterator<Item = Position> {
        lines.present().flat_map(move |hash| {
            let entries = self.buckets[self.bucket(hash)].iter();
            let same = entries.filter(move |entry| entry.hash == hash);
            same.map(|entry| self.positions[entry.page as usize])
        })
    }
}

/// A slice of one value; `None` without memory.
fn filled<T: Clone>(length: usize, value: T) -> Option<Box<[T]>> {
    let mut all = Vec::new();
    all.try_reserve_exact(length).ok()?;
    all.resize(length, value);
    Some(all.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{near_copy, random, text};
    use crate::page::ZERO_PAGE;

    const SALT: Salt = Salt(7);

    fn at(memory: u32, frame: u64) -> Position {
        Position::try_new(memory, frame).unwrap()
    }

    #[test]
    fn positions_keep_memory_and_frame() {
        let position = at(1023, (1 << 44) - 1);
        assert_eq!((position.memory(), position.frame()), (1023, (1 << 44) - 1));
        assert_eq!(position.further(1), None);
        assert_eq!(at(1, 5).further(3), Some(at(1, 8)));
        assert_eq!(Position::try_new(1 << 20, 0), None);
        assert_eq!(Position::try_new(0, 1 << 44), None);
    }

    #[test]
    fn pages_with_a_line_are_found_by_it_and_zero_lines_say_nothing() {
        let mut index = LineIndex::try_new(10).unwrap();
        let page = random(1);
        // All but the last of its four lines differ.
        let mut other = near_copy(&page, 64, 2);
        let last = line_offsets()[3];
        other[last..][..64].copy_from_slice(&page[last..][..64]);

        index.enter(at(0, 1), LineHashes::of(&page, SALT));
        index.enter(at(0, 2), LineHashes::of(&ZERO_PAGE, SALT));

        let found: Vec<Position> = index.look_up(LineHashes::of(&other, SALT)).collect();
        assert_eq!(found, [at(0, 1)]);
        assert_eq!(index.look_up(LineHashes::of(&ZERO_PAGE, SALT)).count(), 0);
        assert_eq!(index.look_up(LineHashes::of(&random(3), SALT)).count(), 0);
    }

    #[test]
    fn most_pages_are_found_in_a_full_index() {
        const PAGES: u32 = 3000;
        let mut index = LineIndex::try_new(PAGES as usize).unwrap();
        for n in 0..u64::from(PAGES) {
            index.enter(at(0, n), LineHashes::of(&random(n), SALT));
        }
        let found = |n: u64| {
            let lines = LineHashes::of(&random(n), SALT);
            index.look_up(lines).any(|position| position == at(0, n))
        };
        let pages = u64::from(PAGES);
        // Half of the entries are left, so that one page in sixteen has none of its four.
        assert!((0..pages).filter(|n| found(*n)).count() as u64 > pages * 8 / 10);
        assert!(
            index.pushed_out() > pages && index.pushed_out() < 3 * pages,
            "{index:?}"
        );
        assert!(index.bytes() as u64 <= pages * 24 + 32);
    }

    #[test]
    fn its_size_stays_whatever_is_entered() {
        let mut index = LineIndex::try_new(8).unwrap();
        let bytes = index.bytes();
        for n in 0..1000 {
            index.enter(at(0, n), LineHashes::of(&text(n), SALT));
        }
        assert_eq!(index.bytes(), bytes);
        let lines = LineHashes::of(&text(999), SALT);
        assert!(index.look_up(lines).any(|position| position == at(0, 999)));
        assert!(index.look_up(lines).all(|position| position.frame() >= 992));
    }
}
