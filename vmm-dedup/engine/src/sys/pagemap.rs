//! PAGEMAP_SCAN: which pages of a range are present, huge, from a file, or written since they were protected.
//! Source: Linux, include/uapi/linux/fs.h and Documentation/admin-guide/mm/pagemap.rst.
#![allow(unsafe_code)] // ioctl

use crate::error::Error;
use crate::seccomp::request::{self, PAGEMAP_SCAN, as_taken};
use crate::sys::inject::{self, Call};
use crate::sys::late_log;
use crate::sys::page_size::{HUGE_SIZE, PAGE_SIZE};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const PATH: &str = "/proc/self/pagemap";
/// Of a mapping whose writes are tracked: mappings of the store are not, and are passed over whole.
const TRACKED: u64 = 1 << 0;
const WRITTEN: u64 = 1 << 1;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const PFNZERO: u64 = 1 << 5;
const HUGE: u64 = 1 << 6;
/// Bits of an entry of the file, 8 bytes a page: it is in memory, of a file (or shared memory), mapped by one only.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_EXCLUSIVE: u64 = 1 << 56;

#[repr(C)]
#[derive(Default)]
struct ScanArgs {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(request::size(PAGEMAP_SCAN) == size_of::<ScanArgs>() && size_of::<PageRegion>() == 24);

/// A stretch of private pages that are not known to be unwritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// Addresses.
    pub(crate) range: Range<usize>,
    /// Mapped by huge pages (which the engine never protects, so they are always listed).
    pub(crate) huge: bool,
}

/// The scanner of this process's page tables.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
    regions: Vec<PageRegion>,
}

impl Pagemap {
    pub(crate) fn open() -> Result<Self, Error> {
        let file = File::open(PATH).map_err(Error::Pagemap)?;
        let mut regions = vec![PageRegion::default(); 512];
        // An empty range asks the kernel for nothing but whether it knows the request.
        match scan(&file, &mut ScanArgs::new(0..0, &mut regions)) {
            Err(e) if e.raw_os_error() == Some(libc::ENOTTY) => {
                Err(Error::KernelLacks("the PAGEMAP_SCAN ioctl (Linux 6.7)"))
            }
            Err(e) => Err(Error::Pagemap(e)),
            Ok(_) => Ok(Self { file, regions }),
        }
    }

    /// Tracked, populated pages that were written since they were protected (or never were), in order. The zero page,
    /// mappings of the store and places never populated are left out. Changes nothing.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn written(&mut self, range: Range<usize>, mut each: impl FnMut(Written)) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let wanted = TRACKED | PRESENT | WRITTEN | PFNZERO;
            let (found, end) = self.scan(at..range.end, wanted, PFNZERO, 0, HUGE)?;
            for region in &self.regions[..found] {
                let range = addresses(region);
                each(Written {
                    range,
                    huge: region.categories & HUGE != 0,
                });
            }
            at = end;
        }
        Ok(())
    }

    /// Stretches of a range that are private copies rather than pages of the store.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn private(&mut self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        self.stretches(range, PRESENT | FILE, FILE)
    }

    /// Stretches of a range that hold anonymous memory which another process, a child, maps as well.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn shared_with_child(&self, range: &Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let mut words = vec![0u8; range.len() / PAGE_SIZE * 8];
        let offset = (range.start / PAGE_SIZE * 8) as u64;
        inject::before(Call::PagemapRead)?;
        self.file.read_exact_at(&mut words, offset)?;
        let mut found: Vec<Range<usize>> = Vec::new();
        for (word, at) in words.chunks_exact(8).zip(range.clone().step_by(PAGE_SIZE)) {
            let word = word
                .iter()
                .rev()
                .fold(0, |word, byte| (word << 8) | u64::from(*byte));
            if word & (ENTRY_PRESENT | ENTRY_FILE | ENTRY_EXCLUSIVE) != ENTRY_PRESENT {
                continue;
            }
            match found.last_mut() {
                Some(last) if last.end == at => last.end += PAGE_SIZE,
                _ => found.push(at..at + PAGE_SIZE),
            }
        }
        Ok(found)
    }

    /// Stretches of a range that hold private memory: not a file's, not the zero page, not swapped out.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn populated(&mut self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let mut found = Vec::new();
        self.each_populated(range, |stretch| found.push(stretch))?;
        Ok(found)
    }

    /// As [`Self::populated`], without a list, so that no memory is asked for. On an error some were named already.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn each_populated(
        &mut self,
        range: Range<usize>,
        each: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        self.each_stretch(range, PRESENT | FILE | PFNZERO, FILE | PFNZERO, each)
    }

    /// As [`Self::private`], in mappings of the store only: what is tracked is passed over whole. A copy that was swapped
    /// out is one. (Not every entry of swap is a page: with managed breaks the kernel keeps the protection of a page of the
    /// store that it has unmapped in such an entry. It says that it is protected, which a copy is not.)
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn copied(&mut self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let (mut at, mut found) = (range.start, Vec::new());
        while at < range.end {
            let any = PRESENT | SWAPPED;
            let (n, end) = self.scan(at..range.end, TRACKED | FILE, TRACKED | FILE, any, any | WRITTEN)?;
            let is_copy = |region: &&PageRegion| region.categories & (PRESENT | WRITTEN) != 0;
            found.extend(self.regions[..n].iter().filter(is_copy).map(addresses));
            at = end;
        }
        Ok(found)
    }

    /// Stretches of anonymous memory that are swapped out. (Or that never were there but are protected, which looks the
    /// same: there is nothing to be had either.)
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn swapped(&mut self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        self.stretches(range, SWAPPED, 0)
    }

    /// Stretches of a range that huge pages map.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn huge(&mut self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        self.stretches(range, PRESENT | HUGE, 0)
    }

    /// Whether one huge page maps the 2 MiB from an address on.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn is_huge(&mut self, at: usize) -> bool {
        let found = self.huge(at..at + HUGE_SIZE).unwrap_or_default();
        found.iter().map(Range::len).sum::<usize>() == HUGE_SIZE
    }

    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    fn stretches(&mut self, range: Range<usize>, mask: u64, inverted: u64) -> io::Result<Vec<Range<usize>>> {
        let mut found = Vec::new();
        self.each_stretch(range, mask, inverted, |stretch| found.push(stretch))?;
        Ok(found)
    }

    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    fn each_stretch(
        &mut self,
        range: Range<usize>,
        mask: u64,
        inverted: u64,
        each: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        let (mut at, mut each) = (range.start, each);
        while at < range.end {
            let (n, end) = self.scan(at..range.end, mask, inverted, 0, PRESENT)?;
            self.regions[..n].iter().map(addresses).for_each(&mut each);
            at = end;
        }
        Ok(())
    }

    /// One request: pages with all bits of `mask`, those in `inverted` counting as set when clear, and with one of `any`,
    /// unless that is 0. Returns the number of regions found and the address up to which the range was walked.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    fn scan(
        &mut self,
        range: Range<usize>,
        mask: u64,
        inverted: u64,
        any: u64,
        returned: u64,
    ) -> io::Result<(usize, usize)> {
        let mut request = ScanArgs {
            category_inverted: inverted,
            category_mask: mask,
            category_anyof_mask: any,
            return_mask: returned,
            ..ScanArgs::new(range.clone(), &mut self.regions)
        };
        let found = scan(&self.file, &mut request).inspect_err(|error| {
            late_log::note(
                "looking at the page tables",
                error,
                "what needed it is done later",
            );
        })?;
        let walked = usize::try_from(request.walk_end).unwrap_or(range.end);
        Ok((
            found.min(self.regions.len()),
            walked.clamp(range.start, range.end),
        ))
    }
}

/// Tells filled places from empty ones. Unlike mincore() it knows of pages that are swapped out.
#[derive(Debug)]
pub(crate) struct Places(File);

impl Places {
    pub(crate) fn open() -> Result<Self, Error> {
        File::open(PATH).map(Self).map_err(Error::Pagemap)
    }

    /// Whether the page at an address is there, in memory or swapped out, or an entry that stands for one.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn filled(&self, at: usize) -> bool {
        let mut region = [PageRegion::default()];
        loop {
            let mut request = ScanArgs {
                category_anyof_mask: PRESENT | SWAPPED,
                ..ScanArgs::new(at..at + PAGE_SIZE, &mut region)
            };
            match scan(&self.0, &mut request) {
                Ok(found) => return found > 0,
                // The kernel lacks memory for the answer (for another reason it does not fail).
                Err(error) => late_log::note("looking at the page tables", &error, "it is tried again"),
            }
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }
}

impl ScanArgs {
    fn new(range: Range<usize>, regions: &mut [PageRegion]) -> Self {
        Self {
            size: size_of::<Self>() as u64,
            start: range.start as u64,
            end: range.end as u64,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            ..Self::default()
        }
    }
}

/// Fills the regions of a request; how many of them.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
fn scan(file: &File, request: &mut ScanArgs) -> io::Result<usize> {
    inject::before(Call::PagemapScan)?;
    // SAFETY: the request is of the size that its constant states; vec points to vec_len regions that are exclusively the
    // caller's for the duration of the call, as only ScanArgs::new makes them.
    let found = unsafe { libc::ioctl(file.as_raw_fd(), as_taken(PAGEMAP_SCAN), &mut *request) };
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}

#[allow(clippy::cast_possible_truncation)] // 64-bit only
fn addresses(region: &PageRegion) -> Range<usize> {
    region.start as usize..region.end as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::bytes;
    use crate::sys::uffd::{Mode, Uffd};
    use crate::sys::vma::{self, Anonymous, map_segment_anywhere};
    use std::os::fd::AsFd;
    use vmm_dedup_trouble::page_out;

    const PAGES: usize = 8;

    /// A private mapping of a file with content, as those of the store.
    struct Shared {
        base: usize,
        _file: std::os::fd::OwnedFd,
    }

    impl Shared {
        fn new() -> Self {
            let (file, content) = vmm_dedup_protocol::mapping::staging_memfd(bytes(PAGES)).unwrap();
            content
                .words()
                .iter()
                .for_each(|word| word.store(7, std::sync::atomic::Ordering::Relaxed));
            let base = map_segment_anywhere(bytes(PAGES), file.as_fd(), 0).unwrap();
            Self { base, _file: file }
        }

        fn range(&self) -> Range<usize> {
            self.base..self.base + bytes(PAGES)
        }

        fn page(&self, page: usize) -> Range<usize> {
            self.base + bytes(page)..self.base + bytes(page + 1)
        }

        #[allow(unsafe_code)] // writes memory of its own
        fn copy(&self, page: usize) {
            // SAFETY: the mapping is the test's own.
            unsafe { crate::sys::guest::store_page(self.base + bytes(page), &[9; 512]) };
        }
    }

    impl Drop for Shared {
        fn drop(&mut self) {
            vma::unmap(self.base, bytes(PAGES));
        }
    }

    #[test]
    fn copies_that_were_swapped_out_are_found() {
        let _swap = vmm_dedup_trouble::swap_or_skip!();
        let shared = Shared::new();
        let mut pagemap = Pagemap::open().unwrap();
        vma::populate_read(shared.base, bytes(PAGES)).unwrap();
        shared.copy(2);
        shared.copy(5);
        assert_eq!(
            pagemap.copied(shared.range()).unwrap(),
            [shared.page(2), shared.page(5)]
        );
        page_out(&shared.range());
        assert!(
            pagemap.private(shared.range()).unwrap().is_empty(),
            "nothing was swapped out"
        );
        assert_eq!(
            pagemap.copied(shared.range()).unwrap(),
            [shared.page(2), shared.page(5)]
        );
    }

    #[test]
    fn protected_pages_of_the_store_that_are_not_mapped_are_no_copies() {
        let Ok(breaker) = Uffd::breaker() else {
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let shared = Shared::new();
        breaker.register(shared.base, bytes(PAGES), Mode::Wp).unwrap();
        breaker.write_protect(shared.base, bytes(PAGES), true).unwrap();
        let mut pagemap = Pagemap::open().unwrap();
        assert!(
            !pagemap.swapped(shared.range()).unwrap().is_empty(),
            "the protection is kept elsewhere"
        );
        assert!(pagemap.copied(shared.range()).unwrap().is_empty());
        vma::populate_read(shared.base, bytes(PAGES)).unwrap();
        assert!(pagemap.copied(shared.range()).unwrap().is_empty());
    }

    #[test]
    fn what_is_swapped_out_is_told() {
        let _swap = vmm_dedup_trouble::swap_or_skip!();
        let area = Anonymous::new(PAGES).unwrap();
        area.populate_part(0, bytes(PAGES - 2)).unwrap();
        let at = |page| area.base() + bytes(page);
        let mut pagemap = Pagemap::open().unwrap();
        assert!(pagemap.swapped(at(0)..at(PAGES)).unwrap().is_empty());
        page_out(&(at(1)..at(3)));
        let out = pagemap.swapped(at(0)..at(PAGES)).unwrap();
        assert!(out.into_iter().eq(std::iter::once(at(1)..at(3))));
        vma::populate_read(at(1), bytes(2)).unwrap();
        assert!(pagemap.swapped(at(0)..at(PAGES)).unwrap().is_empty());
    }
}
