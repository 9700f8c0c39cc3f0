//! Guest memory as the engine sees it: host address ranges, cut into chunks of one (possible) huge page each, and
//! numbered page by page.

use crate::error::Error;
use crate::memory::advice::Advice;
use crate::sys::page_size::{HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::{proc, vma};
use std::ops::Range;
use std::sync::Arc;
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

    /// The same range, with the guest physical address at which the guest sees it: explanations and the guest's agent need it.
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
        let ranges: Vec<Self> = memory
            .iter()
            .map(Self::of_guest_region)
            .collect::<Result<_, _>>()?;
        if ranges.is_empty() {
            Err(Error::NoMemory)
        } else {
            Ok(ranges)
        }
    }

    /// The range behind a region of it.
    ///
    /// # Errors
    /// [`Error::Unaligned`].
    pub fn of_guest_region<R: GuestMemoryRegion>(region: &R) -> Result<Self, Error> {
        let start = region.get_host_address(vm_memory::MemoryRegionAddress(0));
        let len = usize::try_from(region.len()).unwrap_or(0);
        Self::try_new(start.map_or(0, |p| p as usize), len)
            .map(|range| range.at_guest_address(region.start_addr().0))
    }

    /// Where it is in this process.
    #[must_use]
    pub fn addresses(self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Where the guest sees it, if known.
    #[must_use]
    pub fn guest_address(self) -> Option<u64> {
        self.guest
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

/// A range of guest memory and the number of its first page.
#[derive(Clone, Debug)]
struct Region {
    range: Range<usize>,
    first: Page,
    /// Guest physical address of the first page, if known.
    guest: Option<u64>,
    /// What the VMM had advised for it when it was added.
    advice: Arc<Advice>,
    /// Position of its first chunk, set when all chunks are.
    chunk: usize,
}

impl Region {
    fn pages(&self) -> Range<Page> {
        self.first..self.first + page_count(&self.range)
    }
}

/// Pages of a range that was numbered, so that their number fits.
#[allow(clippy::cast_possible_truncation)] // checked when the region was added
fn page_count(range: &Range<usize>) -> Page {
    (range.len() / PAGE_SIZE) as Page
}

/// All guest memory of one service. It is replaced as a whole when ranges come or go; pages that stay keep their
/// numbers, and numbers of pages that went are given out again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// By page number.
    regions: Vec<Region>,
    /// Positions in `regions`, by address.
    by_address: Vec<usize>,
    chunks: Vec<Chunk>,
}

impl Memory {
    /// Checks that the ranges are private anonymous memory and numbers their pages.
    pub(crate) fn new(ranges: &[HostRange]) -> Result<Self, Error> {
        let mut ranges = ranges.to_vec();
        ranges.sort_by_key(|r| r.start);
        if ranges.is_empty() {
            return Err(Error::NoMemory);
        }
        ranges
            .into_iter()
            .try_fold(Self::default(), |memory, range| memory.with(range))
    }

    /// This memory and one range more, which is checked.
    pub(crate) fn with(&self, range: HostRange) -> Result<Self, Error> {
        let (range, guest) = (range.addresses(), range.guest);
        if let Some(other) = self
            .regions()
            .find(|r| r.start < range.end && range.start < r.end)
        {
            return Err(Error::Overlap(range.start.max(other.start)));
        }
        proc::check_private_anonymous(&range)?;
        let too_many = Error::TooManyPages(self.pages() + range.len() / PAGE_SIZE);
        let Ok(pages) = Page::try_from(range.len() / PAGE_SIZE) else {
            return Err(too_many);
        };
        let mut first: Page = 0;
        for region in &self.regions {
            if region.first - first >= pages {
                break;
            }
            first = region.pages().end;
        }
        if first.checked_add(pages).is_none() {
            return Err(too_many);
        }
        let mut regions = self.regions.clone();
        let advice = Arc::new(Advice::of(&range)?);
        regions.push(Region {
            range,
            first,
            guest,
            advice,
            chunk: 0,
        });
        Ok(Self::assemble(regions))
    }

    /// Memory at made-up addresses, for tests that touch none of it.
    #[cfg(test)]
    pub(crate) fn made_up(ranges: &[Range<usize>]) -> Self {
        let mut first = 0;
        let regions = ranges.iter().map(|range| {
            let region = Region {
                range: range.clone(),
                first,
                guest: None,
                advice: Arc::new(Advice::none()),
                chunk: 0,
            };
            first = region.pages().end;
            region
        });
        Self::assemble(regions.collect())
    }

    /// This memory without a range.
    pub(crate) fn without(&self, gone: &Range<usize>) -> Self {
        let mut regions = Vec::with_capacity(self.regions.len() + 1);
        for region in &self.regions {
            let Region {
                range,
                first,
                guest,
                advice,
                ..
            } = region;
            let before = range.start..range.end.min(gone.start).max(range.start);
            let behind = range.start.max(gone.end).min(range.end)..range.end;
            let offset = page_count(&(range.start..behind.start));
            if gone.end <= range.start || range.end <= gone.start {
                regions.push(region.clone());
                continue;
            }
            regions.push(Region {
                range: before,
                first: *first,
                guest: *guest,
                advice: advice.clone(),
                chunk: 0,
            });
            regions.push(Region {
                first: first + offset,
                guest: guest.map(|address| address.saturating_add((behind.start - range.start) as u64)),
                range: behind,
                advice: advice.clone(),
                chunk: 0,
            });
        }
        regions.retain(|r| !r.range.is_empty());
        Self::assemble(regions)
    }

    fn assemble(mut regions: Vec<Region>) -> Self {
        regions.sort_by_key(|r| r.first);
        let mut by_address: Vec<usize> = (0..regions.len()).collect();
        by_address.sort_by_key(|at| regions[*at].range.start);
        let mut chunks = Vec::new();
        for region in &mut regions {
            region.chunk = chunks.len();
            let (mut start, mut next) = (region.range.start, region.first);
            while start < region.range.end {
                let end = ((start / HUGE_SIZE + 1) * HUGE_SIZE).min(region.range.end);
                let last = next + page_count(&(start..end));
                chunks.push(Chunk {
                    start,
                    pages: next..last,
                });
                (start, next) = (end, last);
            }
        }
        Self {
            regions,
            by_address,
            chunks,
        }
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.regions().map(|r| r.len() / PAGE_SIZE).sum()
    }

    /// The number behind the last page's; some below it may be unused.
    pub(crate) fn end(&self) -> usize {
        self.regions.last().map_or(0, |r| r.pages().end as usize)
    }

    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Chunk of a page. Chunks are in page order; a number that is unused has the next page's.
    #[inline]
    pub(crate) fn chunk_of(&self, page: Page) -> usize {
        let Some(region) = self.region_of(page) else {
            return self.chunks.partition_point(|c| c.pages.end <= page);
        };
        let address = region.range.start + bytes((page - region.first) as usize);
        region.chunk + address / HUGE_SIZE - region.range.start / HUGE_SIZE
    }

    /// Items in page order, those of each chunk together, with its position. Who has an unused number is alone.
    pub(crate) fn by_chunk<'i, T>(
        &'i self,
        mut items: &'i [T],
        page: impl Fn(&T) -> Page + 'i,
    ) -> impl Iterator<Item = (usize, &'i [T])> {
        std::iter::from_fn(move || {
            let chunk = self.chunk_of(page(items.first()?));
            let pages = self.chunks.get(chunk).map_or(0..0, |chunk| chunk.pages.clone());
            let here = items.iter().take_while(|item| pages.contains(&page(item)));
            let (group, rest) = items.split_at(here.count().max(1));
            items = rest;
            Some((chunk, group))
        })
    }

    #[inline]
    fn region_of(&self, page: Page) -> Option<&Region> {
        let at = self.regions.partition_point(|r| r.first <= page).checked_sub(1)?;
        Some(&self.regions[at]).filter(|r| r.pages().contains(&page))
    }

    /// Whether there is a page of this number.
    pub(crate) fn has(&self, page: Page) -> bool {
        self.region_of(page).is_some()
    }

    /// Host address of a page that there is.
    #[inline]
    pub(crate) fn address(&self, page: Page) -> usize {
        let at = self.regions.partition_point(|r| r.first <= page) - 1;
        let Region { range, first, .. } = &self.regions[at];
        range.start + bytes((page - first) as usize)
    }

    /// Host addresses of neighbours in one region.
    pub(crate) fn addresses(&self, pages: &Range<Page>) -> Range<usize> {
        let start = self.address(pages.start);
        start..start + bytes(pages.len())
    }

    /// Where the guest sees neighbours in one region; `None` if the VMM did not say.
    #[cfg(feature = "agent")] // nobody else asks
    pub(crate) fn guest_addresses(&self, pages: &Range<Page>) -> Option<Range<u64>> {
        let region = self.region_of(pages.start)?;
        let start = region.guest? + bytes((pages.start - region.first) as usize) as u64;
        Some(start..start + bytes(pages.len()) as u64)
    }

    /// Page at a host address.
    pub(crate) fn page_at(&self, address: usize) -> Option<Page> {
        let at = self
            .by_address
            .partition_point(|at| self.regions[*at].range.start <= address)
            .checked_sub(1)?;
        let Region { range, first, .. } = &self.regions[self.by_address[at]];
        let offset = Page::try_from((address - range.start) / PAGE_SIZE).ok()?;
        range.contains(&address).then_some(first + offset)
    }

    /// Pages at guest physical addresses; holes of guest memory are passed over. `None` if the VMM did not say where the
    /// guest sees its memory.
    pub(crate) fn pages_at_guest(&self, addresses: &Range<u64>) -> Option<Vec<Range<Page>>> {
        let is_known = self.regions.iter().any(|region| region.guest.is_some());
        is_known.then(|| self.parts_at_guest(addresses).map(|(_, pages)| pages).collect())
    }

    /// The same, with the guest physical address in each range's first page.
    pub(crate) fn parts_at_guest(&self, addresses: &Range<u64>) -> impl Iterator<Item = (u64, Range<Page>)> {
        let known = self.regions.iter().filter_map(|r| Some((r, r.guest?)));
        let within = move |(region, guest): (&Region, u64)| {
            let page_of = |address: u64| {
                let page = usize::try_from(address.checked_sub(guest)?).ok()? / PAGE_SIZE;
                Some(region.first + Page::try_from(page).ok()?)
            };
            let (start, end) = (
                addresses.start.max(guest),
                addresses.end.min(guest.saturating_add(region.range.len() as u64)),
            );
            (start < end).then_some(())?;
            Some((start, page_of(start)?..page_of(end - 1)? + 1))
        };
        known.filter_map(within)
    }

    /// The guest physical address behind the last page; 0 if the VMM did not say where the guest sees its memory.
    pub(crate) fn guest_end(&self) -> u64 {
        let ends = self.regions.iter().filter_map(|region| {
            let guest = region.guest?;
            Some(guest.saturating_add(region.range.len() as u64))
        });
        ends.max().unwrap_or(0)
    }

    /// Whether two pages with consecutive numbers are neighbours in memory as well.
    pub(crate) fn adjacent(&self, page: Page) -> bool {
        self.region_of(page).is_some_and(|r| page + 1 < r.pages().end)
    }

    /// Whether the numbers before and behind a page are those of its neighbours in memory.
    #[inline]
    pub(crate) fn neighbours(&self, page: Page) -> (bool, bool) {
        self.region_of(page).map_or((false, false), |region| {
            let pages = region.pages();
            (page > pages.start, page + 1 < pages.end)
        })
    }

    /// Guest memory was replaced by fresh anonymous memory: whatever madvise was told of it holds again.
    pub(crate) fn advise_again(&self, renewed: &Range<usize>) {
        self.advise_copy(renewed, renewed.start);
    }

    /// Anonymous memory at `copy` is about to get the place of guest memory: whatever madvise was told of that holds for it.
    pub(crate) fn advise_copy(&self, range: &Range<usize>, copy: usize) {
        if let Some(region) = self.regions.iter().find(|r| r.range.contains(&range.start)) {
            region.advice.give(range, copy);
        }
    }

    /// Guest memory was replaced by mappings of the store, here and there in a range: they stay out of core dumps and children
    /// as the guest's memory does. One call for a window costs half of what one for each mapping does, and neighbouring
    /// mappings of the store become one again by it.
    pub(crate) fn advise_mapped(&self, range: &Range<usize>) {
        if let Some(region) = self.regions.iter().find(|r| r.range.contains(&range.start)) {
            region.advice.give_mapped(range);
        }
    }

    /// From now on no child is to have guest memory.
    pub(crate) fn keep_from_children(&self) {
        for region in &self.regions {
            if region.advice.keep_from_children() {
                vma::advise_again(&region.range, libc::MADV_DONTFORK);
            }
        }
    }

    /// The regions' addresses.
    pub(crate) fn regions(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.regions.iter().map(|r| r.range.clone())
    }

    /// The parts of a range of numbers that there are pages for.
    pub(crate) fn existing(&self, pages: Range<Page>) -> Vec<Range<Page>> {
        let parts = self.regions.iter().map(|r| {
            let there = r.pages();
            pages.start.max(there.start)..pages.end.min(there.end)
        });
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// The parts of a range that are guest memory, with their pages.
    pub(crate) fn within(&self, range: &Range<usize>) -> Vec<Range<Page>> {
        let parts = self.regions.iter().filter_map(|r| {
            let part = range.start.max(r.range.start)..range.end.min(r.range.end);
            (!part.is_empty()).then(|| {
                let from = r.first + page_count(&(r.range.start..part.start));
                from..from + page_count(&part)
            })
        });
        parts.collect()
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
        assert_eq!(pages(0..u64::MAX), [(0, 1000), (1000, 1600)]);
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
    fn ranges_come_and_go_and_the_rest_keeps_its_numbers() {
        let area = Anonymous::new(4000).unwrap();
        let at = |page: usize| area.base() + bytes(page);
        let memory = Memory::new(&[range(at(0), 1000), range(at(2000), 500)]).unwrap();
        let memory = memory.without(&(at(100)..at(300)));
        assert_eq!((memory.pages(), memory.end()), (1300, 1500));
        assert_eq!(memory.page_at(at(99)), Some(99));
        assert_eq!(memory.page_at(at(100)), None);
        assert_eq!(memory.page_at(at(300)), Some(300));
        assert!(!memory.has(250) && !memory.adjacent(99) && memory.adjacent(300));
        // What fits goes into the gap, the rest behind the end.
        let memory = memory
            .with(HostRange::try_new(at(3000), bytes(200)).unwrap())
            .unwrap();
        let memory = memory
            .with(HostRange::try_new(at(3500), bytes(201)).unwrap())
            .unwrap();
        assert_eq!(memory.page_at(at(3000)), Some(100));
        assert_eq!(memory.page_at(at(3500)), Some(1500));
        assert_eq!(memory.address(299), at(3199));
        assert_eq!(
            memory.within(&(at(0)..at(3001))),
            [0..100, 100..101, 300..1000, 1000..1500]
        );
        for (i, chunk) in memory.chunks().iter().enumerate() {
            assert!(chunk.pages.clone().all(|p| memory.chunk_of(p) == i));
            assert_eq!(memory.address(chunk.pages.start), chunk.start);
        }
        let empty = memory.without(&(0..usize::MAX));
        assert_eq!((empty.pages(), empty.end(), empty.chunks().len()), (0, 0, 0));
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
