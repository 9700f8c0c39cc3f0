//! What the memory under test holds.
#![allow(unsafe_code)] // the memory under test is mapped and written through raw pointers, since pages come and go

use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::PageWords;

const HUGE: usize = 2 << 20;
/// Pages in a huge page.
pub(crate) const HUGE_PAGES: usize = HUGE / PAGE_SIZE;
const WORDS: usize = PAGE_SIZE / 8;

/// Kinds of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Every second page has four copies, next to each other; the others are unique.
    Scattered,
    /// Stretches of 1 MiB, four copies of each.
    Runs,
    /// Four guests: the same real files in each, then private data.
    Files,
    /// Images of real guests' memory, see `--images`.
    #[value(hide = true)]
    Images,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Scattered => "scattered",
            Kind::Runs => "runs",
            Kind::Files => "files",
            Kind::Images => "images",
        })
    }
}

/// Memory with content, and what each page should hold.
#[derive(Debug)]
pub(crate) struct Area {
    base: usize,
    pages: usize,
    sums: Vec<u64>,
}

impl Area {
    /// Maps and fills `mib` MiB.
    pub(crate) fn fill(kind: Kind, thp: bool, mib: u32, images: &[PathBuf]) -> Result<Self, Failure> {
        let mut area = Self::map(thp, mib)?;
        match kind {
            Kind::Scattered => area.fill_words(|page| if page % 2 == 1 { page / 8 } else { page | 1 << 40 }),
            Kind::Runs => {
                let stretches = area.pages / 256;
                let distinct = (stretches / 4).max(1);
                area.fill_words(|page| ((page / 256 % distinct) << 8) | (page % 256));
            }
            Kind::Files => area.fill_files()?,
            Kind::Images => super::images::fill(images, &mut area)?,
        }
        area.sums = (0..area.pages).map(|page| area.sum(page)).collect();
        Ok(area)
    }

    /// Maps and fills `mib` MiB, of huge pages if `thp`; pages with the same number have the same content.
    pub(crate) fn with_content(thp: bool, mib: u32, id: impl Fn(usize) -> usize) -> Result<Self, Failure> {
        let mut area = Self::map(thp, mib)?;
        area.fill_words(id);
        area.sums = (0..area.pages).map(|page| area.sum(page)).collect();
        Ok(area)
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

    fn fill_words(&mut self, id: impl Fn(usize) -> usize) {
        for page in 0..self.pages {
            let seed = mix(id(page));
            for word in 0..WORDS {
                // SAFETY: inside the area.
                unsafe {
                    self.word(page, word)
                        .write_volatile(seed.wrapping_mul(word as u64 * 2 + 1))
                };
            }
        }
    }

    /// Each quarter of the area: files to three fifths of it, as far as there are files, then private data.
    fn fill_files(&mut self) -> Result<(), Failure> {
        let guest = self.pages / 4;
        let files = read_files(guest * 3 / 5 * PAGE_SIZE)?;
        self.fill_words(|page| page | 1 << 41);
        for copy in 0..4 {
            for (i, page) in files.chunks_exact(PAGE_SIZE).enumerate() {
                self.write(copy * guest + i, page);
            }
        }
        Ok(())
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(page < self.pages && word < WORDS);
        (self.base + page * PAGE_SIZE + word * 8) as *mut u64
    }

    fn sum(&self, page: usize) -> u64 {
        // SAFETY: inside the area.
        let load = |word| unsafe { self.word(page, word).read_volatile() };
        (0..WORDS).fold(0, |sum: u64, word| {
            sum.rotate_left(7) ^ load(word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
    }
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

/// Real files of this machine, each padded to whole pages, as many as fit.
fn read_files(limit: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::with_capacity(limit);
    for path in real_files() {
        let Ok(file) = fs::File::open(&path) else { continue };
        let room = (limit - bytes.len()) as u64;
        if file.take(room).read_to_end(&mut bytes).is_ok() {
            bytes.resize(bytes.len().next_multiple_of(PAGE_SIZE), 0);
        }
        if bytes.len() >= limit {
            bytes.truncate(limit);
            return Ok(bytes);
        }
    }
    if bytes.len() < 16 << 20 {
        return Err(Failure::new(
            "fewer than 16 MiB of shared libraries and locales found under /usr/lib",
        ));
    }
    Ok(bytes)
}

/// Shared libraries and locale archives, in a fixed order.
pub(crate) fn real_files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from("/usr/lib")];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() && is_wanted(&entry.path()) => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

fn is_wanted(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
    name.contains(".so") || name.starts_with("locale-archive") || path.starts_with("/usr/lib/locale")
}

/// A number below `limit` that depends on `n`.
#[allow(clippy::cast_possible_truncation)] // below limit
pub(super) fn pick(n: usize, limit: usize) -> usize {
    (mix(n) % limit as u64) as usize
}

/// SplitMix64.
pub(super) fn mix(n: usize) -> u64 {
    let mut z = (n as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirtying_changes_pages_and_their_sums() {
        let mut area = Area::fill(Kind::Scattered, false, 4, &[]).unwrap();
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

    #[test]
    fn three_of_four_odd_pages_are_copies() {
        let area = Area::fill(Kind::Scattered, false, 4, &[]).unwrap();
        let distinct: std::collections::HashSet<u64> = area.sums.iter().copied().collect();
        assert_eq!(area.pages - distinct.len(), area.pages / 2 * 3 / 4);
    }
}
