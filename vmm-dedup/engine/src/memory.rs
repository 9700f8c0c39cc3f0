//! Guest memory as the engine sees it: host address ranges, cut into chunks of one (possible) huge page each, and
//! numbered page by page.

use crate::error::Error;
use crate::page_size::{HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::proc;
use std::ops::Range;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// A range of this process's memory that is guest RAM. The owner keeps it mapped until the service has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    start: usize,
    len: usize,
    /// Guest physical address, if known.
    guest: Option<u64>,
}

impl HostRange {
    /// `start` and `len` in bytes; both must be multiples of 4 KiB.
    ///
    /// # Errors
    /// [`Error::Unaligned`].
    pub fn try_new(start: usize, len: usize) -> Result<Self, Error> {
        let aligned = start.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && len > 0;
        match start.checked_add(len) {
            Some(_) if aligned => Ok(Self {
                start,
                len,
                guest: None,
            }),
            _ => Err(Error::Unaligned { start, len }),
        }
    }

    /// The same range, with the guest physical address at which the guest sees it. Only explanations need it.
    #[must_use]
    pub fn at_guest_address(self, address: u64) -> Self {
        Self {
            guest: Some(address),
            ..self
        }
    }

    /// The ranges behind a VMM's guest memory.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::NoMemory`].
    pub fn of_guest_memory<M: GuestMemoryBackend>(memory: &M) -> Result<Vec<Self>, Error> {
        let host_range = |region: &M::R| {
            let start = region.get_host_address(vm_memory::MemoryRegionAddress(0));
            let len = usize::try_from(region.len()).unwrap_or(0);
            Self::try_new(start.map_or(0, |p| p as usize), len)
                .map(|range| range.at_guest_address(region.start_addr().0))
        };
        let ranges: Vec<Self> = memory.iter().map(host_range).collect::<Result<_, _>>()?;
        if ranges.is_empty() {
            Err(Error::NoMemory)
        } else {
            Ok(ranges)
        }
    }

    fn addresses(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// A guest page's number: an index into the page table, not a guest frame number.
pub(crate) type Page = u32;

/// Pages that one huge page could map.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    /// Host address of the first page.
    pub(crate) start: usize,
    /// Numbers of the pages; consecutive addresses.
    pub(crate) pages: Range<Page>,
}

impl Chunk {
    pub(crate) fn addresses(&self) -> Range<usize> {
        self.start..self.start + bytes(self.pages.len())
    }
}

/// All guest memory of one service.
#[derive(Debug)]
pub(crate) struct Memory {
    regions: Vec<(Range<usize>, Page)>,
    chunks: Vec<Chunk>,
    pages: usize,
    /// Guest physical addresses and the host address of the first of each, where they are known.
    guest: Vec<(Range<u64>, usize)>,
}

impl Memory {
    /// Checks that the ranges are private anonymous memory and numbers their pages.
    pub(crate) fn new(ranges: &[HostRange]) -> Result<Self, Error> {
        let guest = |r: &HostRange| {
            let start = r.guest?;
            Some((start..start.saturating_add(r.len as u64), r.start))
        };
        let guest = ranges.iter().filter_map(guest).collect();
        let mut ranges: Vec<Range<usize>> = ranges.iter().map(|r| r.addresses()).collect();
        ranges.sort_by_key(|r| r.start);
        if ranges.is_empty() {
            return Err(Error::NoMemory);
        }
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
            return Err(Error::Overlap(pair[1].start));
        }
        ranges.iter().try_for_each(proc::check_private_anonymous)?;
        let total = ranges.iter().map(|r| r.len() / PAGE_SIZE).sum();
        let (mut regions, mut chunks, mut next) = (Vec::new(), Vec::new(), 0);
        for range in ranges {
            let first = next;
            let mut start = range.start;
            while start < range.end {
                let end = ((start / HUGE_SIZE + 1) * HUGE_SIZE).min(range.end);
                let pages =
                    Page::try_from((end - start) / PAGE_SIZE).map_err(|_| Error::TooManyPages(total))?;
                let last = Page::checked_add(next, pages).ok_or(Error::TooManyPages(total))?;
                chunks.push(Chunk {
                    start,
                    pages: next..last,
                });
                (start, next) = (end, last);
            }
            regions.push((range, first));
        }
        Ok(Self {
            regions,
            chunks,
            pages: total,
            guest,
        })
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Chunk of a page. Chunks are in page order.
    pub(crate) fn chunk_of(&self, page: Page) -> usize {
        self.chunks.partition_point(|c| c.pages.end <= page)
    }

    /// Host address of a page.
    pub(crate) fn address(&self, page: Page) -> usize {
        let at = self.regions.partition_point(|(_, first)| *first <= page) - 1;
        let (range, first) = &self.regions[at];
        range.start + bytes((page - first) as usize)
    }

    /// Page at a host address.
    pub(crate) fn page_at(&self, address: usize) -> Option<Page> {
        let at = self
            .regions
            .partition_point(|(range, _)| range.start <= address)
            .checked_sub(1)?;
        let (range, first) = &self.regions[at];
        let offset = Page::try_from((address - range.start) / PAGE_SIZE).ok()?;
        range.contains(&address).then_some(first + offset)
    }

    /// Pages at guest physical addresses; holes of guest memory are passed over. `None` if the VMM did not say where the
    /// guest sees its memory.
    pub(crate) fn pages_at_guest(&self, addresses: &Range<u64>) -> Option<Vec<Range<Page>>> {
        let within = |(guest, host): &(Range<u64>, usize)| {
            let (start, end) = (
                addresses.start.max(guest.start),
                addresses.end.min(guest.end).checked_sub(1)?,
            );
            let page_of = |gpa: u64| {
                let offset = usize::try_from(gpa.checked_sub(guest.start)?).ok()?;
                self.page_at(host + offset)
            };
            (start <= end).then_some(())?;
            Some(page_of(start)?..page_of(end)? + 1)
        };
        (!self.guest.is_empty()).then(|| self.guest.iter().filter_map(within).collect())
    }

    /// Whether two pages with consecutive numbers are neighbours in memory as well.
    pub(crate) fn adjacent(&self, page: Page) -> bool {
        (page as usize) + 1 < self.pages && !self.regions.iter().any(|(_, first)| *first == page + 1)
    }

    /// The regions' addresses.
    pub(crate) fn regions(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.regions.iter().map(|(range, _)| range.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::vma::Anonymous;

    fn range(start: usize, pages: usize) -> HostRange {
        HostRange::try_new(start, bytes(pages)).unwrap()
    }

    #[test]
    fn pages_are_numbered_through_regions() {
        let area = Anonymous::new(3000).unwrap();
        let (a, b) = (area.base(), area.base() + bytes(1200));
        let memory = Memory::new(&[range(b, 600), range(a, 1000)]).unwrap();
        assert_eq!(memory.pages(), 1600);
        assert_eq!(memory.address(999), a + bytes(999));
        assert_eq!(memory.address(1000), b);
        assert_eq!(memory.page_at(b + 5000), Some(1001));
        assert_eq!(memory.page_at(a + bytes(1100)), None);
        assert!(memory.adjacent(998) && !memory.adjacent(999) && !memory.adjacent(1599));
        for (i, chunk) in memory.chunks().iter().enumerate() {
            assert!(chunk.pages.clone().all(|p| memory.chunk_of(p) == i));
            assert_eq!(memory.address(chunk.pages.start), chunk.start);
        }
    }

    #[test]
    fn guest_addresses_lead_to_pages_and_holes_are_passed_over() {
        let area = Anonymous::new(3000).unwrap();
        let (a, b) = (area.base(), area.base() + bytes(1200));
        let low = range(a, 1000).at_guest_address(0x1000);
        let high = range(b, 600).at_guest_address(0x1_0000_0000);
        let memory = Memory::new(&[high, low]).unwrap();
        let pages = |r| -> Vec<(Page, Page)> {
            let ranges = memory.pages_at_guest(&r).unwrap();
            ranges.into_iter().map(|r| (r.start, r.end)).collect()
        };
        assert_eq!(pages(0..u64::MAX), [(1000, 1600), (0, 1000)]);
        assert_eq!(pages(0x1fff..0x2001), [(0, 2)]);
        assert_eq!(pages(0x1_0000_0000..0x1_0000_0001), [(1000, 1001)]);
        assert_eq!(pages(0x1000 + bytes(1000) as u64..0x1_0000_0000), []);
        assert_eq!(pages(0..0x1000), []);
        assert_eq!(
            Memory::new(&[range(a, 10)]).unwrap().pages_at_guest(&(0..1)),
            None
        );
    }

    #[test]
    fn bad_ranges_are_refused() {
        assert!(matches!(
            HostRange::try_new(1, PAGE_SIZE),
            Err(Error::Unaligned { .. })
        ));
        assert!(matches!(
            HostRange::try_new(PAGE_SIZE, 0),
            Err(Error::Unaligned { .. })
        ));
        assert!(matches!(
            HostRange::try_new(usize::MAX - 4095, 4096),
            Err(Error::Unaligned { .. })
        ));
        let area = Anonymous::new(10).unwrap();
        let overlapping = [range(area.base(), 5), range(area.base() + bytes(4), 5)];
        assert!(matches!(Memory::new(&overlapping), Err(Error::Overlap(_))));
    }

    #[test]
    fn shared_memory_is_refused_by_name() {
        let (_file, map) = vmm_dedup_protocol::mapping::staging_memfd(bytes(4)).unwrap();
        let error = Memory::new(&[range(map.address(), 4)]).unwrap_err();
        assert!(error.to_string().contains("shared"), "{error}");
    }
}
