//! The client's memory, as far as it let the device see it.
//!
//! Nothing that a client does to its memory may harm the server. Reading a mapping of a file that was shrunk since
//! kills the reader, so only files that are sealed against that are mapped; others are read with `pread`, line by line,
//! which only fails. Files of other file systems than those of shared memory could make a reader wait for as long as the
//! client likes (FUSE), and are refused.

use crate::memory::{LINE_BYTES, Line, Memory};
use crate::{PPN_BITS, Ppn};
use rustix::fs::{FileType, SealFlags, fcntl_get_seals, fstat, fstatfs};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::PAGE_WORDS;
use vmm_dedup_protocol::mapping::Mapping;

/// Most ranges that a client can map.
const MAX_RANGES: usize = 4096;
/// Most of them that need a descriptor for as long as they are mapped.
const MAX_FILES: usize = 256;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Why a range is not mapped or unmapped.
#[derive(Debug, thiserror::Error)]
pub(super) enum DmaError {
    /// Addresses and sizes are whole pages below 2^52.
    #[error("{size:#x} bytes at {address:#x}, from {offset:#x} of the file, are not whole pages below 2^52")]
    Range {
        /// First byte, as the device addresses it.
        address: u64,
        /// Bytes.
        size: u64,
        /// First byte in the file.
        offset: u64,
    },
    /// Ranges must not overlap.
    #[error("{0:#x} is mapped already: unmap it first")]
    Overlap(u64),
    /// Only what was mapped can be unmapped, range by range.
    #[error("there is no range of {size:#x} bytes at {address:#x}")]
    Missing {
        /// First byte.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// There are limits.
    #[error("too many ranges: {MAX_RANGES} can be mapped, {MAX_FILES} of files that can shrink")]
    TooMany,
    /// The file is not one of shared memory.
    #[error("the file is not a memfd, nor on tmpfs or hugetlbfs: back the client's memory with one that is")]
    Foreign,
    /// The kernel says no.
    #[error("the file cannot be mapped")]
    Io(#[from] io::Error),
}

/// Where a range's pages are.
#[derive(Debug)]
enum Backing {
    /// A file that cannot shrink, mapped from its beginning; the number is that of the range's first page in it.
    Mapped(Mapping, usize),
    /// A file that can; the number is that of the range's first byte in it.
    Read(File, u64),
    /// No file: the device may not read it, but the client may unmap it.
    None,
}

#[derive(Debug)]
struct Range {
    pages: u64,
    backing: Backing,
}

/// All of a client's memory.
#[derive(Debug, Default)]
pub(super) struct DmaMemory {
    ranges: RwLock<BTreeMap<u64, Range>>,
}

impl DmaMemory {
    /// Maps a range of a file, or of nothing.
    ///
    /// # Errors
    /// [`DmaError`]; nothing is mapped then.
    pub(super) fn map(
        &self,
        address: u64,
        size: u64,
        offset: u64,
        file: Option<File>,
    ) -> Result<(), DmaError> {
        let (first, pages) = pages_of(address, size).ok_or(DmaError::Range {
            address,
            size,
            offset,
        })?;
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((start, _)) = overlapping(&ranges, first, pages) {
            return Err(DmaError::Overlap(start * PAGE_SIZE as u64));
        }
        let is_file = |range: &&Range| matches!(range.backing, Backing::Read(..));
        let backing = match file {
            None => Backing::None,
            Some(file) => backing(file, size, offset, address)?,
        };
        let files = ranges.values().filter(is_file).count();
        if ranges.len() >= MAX_RANGES || matches!(backing, Backing::Read(..)) && files >= MAX_FILES {
            return Err(DmaError::TooMany);
        }
        ranges.insert(first, Range { pages, backing });
        Ok(())
    }

    /// The memory as it is now. While somebody has a view nothing is mapped or unmapped: so views are for milliseconds.
    pub(super) fn view(&self) -> DmaView<'_> {
        DmaView(self.ranges.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Unmaps a range that was mapped as such. Nobody reads it any more when this returns.
    ///
    /// # Errors
    /// [`DmaError::Missing`].
    pub(super) fn unmap(&self, address: u64, size: u64) -> Result<(), DmaError> {
        let missing = DmaError::Missing { address, size };
        let Some((first, pages)) = pages_of(address, size) else {
            return Err(missing);
        };
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        match ranges.get(&first) {
            Some(range) if range.pages == pages => {
                ranges.remove(&first);
                Ok(())
            }
            _ => Err(missing),
        }
    }

    /// Unmaps everything.
    pub(super) fn unmap_all(&self) {
        self.ranges
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }
}

/// First page and number of pages.
fn pages_of(address: u64, size: u64) -> Option<(u64, u64)> {
    let page = PAGE_SIZE as u64;
    let whole = address.is_multiple_of(page) && size.is_multiple_of(page) && size > 0;
    let (first, pages) = (address / page, size / page);
    (whole && first.checked_add(pages)? <= 1 << PPN_BITS).then_some((first, pages))
}

fn overlapping(ranges: &BTreeMap<u64, Range>, first: u64, pages: u64) -> Option<(u64, &Range)> {
    let before = ranges.range(..first + pages).next_back()?;
    (before.0 + before.1.pages > first).then_some((*before.0, before.1))
}

fn backing(file: File, size: u64, offset: u64, address: u64) -> Result<Backing, DmaError> {
    let wrong = || DmaError::Range {
        address,
        size,
        offset,
    };
    let end = offset.checked_add(size).ok_or_else(wrong)?;
    let kind = u64::try_from(fstatfs(&file).map_err(io::Error::from)?.f_type).unwrap_or(0);
    let stat = fstat(&file).map_err(io::Error::from)?;
    // Device nodes are on a tmpfs, too.
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !regular || (kind != TMPFS_MAGIC && kind != HUGETLBFS_MAGIC) {
        return Err(DmaError::Foreign);
    }
    let len = u64::try_from(stat.st_size).unwrap_or(0);
    let fixed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let page = PAGE_SIZE as u64;
    match (usize::try_from(end), usize::try_from(offset / page)) {
        (Ok(end), Ok(first))
            if kind == TMPFS_MAGIC && fixed && offset.is_multiple_of(page) && end as u64 <= len =>
        {
            Ok(Backing::Mapped(Mapping::read_only(&file, end)?, first))
        }
        // Reading beyond the end is tried, and fails, when it comes to that.
        _ => Ok(Backing::Read(file, offset)),
    }
}

/// See [`DmaMemory::view`].
#[derive(Debug)]
pub(super) struct DmaView<'a>(RwLockReadGuard<'a, BTreeMap<u64, Range>>);

impl Memory for DmaView<'_> {
    fn line(&self, page: Ppn, line: usize) -> Option<Line> {
        let (first, range) = overlapping(&self.0, page.number(), 1)?;
        let at = page.number() - first;
        match &range.backing {
            Backing::Mapped(map, start) => {
                let first = (start + usize::try_from(at).ok()?) * PAGE_WORDS + line * 8;
                let words = map.words().get(first..first + 8)?;
                Some(std::array::from_fn(|word| words[word].load(Ordering::Relaxed)))
            }
            Backing::Read(file, start) => {
                let offset = start + at * PAGE_SIZE as u64 + (line * LINE_BYTES) as u64;
                let mut bytes = [0; LINE_BYTES];
                file.read_exact_at(&mut bytes, offset).ok()?;
                let word = |word: usize| std::array::from_fn(|byte| bytes[word * 8 + byte]);
                Some(std::array::from_fn(|at| u64::from_ne_bytes(word(at))))
            }
            Backing::None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use vmm_dedup_protocol::mapping::staging_memfd;

    const PAGE: u64 = PAGE_SIZE as u64;

    /// A memfd whose page n is full of bytes n.
    fn file(pages: u8, sealed: bool) -> File {
        let file = if sealed {
            File::from(staging_memfd(usize::from(pages) * PAGE_SIZE).unwrap().0)
        } else {
            File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap())
        };
        for page in 0..pages {
            file.write_all_at(&[page; PAGE_SIZE], u64::from(page) * PAGE)
                .unwrap();
        }
        file
    }

    fn first_byte(memory: &DmaMemory, page: u64) -> Option<u8> {
        let line = memory.view().line(Ppn::try_new(page).unwrap(), 63)?;
        assert!(line.iter().all(|word| *word == line[0]));
        Some(line[0].to_ne_bytes()[0])
    }

    #[test]
    fn sealed_and_other_files_are_read_the_same() {
        for sealed in [true, false] {
            let memory = DmaMemory::default();
            memory
                .map(10 * PAGE, 3 * PAGE, 2 * PAGE, Some(file(5, sealed)))
                .unwrap();
            let read: Vec<_> = (9..14).map(|page| first_byte(&memory, page)).collect();
            assert_eq!(read, [None, Some(2), Some(3), Some(4), None]);
        }
    }

    #[test]
    fn a_file_that_shrinks_gives_faults() {
        let (memory, file) = (DmaMemory::default(), file(4, false));
        memory
            .map(0, 4 * PAGE, 0, Some(file.try_clone().unwrap()))
            .unwrap();
        assert_eq!(first_byte(&memory, 3), Some(3));
        file.set_len(2 * PAGE).unwrap();
        assert_eq!((first_byte(&memory, 1), first_byte(&memory, 3)), (Some(1), None));
    }

    #[test]
    fn a_range_beyond_its_file_gives_faults() {
        for sealed in [true, false] {
            let memory = DmaMemory::default();
            memory.map(0, 100 * PAGE, 0, Some(file(2, sealed))).unwrap();
            assert_eq!((first_byte(&memory, 1), first_byte(&memory, 50)), (Some(1), None));
        }
    }

    #[test]
    fn what_is_not_shared_memory_is_refused() {
        let files = ["/proc/self/maps", "/dev/null"].map(|path| File::open(path).unwrap());
        for file in files {
            let mapped = DmaMemory::default().map(0, PAGE, 0, Some(file));
            assert!(matches!(mapped, Err(DmaError::Foreign)), "{mapped:?}");
        }
    }

    #[test]
    fn ranges_that_lie_are_refused() {
        let memory = DmaMemory::default();
        let wrong = [
            (1, PAGE, 0),
            (0, 1, 0),
            (0, 0, 0),
            (0, u64::MAX, 0),
            (u64::MAX - 4095, PAGE, 0),
        ];
        for (address, size, offset) in wrong {
            let mapped = memory.map(address, size, offset, Some(file(1, true)));
            assert!(matches!(mapped, Err(DmaError::Range { .. })), "{mapped:?}");
        }
        let mapped = memory.map(0, PAGE, u64::MAX, Some(file(1, true)));
        assert!(matches!(mapped, Err(DmaError::Range { .. })), "{mapped:?}");
    }

    #[test]
    fn only_whole_ranges_are_unmapped() {
        let memory = DmaMemory::default();
        memory.map(PAGE, 2 * PAGE, 0, Some(file(2, true))).unwrap();
        for (address, size) in [(PAGE, PAGE), (2 * PAGE, PAGE), (0, 3 * PAGE)] {
            assert!(matches!(
                memory.unmap(address, size),
                Err(DmaError::Missing { .. })
            ));
        }
        memory.unmap(PAGE, 2 * PAGE).unwrap();
        assert_eq!(first_byte(&memory, 1), None);
    }

    #[test]
    fn ranges_without_a_file_cannot_be_read_but_unmapped() {
        let memory = DmaMemory::default();
        memory.map(0, PAGE, 0, None).unwrap();
        assert_eq!(first_byte(&memory, 0), None);
        memory.unmap(0, PAGE).unwrap();
    }

    proptest! {
        #[test]
        fn ranges_never_overlap(steps in proptest::collection::vec((any::<bool>(), 0..16u64, 1..6u64), 1..60)) {
            let memory = DmaMemory::default();
            let mut owners = [None; 32]; // of each page: the range's first page
            for (map, first, pages) in steps {
                let (address, size) = (first * PAGE, pages * PAGE);
                let range = usize::try_from(first).unwrap()..usize::try_from(first + pages).unwrap();
                if map {
                    let free = owners[range.clone()].iter().all(Option::is_none);
                    prop_assert_eq!(memory.map(address, size, 0, None).is_ok(), free);
                    if free {
                        owners[range].fill(Some((first, pages)));
                    }
                } else {
                    let whole = owners[range.clone()].iter().all(|owner| *owner == Some((first, pages)));
                    prop_assert_eq!(memory.unmap(address, size).is_ok(), whole);
                    if whole {
                        owners[range].fill(None);
                    }
                }
            }
        }
    }
}
