//! The client's memory, as far as it let the device see it.
//!
//! Nothing that a client does to its memory may harm the server. Accessing a mapping of a file that was shrunk since
//! kills who does, so only files that are sealed against that are mapped; others are read and written with `pread` and
//! `pwrite`, which only fail. Files of other file systems than those of shared memory could make a reader wait for as long
//! as the client likes (FUSE), and are refused.
//!
//! A client may map its memory page by page, as guests' IOMMUs do. Each file is opened, or mapped, once all the same.

use rustix::fs::{FileType, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat, fstatfs};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::mapping::Mapping;

/// Most ranges that a client can map.
const MAX_RANGES: usize = 1 << 18;
/// Most files that they are of.
const MAX_FILES: usize = 256;
/// Addresses are below 2 to this power.
const ADDRESS_BITS: u32 = 52;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Why a range is not mapped or unmapped.
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
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
    /// What was mapped as a whole is unmapped as a whole.
    #[error("{size:#x} bytes at {address:#x} begin or end within a range that was mapped: unmap all of it")]
    Part {
        /// First byte.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// There are limits.
    #[error("too many ranges: {MAX_RANGES} can be mapped, of {MAX_FILES} files")]
    TooMany,
    /// The file is not one of shared memory.
    #[error("the file is not a memfd, nor on tmpfs or hugetlbfs: back the client's memory with one that is")]
    Foreign,
    /// The device is to write, and the descriptor does not allow it.
    #[error("the file was opened for reading only, and the device is to write it")]
    ReadOnly,
    /// The kernel says no.
    #[error("the file cannot be mapped")]
    Io(#[from] io::Error),
}

impl From<DmaError> for io::Error {
    fn from(error: DmaError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

/// How the device gets at a file's bytes.
#[derive(Debug)]
enum Opened {
    /// It cannot shrink, and is mapped from its beginning.
    Mapped(Mapping),
    /// It can.
    Called(File),
}

/// A file, and how it was opened: device, inode, for writing, mapped.
type Key = (u64, u64, bool, bool);

#[derive(Debug)]
struct Range {
    pages: u64,
    /// `None` for a range of no file: the device may not access it, but the client may unmap it.
    opened: Option<Arc<Opened>>,
    /// Its first byte in the file.
    offset: u64,
    writable: bool,
}

#[derive(Debug, Default)]
struct Ranges {
    /// By first page.
    all: BTreeMap<u64, Range>,
    files: HashMap<Key, Weak<Opened>>,
}

/// All of a client's memory.
#[derive(Debug, Default)]
pub struct DmaMemory {
    ranges: RwLock<Ranges>,
}

impl DmaMemory {
    /// Maps a range of a file, or of nothing, which the device may read and, if it is `writable`, write.
    ///
    /// # Errors
    /// [`DmaError`]; nothing is mapped then.
    pub fn map(
        &self,
        address: u64,
        size: u64,
        offset: u64,
        file: Option<File>,
        writable: bool,
    ) -> Result<(), DmaError> {
        let wrong = DmaError::Range {
            address,
            size,
            offset,
        };
        let Some(((first, pages), end)) = pages_of(address, size).zip(offset.checked_add(size)) else {
            return Err(wrong);
        };
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((start, _)) = overlapping(&ranges.all, first, pages) {
            return Err(DmaError::Overlap(start * PAGE_SIZE as u64));
        }
        if ranges.all.len() >= MAX_RANGES {
            return Err(DmaError::TooMany);
        }
        let opened = file
            .map(|file| ranges.open(file, offset, end, writable))
            .transpose()?;
        let range = Range {
            pages,
            opened,
            offset,
            writable,
        };
        ranges.all.insert(first, range);
        Ok(())
    }

    /// The memory as it is now. While somebody has a view nothing is mapped or unmapped: so views are for milliseconds.
    pub fn view(&self) -> DmaView<'_> {
        DmaView(self.ranges.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Unmaps all ranges within this one, of which there may be none: a guest's IOMMU that is switched over has all addresses
    /// unmapped, in a few pieces. Nobody accesses them any more when this returns. (So does Linux's VFIO.)
    ///
    /// # Errors
    /// [`DmaError::Range`], [`DmaError::Part`]; nothing is unmapped then.
    pub fn unmap(&self, address: u64, size: u64) -> Result<(), DmaError> {
        let page = PAGE_SIZE as u64;
        if !address.is_multiple_of(page) || !size.is_multiple_of(page) || size == 0 {
            let offset = 0;
            return Err(DmaError::Range {
                address,
                size,
                offset,
            });
        }
        // The last pages of all addresses are nobody's.
        let within = address / page..address.saturating_add(size) / page;
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let is_cut = |at: u64| overlapping(&ranges.all, at, 1).is_some_and(|(first, _)| first < at);
        if is_cut(within.start) || is_cut(within.end) {
            return Err(DmaError::Part { address, size });
        }
        let gone: Vec<u64> = ranges.all.range(within).map(|(first, _)| *first).collect();
        gone.iter().for_each(|first| _ = ranges.all.remove(first));
        Ok(())
    }

    /// Unmaps everything.
    pub fn unmap_all(&self) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.all.clear();
    }
}

impl Ranges {
    /// A file, opened as it has to be; as it is already, if it is.
    fn open(&mut self, file: File, offset: u64, end: u64, writable: bool) -> Result<Arc<Opened>, DmaError> {
        let kind = u64::try_from(fstatfs(&file).map_err(io::Error::from)?.f_type).unwrap_or(0);
        let stat = fstat(&file).map_err(io::Error::from)?;
        // Device nodes are on a tmpfs, too.
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular || (kind != TMPFS_MAGIC && kind != HUGETLBFS_MAGIC) {
            return Err(DmaError::Foreign);
        }
        let access = fcntl_getfl(&file).map_err(io::Error::from)? & OFlags::ACCMODE;
        if access == OFlags::WRONLY || writable && access != OFlags::RDWR {
            return Err(DmaError::ReadOnly);
        }
        let len = u64::try_from(stat.st_size).unwrap_or(0);
        let fixed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let mapped = kind == TMPFS_MAGIC && fixed && offset.is_multiple_of(PAGE_SIZE as u64) && end <= len;
        let key = (stat.st_dev, stat.st_ino, writable, mapped);
        // What is still open keeps the inode, so its number is nobody else's. A file that grew since is mapped anew.
        let known = self.files.get(&key).and_then(Weak::upgrade);
        if let Some(opened) = known.filter(|opened| opened.reaches(end)) {
            return Ok(opened);
        }
        self.files.retain(|_, opened| opened.strong_count() > 0);
        if self.files.len() >= MAX_FILES {
            return Err(DmaError::TooMany);
        }
        let opened = Arc::new(if mapped {
            let whole = usize::try_from(len - len % PAGE_SIZE as u64).unwrap_or(usize::MAX);
            Opened::Mapped(if writable {
                Mapping::read_write(&file, whole)?
            } else {
                Mapping::read_only(&file, whole)?
            })
        } else {
            // Accesses beyond the end are tried, and fail, when it comes to that.
            Opened::Called(file)
        });
        self.files.insert(key, Arc::downgrade(&opened));
        Ok(opened)
    }
}

impl Opened {
    fn reaches(&self, end: u64) -> bool {
        match self {
            Self::Mapped(map) => end <= map.len() as u64,
            Self::Called(_) => true,
        }
    }
}

/// First page and number of pages.
fn pages_of(address: u64, size: u64) -> Option<(u64, u64)> {
    let page = PAGE_SIZE as u64;
    let whole = address.is_multiple_of(page) && size.is_multiple_of(page) && size > 0;
    let (first, pages) = (address / page, size / page);
    (whole && first.checked_add(pages)? <= 1 << (ADDRESS_BITS - 12)).then_some((first, pages))
}

fn overlapping(ranges: &BTreeMap<u64, Range>, first: u64, pages: u64) -> Option<(u64, &Range)> {
    let before = ranges.range(..first + pages).next_back()?;
    (before.0 + before.1.pages > first).then_some((*before.0, before.1))
}

/// See [`DmaMemory::view`]. No access crosses the end of a page.
#[derive(Debug)]
pub struct DmaView<'a>(RwLockReadGuard<'a, Ranges>);

impl DmaView<'_> {
    /// The file of an access, and the offset in it.
    fn place(&self, address: u64, len: usize, write: bool) -> Option<(&Opened, u64)> {
        let page = address / PAGE_SIZE as u64;
        let in_page = address % PAGE_SIZE as u64;
        if page >= 1 << (ADDRESS_BITS - 12) || in_page + len as u64 > PAGE_SIZE as u64 {
            return None;
        }
        let (first, range) = overlapping(&self.0.all, page, 1)?;
        if write && !range.writable {
            return None;
        }
        let offset = range.offset + (page - first) * PAGE_SIZE as u64 + in_page;
        Some((range.opened.as_deref()?, offset))
    }

    /// Reads bytes of a page, word by word in acquire order where the file is mapped. They may be torn if the client writes
    /// meanwhile. `None`, and any content, if the device may not.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        match self.place(address, into.len(), false)? {
            (Opened::Called(file), offset) => file.read_exact_at(into, offset).ok(),
            (Opened::Mapped(map), offset) => {
                let (mut at, mut left) = (usize::try_from(offset).ok()?, into);
                while !left.is_empty() {
                    let (word, byte) = (map.words()[at / 8].load(Ordering::Acquire), at % 8);
                    let len = left.len().min(8 - byte);
                    let (now, rest) = left.split_at_mut(len);
                    now.copy_from_slice(&word.to_ne_bytes()[byte..byte + len]);
                    (at, left) = (at + len, rest);
                }
                Some(())
            }
        }
    }

    /// Reads a line of 64 bytes, at a multiple of that; it may be torn as well.
    #[must_use]
    pub fn line(&self, address: u64) -> Option<[u64; 8]> {
        if let (Opened::Mapped(map), offset) = self.place(address, 64, false)? {
            let first = usize::try_from(offset).ok()? / 8;
            let words = map.words().get(first..first + 8)?;
            return Some(std::array::from_fn(|at| words[at].load(Ordering::Relaxed)));
        }
        let mut bytes = [0; 64];
        self.read(address, &mut bytes)?;
        let word = |word: usize| std::array::from_fn(|byte| bytes[word * 8 + byte]);
        Some(std::array::from_fn(|at| u64::from_ne_bytes(word(at))))
    }

    /// Writes bytes of a page, whole words at once and in release order where the file is mapped. `None` if the device may
    /// not.
    pub fn write(&self, address: u64, from: &[u8]) -> Option<()> {
        match self.place(address, from.len(), true)? {
            (Opened::Called(file), offset) => file.write_all_at(from, offset).ok(),
            (Opened::Mapped(map), offset) => {
                store(map.words(), usize::try_from(offset).ok()?, from);
                Some(())
            }
        }
    }

    /// Whether the device may read, or write, the page of an address.
    #[must_use]
    pub fn is_there(&self, address: u64, write: bool) -> bool {
        match self.place(address, 1, write) {
            Some((Opened::Mapped(_), _)) => true,
            Some((Opened::Called(file), offset)) => file.read_exact_at(&mut [0], offset).is_ok(),
            None => false,
        }
    }
}

/// Writes bytes into words. Of a word that is written in part the other bytes stay, whoever writes them meanwhile.
fn store(words: &[AtomicU64], offset: usize, from: &[u8]) {
    let (mut at, mut left) = (offset, from);
    while !left.is_empty() {
        let (word, byte) = (&words[at / 8], at % 8);
        let (now, rest) = left.split_at(left.len().min(8 - byte));
        if let Ok(whole) = now.try_into() {
            word.store(u64::from_ne_bytes(whole), Ordering::Release);
        } else {
            let change = |before: u64| {
                let mut bytes = before.to_ne_bytes();
                bytes[byte..byte + now.len()].copy_from_slice(now);
                Some(u64::from_ne_bytes(bytes))
            };
            // It always changes.
            let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, change);
        }
        (at, left) = (at + now.len(), rest);
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
        let line = memory.view().line(page * PAGE + 63 * 64)?;
        assert!(line.iter().all(|word| *word == line[0]));
        Some(line[0].to_ne_bytes()[0])
    }

    #[test]
    fn sealed_and_other_files_are_read_the_same() {
        for sealed in [true, false] {
            let memory = DmaMemory::default();
            memory
                .map(10 * PAGE, 3 * PAGE, 2 * PAGE, Some(file(5, sealed)), false)
                .unwrap();
            let read: Vec<_> = (9..14).map(|page| first_byte(&memory, page)).collect();
            assert_eq!(read, [None, Some(2), Some(3), Some(4), None]);
        }
    }

    #[test]
    fn a_file_that_shrinks_gives_faults() {
        let (memory, file) = (DmaMemory::default(), file(4, false));
        memory
            .map(0, 4 * PAGE, 0, Some(file.try_clone().unwrap()), false)
            .unwrap();
        assert_eq!(first_byte(&memory, 3), Some(3));
        file.set_len(2 * PAGE).unwrap();
        assert_eq!((first_byte(&memory, 1), first_byte(&memory, 3)), (Some(1), None));
    }

    #[test]
    fn a_range_beyond_its_file_gives_faults() {
        for sealed in [true, false] {
            let memory = DmaMemory::default();
            memory
                .map(0, 100 * PAGE, 0, Some(file(2, sealed)), false)
                .unwrap();
            assert_eq!((first_byte(&memory, 1), first_byte(&memory, 50)), (Some(1), None));
        }
    }

    #[test]
    fn what_the_device_writes_is_in_the_file_and_nothing_else() {
        for sealed in [true, false] {
            let (memory, file) = (DmaMemory::default(), file(4, sealed));
            let mapped = [(0, true), (1, false)].map(|(page, writable)| {
                memory.map(
                    page * PAGE,
                    PAGE,
                    page * PAGE,
                    Some(file.try_clone().unwrap()),
                    writable,
                )
            });
            assert!(mapped.iter().all(Result::is_ok), "{mapped:?}");
            let view = memory.view();
            assert_eq!(view.write(3, &[9; 10]), Some(()));
            assert_eq!(view.write(PAGE + 3, &[9; 10]), None, "it may only be read");
            assert_eq!(
                view.write(PAGE - 3, &[9; 10]),
                None,
                "no access crosses a page's end"
            );
            let mut bytes = [7; 16];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, [0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0, 0, 0]);
            assert_eq!(view.read(2, &mut bytes[..4]), Some(()));
            assert_eq!(bytes[..4], [0, 9, 9, 9]);
        }
    }

    #[test]
    fn a_file_that_is_mapped_page_by_page_is_opened_once() {
        let memory = DmaMemory::default();
        let file = file(200, true);
        let twice = [(0, true), (200, false)];
        for (page, (first, writable)) in (0..200).flat_map(|page| twice.map(|kind| (page, kind))) {
            let own = file.try_clone().unwrap();
            memory
                .map((first + page) * PAGE, PAGE, page * PAGE, Some(own), writable)
                .unwrap();
        }
        assert_eq!(memory.view().0.files.len(), 2);
        assert_eq!(
            (first_byte(&memory, 150), first_byte(&memory, 350)),
            (Some(150), Some(150))
        );
    }

    #[test]
    fn a_descriptor_for_reading_is_not_written() {
        let file = file(1, true);
        let reader = File::open(format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&file)
        ))
        .unwrap();
        let mapped = DmaMemory::default().map(0, PAGE, 0, Some(reader), true);
        assert!(matches!(mapped, Err(DmaError::ReadOnly)), "{mapped:?}");
    }

    #[test]
    fn what_is_not_shared_memory_is_refused() {
        let files = ["/proc/self/maps", "/dev/null"].map(|path| File::open(path).unwrap());
        for file in files {
            let mapped = DmaMemory::default().map(0, PAGE, 0, Some(file), false);
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
            let mapped = memory.map(address, size, offset, Some(file(1, true)), false);
            assert!(matches!(mapped, Err(DmaError::Range { .. })), "{mapped:?}");
        }
        let mapped = memory.map(0, PAGE, u64::MAX, Some(file(1, true)), false);
        assert!(matches!(mapped, Err(DmaError::Range { .. })), "{mapped:?}");
    }

    #[test]
    fn only_whole_ranges_are_unmapped() {
        let memory = DmaMemory::default();
        memory.map(PAGE, 2 * PAGE, 0, Some(file(2, true)), false).unwrap();
        for (address, size) in [(PAGE, PAGE), (2 * PAGE, PAGE), (0, 2 * PAGE)] {
            let unmapped = memory.unmap(address, size);
            assert!(matches!(unmapped, Err(DmaError::Part { .. })), "{unmapped:?}");
        }
        for (address, size) in [(1, PAGE), (0, 1), (0, 0)] {
            let unmapped = memory.unmap(address, size);
            assert!(matches!(unmapped, Err(DmaError::Range { .. })), "{unmapped:?}");
        }
        assert_eq!(first_byte(&memory, 1), Some(0));
        memory.unmap(PAGE, 2 * PAGE).unwrap();
        assert_eq!(first_byte(&memory, 1), None);
    }

    #[test]
    fn all_ranges_within_one_are_unmapped_and_those_beside_it_stay() {
        let memory = DmaMemory::default();
        for page in [1, 3, 4, 8] {
            memory
                .map(page * PAGE, PAGE, 0, Some(file(1, true)), false)
                .unwrap();
        }
        memory.unmap(2 * PAGE, 6 * PAGE).unwrap();
        let left: Vec<_> = (0..10)
            .filter(|page| first_byte(&memory, *page).is_some())
            .collect();
        assert_eq!(left, [1, 8]);
        memory.unmap(8 * PAGE, u64::MAX - 8 * PAGE - PAGE + 1).unwrap();
        memory.unmap(0, 1 << 63).unwrap();
        assert!(memory.view().0.all.is_empty());
    }

    #[test]
    fn ranges_without_a_file_cannot_be_read_but_unmapped() {
        let memory = DmaMemory::default();
        memory.map(0, PAGE, 0, None, false).unwrap();
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
                    prop_assert_eq!(memory.map(address, size, 0, None, false).is_ok(), free);
                    if free {
                        owners[range].fill(Some((first, pages)));
                    }
                } else {
                    let is_within = |(start, len): (u64, u64)| start >= first && start + len <= first + pages;
                    let whole = owners[range.clone()].iter().flatten().all(|owner| is_within(*owner));
                    prop_assert_eq!(memory.unmap(address, size).is_ok(), whole);
                    if whole {
                        owners[range].fill(None);
                    }
                }
            }
        }
    }
}
