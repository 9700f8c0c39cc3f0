//! The memory under test.
#![allow(unsafe_code)] // the memory under test is mapped and written through raw pointers, since pages come and go

use super::numbers::{mix, pick};
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PageWords, bytes_of};

const HUGE: usize = 2 << 20;
/// Pages in a huge page.
pub(crate) const HUGE_PAGES: usize = HUGE / PAGE_SIZE;
const WORDS: usize = PAGE_SIZE / 8;

/// Memory with content, and what each page should hold.
#[derive(Debug)]
pub(crate) struct Area {
    base: usize,
    pages: usize,
    sums: Vec<u64>,
}

impl Area {
    /// Maps `mib` MiB, of huge pages if `thp`, and lets `fill` write to it what it should hold from now on.
    pub(crate) fn filled(
        thp: bool,
        mib: u32,
        fill: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let mut area = Self::map(thp, mib)?;
        fill(&mut area)?;
        area.sums = (0..area.pages).map(|page| area.sum(page)).collect();
        Ok(area)
    }

    /// The same; pages with the same number have the same content.
    pub(crate) fn with_content(thp: bool, mib: u32, id: impl Fn(usize) -> usize) -> Result<Self, Failure> {
        Self::filled(thp, mib, |area| {
            area.fill_words(id);
            Ok(())
        })
    }

    fn map(thp: bool, mib: u32) -> Result<Self, Failure> {
        let len = (mib as usize) << 20;
        warm_up(len * 2);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, never unmapped: the process ends with the measurement.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len + HUGE,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(Failure::new(format!("cannot map {mib} MiB")));
        }
        let base = (raw as usize).next_multiple_of(HUGE);
        let advice = if thp {
            libc::MADV_HUGEPAGE
        } else {
            libc::MADV_NOHUGEPAGE
        };
        // SAFETY: our own mapping.
        unsafe { libc::madvise(base as *mut _, len, advice) };
        Ok(Self {
            base,
            pages: len / PAGE_SIZE,
            sums: Vec::new(),
        })
    }

    /// Reads a word, and writes the same back if asked to: a write that changes nothing.
    pub(crate) fn touch(&self, page: usize, word: usize, write: bool) -> u64 {
        let word = self.word(page, word);
        // SAFETY: inside the area.
        unsafe {
            let value = word.read_volatile();
            if write {
                word.write_volatile(value);
            }
            value
        }
    }

    pub(crate) fn address(&self) -> usize {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.pages * PAGE_SIZE
    }

    /// Copies a page out.
    pub(crate) fn read(&self, page: usize) -> PageWords {
        // SAFETY: inside the area.
        std::array::from_fn(|word| unsafe { self.word(page, word).read_volatile() })
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Writes a whole page.
    pub(crate) fn write(&mut self, page: usize, content: &[u8]) {
        assert_eq!(content.len(), PAGE_SIZE);
        // SAFETY: inside the area (word checks the page), which nothing refers to.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.word(page, 0).cast(), PAGE_SIZE) };
    }

    /// Writes a whole page, which should hold this from now on; how long the write took.
    pub(crate) fn rewrite(&mut self, page: usize, content: &PageWords) -> Duration {
        let start = Instant::now();
        self.write(page, bytes_of(content));
        let took = start.elapsed();
        self.expect(page, content);
        took
    }

    /// Writes a whole page while others read it; [`Self::expect`] is to be told afterwards.
    pub(crate) fn overwrite(&self, page: usize, content: &PageWords) {
        for (word, value) in content.iter().enumerate() {
            // SAFETY: inside the area.
            unsafe { self.word(page, word).write_volatile(*value) };
        }
    }

    /// What a page should hold from now on.
    pub(crate) fn expect(&mut self, page: usize, content: &PageWords) {
        self.sums[page] = sum(content.iter().copied());
    }

    /// Lets KSM merge the area's pages.
    pub(crate) fn let_ksm_merge(&self) -> Result<(), Failure> {
        // SAFETY: the area's own mapping.
        if unsafe { libc::madvise(self.base as *mut _, self.len(), libc::MADV_MERGEABLE) } < 0 {
            return Err(Failure::new("madvise(MADV_MERGEABLE) failed"));
        }
        Ok(())
    }

    /// Writes one word in each of 1 % of the pages, spread evenly; different pages and words in each round.
    pub(crate) fn dirty(&mut self, round: usize) {
        for n in 0..self.pages / 100 {
            let page = (n * 100 + pick(round * 1_000_003 + n, 100)) % self.pages;
            let word = pick(page + round, WORDS);
            // SAFETY: inside the area.
            unsafe { self.word(page, word).write_volatile(mix(round << 32 | page)) };
            self.sums[page] = self.sum(page);
        }
    }

    /// Pages that do not hold what they should.
    pub(crate) fn wrong(&self) -> usize {
        (0..self.pages)
            .filter(|page| self.sum(*page) != self.sums[*page])
            .count()
    }

    /// Writes all pages; those with the same number get the same content.
    pub(super) fn fill_words(&mut self, id: impl Fn(usize) -> usize) {
        for page in 0..self.pages {
            self.write(page, bytes_of(&words(id(page))));
        }
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(page < self.pages && word < WORDS);
        (self.base + page * PAGE_SIZE + word * 8) as *mut u64
    }

    fn sum(&self, page: usize) -> u64 {
        // SAFETY: inside the area.
        sum((0..WORDS).map(|word| unsafe { self.word(page, word).read_volatile() }))
    }
}

/// What stands for a page's content in the books.
fn sum(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, |sum: u64, word| {
        sum.rotate_left(7) ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

/// Content without a twin but under the same number.
pub(crate) fn words(id: usize) -> PageWords {
    let seed = mix(id);
    std::array::from_fn(|word| seed.wrapping_mul(word as u64 * 2 + 1))
}

/// Touches memory and gives it back. Where this machine is itself a virtual one, its host may back pages only at
/// their first touch, which would be charged to whoever allocates them first.
fn warm_up(len: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    // SAFETY: a new mapping, used by nobody and unmapped at once.
    unsafe {
        let area = libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        if area != libc::MAP_FAILED {
            libc::munmap(area, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirtying_changes_pages_and_their_sums() {
        let mut area = Area::with_content(false, 4, |page| page).unwrap();
        let before = area.sums.clone();
        area.dirty(1);
        assert_eq!(
            area.sums.iter().zip(&before).filter(|(a, b)| a != b).count(),
            area.pages / 100
        );
        assert_eq!(area.wrong(), 0);
        // SAFETY: inside the area.
        unsafe { area.word(5, 5).write_volatile(0) };
        assert_eq!(area.wrong(), 1);
    }
}
