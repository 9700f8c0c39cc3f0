//! Memory for copies of shared pages that are made private, had before anything is frozen: who waits for one of them, or for the
//! fault thread, must not wait for reclaim or for a disk as well.

use crate::memory::ranges::complement;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::pagemap::Pagemap;
use crate::sys::vma::{self, Anonymous};
use std::io;
use std::ops::Range;

/// Room for what of a run of store mappings is the store's.
#[derive(Debug)]
pub(crate) struct CopyRoom {
    /// What the kernel had copied already, also if that is swapped out: it stays where it is.
    copied: Vec<Range<usize>>,
    /// A page for each of the others.
    area: Option<Anonymous>,
}

impl CopyRoom {
    /// Makes room, and reads in what will be copied. The run's pages stay in mappings of the store until the room is used or
    /// dropped, or whoever replaced them says so.
    ///
    /// # Errors
    /// Those of the kernel, for want of memory; or since some of the run is not mapped, as while a hole in guest memory is mended.
    pub(crate) fn prepare(pagemap: &mut Pagemap, run: &Range<usize>) -> io::Result<Self> {
        let copied = pagemap.copied(run.clone())?;
        let shared = complement(run, &copied);
        let pages = shared.iter().map(Range::len).sum::<usize>() / PAGE_SIZE;
        let area = (pages > 0).then(|| Anonymous::new(pages)).transpose()?;
        area.iter().try_for_each(Anonymous::populate)?;
        shared
            .into_iter()
            .try_for_each(|part| vma::populate_read(part.start, part.len()))?;
        Ok(Self { copied, area })
    }

    /// What of a part of the run is to be copied, where `copies` are anonymous memory now. There is room for all of it: a copy
    /// does not become the store's again.
    pub(super) fn shared(&self, part: &Range<usize>, copies: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let within = |copied: &Range<usize>| copied.start.max(part.start)..copied.end.min(part.end);
        let mut private = copies;
        private.extend(self.copied.iter().map(within).filter(|copied| !copied.is_empty()));
        private.sort_by_key(|range| range.start);
        complement(part, &private)
    }

    /// Populated memory for a part of what is to be copied. The caller owns it from now on.
    pub(super) fn take(&mut self, len: usize) -> io::Result<usize> {
        let pages = len / PAGE_SIZE;
        let area = self.area.as_mut().filter(|area| area.pages() >= pages);
        Ok(area.ok_or(io::ErrorKind::OutOfMemory)?.take_front(pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::{HostRange, Memory};
    use crate::sys::inject::{Call, Injection, Times};
    use crate::sys::page_size::bytes;
    use crate::sys::uffd::Uffd;
    use crate::unmerge::cow::Breaker;
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use vmm_dedup_trouble::{page_out, swap_or_skip, swapped_out};

    const PAGES: usize = 8;
    /// A page that the kernel has copied.
    const COPIED: usize = 2;

    /// "Guest" memory that maps a file, and in which one page was written.
    struct Guest {
        base: usize,
        breaker: Breaker,
        pagemap: Pagemap,
        _area: Anonymous,
    }

    impl Guest {
        /// `None`, and says so, without a userfaultfd.
        #[allow(unsafe_code)] // memory of the test's own
        fn new() -> Option<Self> {
            let Ok(tracker) = Uffd::tracker() else {
                assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
                eprintln!("SKIPPED: no userfaultfd");
                return None;
            };
            let (file, _content) = vmm_dedup_protocol::mapping::staging_memfd(bytes(PAGES)).unwrap();
            let area = Anonymous::new(PAGES).unwrap();
            let base = area.base();
            let memory = Memory::new(&[HostRange::try_new(base, bytes(PAGES)).unwrap()]).unwrap();
            // SAFETY: our own mapping, which nothing refers to.
            unsafe { vma::map_segment(base, bytes(PAGES), file.as_fd(), 0) }.unwrap();
            let guest = Self {
                base,
                breaker: Breaker::new(Arc::new(tracker), Arc::new(memory), None).unwrap(),
                pagemap: Pagemap::open().unwrap(),
                _area: area,
            };
            guest.word(COPIED).store(7, Ordering::Relaxed);
            Some(guest)
        }

        #[allow(unsafe_code)] // raw pages
        fn word(&self, page: usize) -> &AtomicU64 {
            // SAFETY: mapped, aligned, and only ever used as this.
            unsafe { &*((self.base + bytes(page)) as *const AtomicU64) }
        }

        fn pages(&self, pages: Range<usize>) -> Range<usize> {
            self.base + bytes(pages.start)..self.base + bytes(pages.end)
        }

        fn words(&self) -> Vec<u64> {
            (0..PAGES)
                .map(|page| self.word(page).load(Ordering::Relaxed))
                .collect()
        }
    }

    #[test]
    fn no_memory_is_asked_for_while_pages_are_frozen() {
        let Some(mut guest) = Guest::new() else { return };
        let all = guest.pages(0..PAGES);
        let mut room = CopyRoom::prepare(&mut guest.pagemap, &all).unwrap();
        let refused = [Call::MapAnonymous, Call::Populate]
            .map(|call| Injection::begin(call, libc::ENOMEM, Times::Always));
        let done = guest.breaker.make_private(&mut guest.pagemap, &all, &mut room);
        assert!(done.error.is_none(), "{:?}", done.error);
        assert_eq!(
            done.anonymous,
            [guest.pages(0..COPIED), guest.pages(COPIED + 1..PAGES)]
        );
        assert_eq!(refused.map(|injection| injection.failed()), [0, 0]);
        assert_eq!(guest.words(), [0, 0, 7, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn without_memory_nothing_is_frozen() {
        let Some(mut guest) = Guest::new() else { return };
        let all = guest.pages(0..PAGES);
        for call in [
            Call::MapAnonymous,
            Call::Populate,
            Call::PopulateRead,
            Call::PagemapScan,
        ] {
            let injection = Injection::begin(call, libc::ENOMEM, Times::Always);
            assert!(CopyRoom::prepare(&mut guest.pagemap, &all).is_err(), "{call:?}");
            assert!(injection.failed() > 0, "{call:?}");
        }
        // Nobody waits.
        (0..PAGES).for_each(|page| guest.word(page).store(page as u64, Ordering::Relaxed));
        assert_eq!(guest.words(), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    #[allow(unsafe_code)] // memory of the test's own
    fn a_run_with_a_hole_is_left_as_it_is() {
        let Some(mut guest) = Guest::new() else { return };
        let all = guest.pages(0..PAGES);
        let hole = guest.pages(5..6);
        // SAFETY: nothing refers to that page.
        let unmapped = unsafe { libc::munmap(hole.start as *mut _, hole.len()) };
        assert_eq!(unmapped, 0);
        assert!(CopyRoom::prepare(&mut guest.pagemap, &all).is_err());
    }

    #[test]
    fn a_copy_that_is_swapped_out_is_not_read_in() {
        let _swap = swap_or_skip!();
        let Some(mut guest) = Guest::new() else { return };
        let (all, copied) = (guest.pages(0..PAGES), guest.pages(COPIED..COPIED + 1));
        page_out(&copied);
        assert_eq!(swapped_out(&copied), 1, "it is swapped out");
        let mut room = CopyRoom::prepare(&mut guest.pagemap, &all).unwrap();
        let done = guest.breaker.make_private(&mut guest.pagemap, &all, &mut room);
        assert_eq!(
            done.anonymous,
            [guest.pages(0..COPIED), guest.pages(COPIED + 1..PAGES)]
        );
        assert_eq!(swapped_out(&copied), 1, "it still is");
        assert_eq!(guest.words(), [0, 0, 7, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn what_was_copied_meanwhile_is_left_out_as_well() {
        let copied = |ranges: &[Range<usize>]| CopyRoom {
            copied: ranges.to_vec(),
            area: None,
        };
        let room = copied(&[10..12, 20..24, 30..34]);
        assert_eq!(
            room.shared(&(11..32), vec![14..15, 22..25]),
            [12..14, 15..20, 25..30]
        );
        assert!(
            room.shared(&(12..20), Vec::new())
                .into_iter()
                .eq(std::iter::once(12..20))
        );
    }
}
