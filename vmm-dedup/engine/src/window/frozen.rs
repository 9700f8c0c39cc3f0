//! Pages in mappings of store files that nobody can write for a moment, so that other slots of the same bytes can be mapped
//! over them. No page is away: readers never wait, and writers only until it is done.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Freeze.* The stretch is write-protected on the second userfaultfd, the synchronous one. When the call returns the
//!    processors and KVM have forgotten what they knew of the pages (the kernel flushes TLBs and calls MMU notifiers before), so
//!    every write from here on is a fault, and its writer waits. Writes before that are in the page. Whoever pins a page for
//!    writing (direct I/O, io_uring buffers, process_vm_writev) faults as a writer does, and waits; the kernel's lockless way
//!    of pinning looks at the page table once more after it has taken its reference, so that it came before or fails.
//! 2. *Look.* [`Frozen::copies`] asks which pages are anonymous memory, and [`Frozen::unseen`] which are not in memory; the others
//!    are the store's.
//!    - A page of the store cannot be pinned for writing: that pin would have made the kernel copy the page. Its bytes are the
//!      slot's, which nobody writes.
//!    - A page that is swapped out, or under migration, may be a copy. Nobody has it pinned: the kernel does not unmap an
//!      anonymous page that may be pinned. But whoever took a plain reference before may still write it (direct I/O of some file
//!      systems): the kernel unmaps such a page, and keeps it. So what is not in memory is not replaced.
//!    - An anonymous page may be pinned since before. Whoever wants to replace it has to know that it is not, by other means.
//!
//!    A write that meets a page of the store that is not mapped is copied by the kernel before its writer waits. That copy holds
//!    the slot's bytes, and nobody has it pinned: pinning for writing needs a page table entry that can be written.
//! 3. *Compare.* What is to be mapped is compared with the bytes seen at the guest's own address ([`Frozen::page`]). Nobody
//!    changes them, so equal stays equal.
//! 4. *Map*, with mmap(MAP_FIXED), in one step: who reads finds the old page or the new one, which are equal. The page that was
//!    there goes. The new mapping is not registered, so a write to it, also one before step 5, is the kernel's copy on
//!    write of the new slot, which is right.
//! 5. *Thaw.* What was not replaced is as it was before, and everybody who waits goes on, faults again, and finds what is there.
//!
//! A page that is pinned for *reading* keeps its bytes for whoever pinned it, as of this moment. That is what a device that
//! reads memory while it is being written may see anyway. (Long pins for reading, of devices that are passed through, see none
//! of the later writes. Such VMs are not merged at all.) A page that is registered for reading for long has been copied
//! by the kernel for that, without a write fault; so it is an anonymous page, and may be pinned.
//!
//! However a [`Frozen`] ends (dropped, by an error, by a panic), nothing stays frozen and everybody who waits is woken. If the
//! kernel lacks memory in the middle of step 4 it leaves a hole. That is filled with inaccessible memory, so that nobody else
//! gets the addresses, and the slot is mapped until it works.
//!
//! Memory that is discarded must not meet it: whoever freezes holds the lock of
//! [`discard`](mod@crate::unmerge::discard). With managed breaks he holds the fault thread's lock as well, since that thread
//! replaces pages for writers. Nothing is logged meanwhile: a log may end in a thread of the VMM that waits for one of the pages.

use crate::compare::StablePage;
use crate::memory::ranges::complement;
use crate::sys::inject::{AnotherWay, Call};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::{map_over, put_over, unprotect, wake};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// What becomes of frozen pages that were not replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Afterwards {
    /// Their registration ends: the kernel copies for those who write.
    Unregistered,
    /// They stay registered, and these stay protected: somebody serves their writers.
    Served(Vec<Range<usize>>),
}

/// Consecutive frozen pages. Named by addresses.
#[derive(Debug)]
pub(crate) struct Frozen<'a> {
    uffd: &'a Uffd,
    range: Range<usize>,
    afterwards: Afterwards,
    /// Other memory is in their place, in order of addresses.
    replaced: Vec<Range<usize>>,
}

impl<'a> Frozen<'a> {
    /// Freezes consecutive pages, all of them in mappings of store files. `uffd`: the one that writers wait on.
    ///
    /// # Errors
    /// Those of the kernel; nothing is frozen then.
    pub(crate) fn freeze(uffd: &'a Uffd, range: Range<usize>, afterwards: Afterwards) -> io::Result<Self> {
        let (start, len) = (range.start, range.len());
        let registered = uffd.register(start, len, Mode::Wp);
        if let Err(error) = &registered
            && error.raw_os_error() != Some(libc::ENOMEM)
        {
            // Nothing was registered. (Some of it may be another userfaultfd's, whose registration older kernels would end.)
            return Err(io::Error::from_raw_os_error(
                error.raw_os_error().unwrap_or(libc::EINVAL),
            ));
        }
        let frozen = Self {
            uffd,
            range,
            afterwards,
            replaced: Vec::new(),
        };
        registered.and_then(|()| uffd.write_protect(start, len, true))?;
        Ok(frozen)
    }

    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// Where other memory is now, in order of addresses.
    pub(crate) fn replaced(&self) -> &[Range<usize>] {
        &self.replaced
    }

    /// What of it is anonymous memory, and so may be pinned.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn copies(&self, pagemap: &mut Pagemap) -> io::Result<Vec<Range<usize>>> {
        pagemap.private(self.range.clone())
    }

    /// What of it is not in memory: the store's or a copy, nobody can tell. (A place that was never filled looks the same once it
    /// is protected.)
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn unseen(&self, pagemap: &mut Pagemap) -> io::Result<Vec<Range<usize>>> {
        pagemap.swapped(self.range.clone())
    }

    /// The page at an address, as the guest sees it.
    ///
    /// # Safety
    /// It must be the store's, or known not to be pinned for writing.
    #[allow(unsafe_code)] // reads guest memory
    pub(crate) unsafe fn page(&self, at: usize) -> StablePage<'_> {
        assert!(self.range.contains(&at));
        // SAFETY: it is mapped and readable, and nobody writes it before it is thawed, for which this must be borrowed mutably.
        unsafe { StablePage::at(at) }
    }

    /// Maps consecutive slots over consecutive pages.
    ///
    /// # Safety
    /// Each page must hold the bytes of its slot, and be the store's or known not to be pinned for writing.
    ///
    /// # Errors
    /// Those of the kernel; the pages are as they were then.
    #[allow(unsafe_code)] // maps over guest memory
    pub(crate) unsafe fn map_slots(
        &mut self,
        pages: Range<usize>,
        segment: BorrowedFd<'_>,
        offset: usize,
    ) -> io::Result<()> {
        // SAFETY: as promised by the caller, and nobody can write them.
        map_over(&pages, || unsafe {
            vma::map_segment(pages.start, pages.len(), segment, offset)
        })?;
        self.note_replaced(pages);
        Ok(())
    }

    /// Maps fresh anonymous memory over consecutive pages of zeros.
    ///
    /// # Safety
    /// Each page must hold zeros, and be the store's or known not to be pinned for writing.
    ///
    /// # Errors
    /// Those of the kernel; the pages are as they were then.
    #[allow(unsafe_code)] // maps over guest memory
    pub(crate) unsafe fn map_zeros(&mut self, pages: Range<usize>) -> io::Result<()> {
        // SAFETY: as promised by the caller, and nobody can write them.
        map_over(&pages, || unsafe { vma::renew(pages.start, pages.len()) })?;
        self.note_replaced(pages);
        Ok(())
    }

    /// Moves memory of ours into the place of consecutive pages. If that fails, it is gone.
    ///
    /// # Safety
    /// `fresh` must hold the bytes of each page, which must be the store's or known not to be pinned for writing.
    ///
    /// # Errors
    /// Those of the kernel; the pages are as they were then.
    #[allow(unsafe_code)] // moves over guest memory
    pub(crate) unsafe fn put(&mut self, pages: Range<usize>, fresh: usize) -> io::Result<()> {
        // SAFETY: as promised by the caller, and nobody can write them.
        unsafe { put_over(fresh, &pages) }?;
        self.note_replaced(pages);
        Ok(())
    }

    /// Other memory took the place of some pages.
    pub(crate) fn note_replaced(&mut self, pages: Range<usize>) {
        debug_assert!(self.range.start <= pages.start && pages.end <= self.range.end);
        let at = self.replaced.partition_point(|run| run.start < pages.start);
        self.replaced.insert(at, pages);
    }

    fn thaw(&mut self) {
        for rest in complement(&self.range, &self.replaced) {
            match &self.afterwards {
                Afterwards::Unregistered => {
                    let by_ending_the_protection = AnotherWay::of(Call::Unregister);
                    let ended = self.uffd.unregister(rest.start, rest.len());
                    drop(by_ending_the_protection);
                    if ended.is_err() {
                        unprotect(self.uffd, &rest);
                    }
                }
                Afterwards::Served(protected) => {
                    let within = |part: &Range<usize>| part.start.max(rest.start)..part.end.min(rest.end);
                    let served: Vec<Range<usize>> = protected
                        .iter()
                        .map(within)
                        .filter(|part| !part.is_empty())
                        .collect();
                    complement(&rest, &served)
                        .iter()
                        .for_each(|part| unprotect(self.uffd, part));
                }
            }
        }
        wake(self.uffd, &self.range);
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.thaw();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::bytes;
    use crate::sys::proc;
    use std::os::fd::{AsFd, OwnedFd};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    const PAGES: usize = 16;

    /// "Guest" memory that maps the first pages of a file in which everything is there twice.
    struct Guest {
        uffd: Uffd,
        pagemap: Pagemap,
        base: usize,
        file: OwnedFd,
    }

    impl Guest {
        /// `None`, said aloud, where there is no userfaultfd.
        fn new() -> Option<Self> {
            let Ok(uffd) = Uffd::breaker() else {
                assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
                eprintln!("SKIPPED: no userfaultfd");
                return None;
            };
            let (file, content) = vmm_dedup_protocol::mapping::staging_memfd(bytes(2 * PAGES)).unwrap();
            let words = bytes(1) / 8;
            for page in 0..2 * PAGES {
                content.words()[page * words].store((page % PAGES) as u64, Ordering::Relaxed);
            }
            let base = vma::map_segment_anywhere(bytes(PAGES), file.as_fd(), 0).unwrap();
            Some(Self {
                uffd,
                pagemap: Pagemap::open().unwrap(),
                base,
                file,
            })
        }

        fn pages(&self, pages: Range<usize>) -> Range<usize> {
            self.base + bytes(pages.start)..self.base + bytes(pages.end)
        }

        #[allow(unsafe_code)] // a word of the test's own memory
        fn word(&self, page: usize) -> &AtomicU64 {
            // SAFETY: mapped, aligned, and only ever used as this.
            unsafe { &*((self.base + bytes(page)) as *const AtomicU64) }
        }

        /// Has the kernel copy a page, which keeps its bytes.
        fn break_page(&self, page: usize) {
            self.word(page).store(page as u64, Ordering::Relaxed);
        }

        fn is_whole(&self) -> bool {
            (0..PAGES).all(|page| self.word(page).load(Ordering::Relaxed) == page as u64)
        }

        fn mappings(&self) -> usize {
            proc::mappings_within(&self.pages(0..PAGES)).unwrap()
        }
    }

    impl Drop for Guest {
        fn drop(&mut self) {
            vma::unmap(self.base, bytes(PAGES));
        }
    }

    #[test]
    #[allow(unsafe_code)] // maps over memory of the test's own
    fn readers_go_on_and_writers_wait_until_other_slots_are_there() {
        let Some(mut guest) = Guest::new() else { return };
        guest.break_page(3);
        let all = guest.pages(0..PAGES);
        std::thread::scope(|scope| {
            let mut frozen = Frozen::freeze(&guest.uffd, all.clone(), Afterwards::Unregistered).unwrap();
            let mut pagemap = Pagemap::open().unwrap();
            assert_eq!(frozen.copies(&mut pagemap).unwrap(), [guest.pages(3..4)]);
            assert!(guest.is_whole() && !guest.uffd.somebody_waits(Duration::ZERO));
            let writer = scope.spawn(|| [3, 5, 9].map(|page| guest.word(page).store(99, Ordering::Relaxed)));
            assert!(guest.uffd.somebody_waits(Duration::from_secs(10)));
            assert!(guest.is_whole());
            // SAFETY: the same bytes, which nobody has pinned.
            let mapped = unsafe { frozen.map_slots(guest.pages(2..8), guest.file.as_fd(), bytes(PAGES + 2)) };
            mapped.unwrap();
            drop(frozen);
            writer.join().unwrap();
        });
        let written = (0..PAGES).filter(|page| guest.word(*page).load(Ordering::Relaxed) == 99);
        assert_eq!(written.collect::<Vec<_>>(), [3, 5, 9]);
        let copies = guest.pagemap.private(all).unwrap();
        assert_eq!(copies, [3, 5, 9].map(|page| guest.pages(page..page + 1)));
        assert_eq!(guest.mappings(), 3);
    }

    #[test]
    #[allow(unsafe_code)] // maps over memory of the test's own
    fn a_copy_that_gets_its_slot_back_leaves_one_mapping() {
        let Some(mut guest) = Guest::new() else { return };
        [4, 5, 9].into_iter().for_each(|page| guest.break_page(page));
        let before = guest.mappings();
        for part in [4..6, 9..10] {
            let pages = guest.pages(part.clone());
            let mut frozen = Frozen::freeze(&guest.uffd, pages.clone(), Afterwards::Unregistered).unwrap();
            // SAFETY: the same bytes, which nobody has pinned.
            unsafe { frozen.map_slots(pages, guest.file.as_fd(), bytes(part.start)) }.unwrap();
        }
        assert_eq!(guest.mappings(), before);
        assert!(guest.is_whole() && guest.pagemap.private(guest.pages(0..PAGES)).unwrap().is_empty());
    }

    #[test]
    #[allow(unsafe_code)] // maps over memory of the test's own
    fn zeros_become_empty_memory() {
        let Some(guest) = Guest::new() else { return };
        guest.word(7).store(0, Ordering::Relaxed);
        let mut frozen = Frozen::freeze(&guest.uffd, guest.pages(6..9), Afterwards::Unregistered).unwrap();
        // SAFETY: the page is zero, and nobody has pinned it.
        unsafe { frozen.map_zeros(guest.pages(7..8)) }.unwrap();
        drop(frozen);
        assert_eq!(
            [6, 7, 8].map(|page| guest.word(page).load(Ordering::Relaxed)),
            [6, 0, 8]
        );
        guest.word(7).store(7, Ordering::Relaxed);
        assert!(guest.is_whole());
    }

    #[test]
    fn a_panic_leaves_the_guest_whole_and_nobody_waiting() {
        let Some(guest) = Guest::new() else { return };
        std::thread::scope(|scope| {
            let died = catch_unwind(AssertUnwindSafe(|| {
                let all = guest.pages(0..PAGES);
                let _frozen = Frozen::freeze(&guest.uffd, all, Afterwards::Unregistered).unwrap();
                scope.spawn(|| guest.break_page(4));
                while !guest.uffd.somebody_waits(Duration::ZERO) {
                    std::thread::yield_now();
                }
                panic!("while pages are frozen");
            }));
            assert!(died.is_err());
        });
        (0..PAGES).for_each(|page| guest.break_page(page));
        assert!(guest.is_whole() && guest.mappings() == 1);
    }

    #[test]
    fn what_is_served_stays_protected_and_what_is_not_is_not() {
        let Some(guest) = Guest::new() else { return };
        let all = guest.pages(0..PAGES);
        let served = vec![guest.pages(0..4), guest.pages(8..PAGES)];
        drop(Frozen::freeze(&guest.uffd, all, Afterwards::Served(served)).unwrap());
        guest.break_page(5);
        std::thread::scope(|scope| {
            scope.spawn(|| guest.break_page(2));
            assert!(guest.uffd.somebody_waits(Duration::from_secs(10)));
            unprotect(&guest.uffd, &guest.pages(2..3));
            wake(&guest.uffd, &guest.pages(2..3));
        });
        assert!(guest.is_whole());
    }
}
