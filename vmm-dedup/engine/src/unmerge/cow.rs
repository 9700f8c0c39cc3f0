//! Breaking sharing ourselves: for a guest that writes (managed mode), and to give a range back (unmerge).
//!
//! # Why no write and no DMA is lost
//!
//! The store's mappings are write-protected on a second userfaultfd, so a writer (a vCPU, or the kernel on behalf of
//! a device: pinning a page for writing is a write fault) waits while we work. The content of the page, read through
//! the guest's own address, is copied to an anonymous page of ours, and mremap() puts that page in the place of the
//! mapping in one step: a reader sees the old page or the new one, which are equal. A page still in the store's
//! file cannot be pinned for writing, since pinning would have copied it first.
//!
//! The anonymous page is there before the writer waits: in the reserve, or in a [`CopyRoom`]. So nobody who waits for a page
//! waits for memory to be reclaimed, but for what the kernel needs to note a mapping.
//!
//! A page that was copied by the kernel earlier may be pinned, and nothing tells, so it is left where it is. (A
//! long-term read-only pin makes a page private without a write fault; so whether a page is still the store's is
//! asked again before each break.)

use crate::error::Error;
use crate::memory::bitmap::Bits;
use crate::memory::layout::{Memory, Page};
use crate::memory::ranges::{complement, gaps};
use crate::sys::guest;
use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::{put_over, track, unprotect, wake};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma;
use crate::unmerge::copy_room::CopyRoom;
use crate::unmerge::page_reserve::Reserve;
use crate::window::{Afterwards, Frozen};
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use vmm_dedup_protocol::key::PAGE_WORDS;
use vmm_dedup_protocol::stats::Histogram;

/// Figures of the fault thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BreakStats {
    pub(crate) broken: u64,
    pub(crate) waits: u64,
    pub(crate) waiting: u64,
    pub(crate) latency: Histogram,
    pub(crate) cpu_ns: u64,
}

/// What became of a run that should go back to anonymous memory.
#[derive(Debug, Default)]
pub(crate) struct MadePrivate {
    /// What was looked at: the rest had been replaced already.
    pub(crate) examined: Vec<Range<usize>>,
    /// What is anonymous now.
    pub(crate) anonymous: Vec<Range<usize>>,
    /// Why it ended early; what is not anonymous then may still be shared.
    pub(crate) error: Option<io::Error>,
}

/// Why runs of store mappings are not frozen, or not as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotFrozen {
    /// A page is not the store's any more: somebody wrote it.
    Broken,
    /// A page is not in memory, and so may be a copy, of which somebody has a reference (see [`window`](mod@crate::window)).
    Unseen,
    /// The kernel refused. It was noted.
    Refused,
}

/// Runs of store mappings that nobody writes for the moment, and that the fault thread leaves alone.
#[derive(Debug)]
pub(crate) struct FrozenRuns<'a> {
    // Thawed before the lock is given back.
    runs: Vec<Frozen<'a>>,
    breaker: &'a Breaker,
    inner: MutexGuard<'a, Inner>,
}

impl<'a> FrozenRuns<'a> {
    fn runs(&self) -> impl Iterator<Item = &Frozen<'a>> {
        self.runs.iter()
    }

    /// That by which they are frozen.
    pub(crate) fn breaker(&self) -> &'a Breaker {
        self.breaker
    }

    pub(crate) fn runs_mut(&mut self) -> impl Iterator<Item = &mut Frozen<'a>> {
        self.runs.iter_mut()
    }

    /// Ends it, where slots were mapped over these parts: their writers are served as those of any mapping of the store.
    pub(crate) fn adopt(mut self, pagemap: &mut Pagemap, mapped: &[Range<usize>]) {
        self.forget_replaced();
        if self.breaker.managed {
            for run in mapped {
                let private = self.breaker.protect(pagemap, run);
                self.breaker.take_over(&mut self.inner, run, &private);
            }
        }
        self.runs.clear();
    }

    fn forget_replaced(&mut self) {
        for replaced in self.runs.iter().flat_map(Frozen::replaced) {
            self.breaker.forget_left(&mut self.inner, replaced);
            self.breaker.mark(replaced, false);
        }
    }
}

impl Drop for FrozenRuns<'_> {
    fn drop(&mut self) {
        self.forget_replaced();
    }
}

/// Whether each page of a frozen run is the store's.
fn is_the_stores(run: &Frozen<'_>, pagemap: &mut Pagemap) -> Result<(), NotFrozen> {
    let no_page = |found: io::Result<Vec<Range<usize>>>, else_it| match found {
        Ok(found) if found.is_empty() => Ok(()),
        Ok(_) => Err(else_it),
        Err(_) => Err(NotFrozen::Refused),
    };
    no_page(run.copies(pagemap), NotFrozen::Broken)?;
    no_page(run.unseen(pagemap), NotFrozen::Unseen)
}

/// Shared by the scanning thread, which maps and unmerges, and the fault thread, which breaks.
#[derive(Debug)]
pub(crate) struct Breaker {
    pub(super) uffd: Uffd,
    tracker: Arc<Uffd>,
    managed: bool,
    view: RwLock<View>,
    pub(super) inner: Mutex<Inner>,
    pub(super) stop: AtomicBool,
    /// The fault thread has read faults that it has not served.
    pub(super) wanted: AtomicBool,
    /// Mappings that breaking may still add before the next pass counts them.
    pub(super) vmas_left: AtomicI64,
}

/// The memory as it is now. No second account of pages: `PageMap`, which is the scanning thread's alone, has what pages are, as
/// far as that thread has heard; this has what is protected, which the fault thread must know at once.
#[derive(Debug)]
struct View {
    memory: Arc<Memory>,
    /// Mapped from the store and protected here (managed mode). A break clears it before `PageMap` hears of it.
    shared: Bits,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) reserve: Reserve,
    /// A message: pages broken since the scanning thread last asked, which makes transitions of them.
    pub(super) broken: Vec<Page>,
    /// Pages of store mappings that are not protected: the kernel copies them on write.
    left: HashSet<Page>,
    pub(super) stats: BreakStats,
}

impl Breaker {
    /// With a reserve, writes to adopted ranges wait for [`Self::run`]; without, the kernel copies.
    pub(crate) fn new(
        tracker: Arc<Uffd>,
        memory: Arc<Memory>,
        reserve: Option<Reserve>,
    ) -> Result<Self, Error> {
        let managed = reserve.is_some();
        let shared = Bits::new(if managed { memory.end() } else { 0 });
        let reserve = reserve.unwrap_or_default();
        Ok(Self {
            uffd: Uffd::breaker()?,
            tracker,
            managed,
            view: RwLock::new(View { memory, shared }),
            inner: Mutex::new(Inner {
                reserve,
                broken: Vec::new(),
                left: HashSet::new(),
                stats: BreakStats::default(),
            }),
            stop: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            vmas_left: AtomicI64::new(i64::MAX),
        })
    }

    pub(crate) fn managed(&self) -> bool {
        self.managed
    }

    /// Tells how many more mappings the process may get.
    pub(crate) fn set_vmas_left(&self, vmas: i64) {
        self.vmas_left.store(vmas, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.view().shared.bytes()
    }

    /// Memory came or went. Pages that went are not shared any more.
    pub(crate) fn set_memory(&self, memory: Arc<Memory>) {
        let mut inner = self.lock();
        inner.left.retain(|page| memory.has(*page));
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        if self.managed {
            let shared = view.shared.resized(memory.end());
            let all = shared.runs(0..Page::MAX);
            let gone = all.into_iter().flatten().filter(|page| !memory.has(*page));
            gone.for_each(|page| shared.set(page, false));
            view.shared = shared;
        }
        view.memory = memory;
    }

    /// Memory is about to go: whoever still writes it does not wait for anybody who knows it.
    pub(crate) fn let_go(&self, pages: &Range<Page>) {
        let mut inner = self.lock();
        for run in self.protected_of(std::iter::once(pages.clone())) {
            self.leave(&mut inner, &run);
        }
    }

    /// Lets `replace` put fresh memory into the place of a range, which nobody protects or breaks afterwards. If that fails the
    /// fault thread goes on serving the range. Only memory is touched here, so that threads whose system calls are filtered may
    /// come.
    pub(crate) fn discard(
        &self,
        range: &Range<usize>,
        replace: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        // Under the lock: the fault thread must not be in the middle of copying what is given up.
        let mut inner = self.lock();
        replace()?;
        self.mark(range, false);
        self.forget_left(&mut inner, range);
        // The scanning thread may hear of the discard before it hears of an earlier break of the same page, and merge in between what the
        // guest has written there since (what the VMM has read need not rest). It would take that break for one of the new mapping, which
        // would then pass for anonymous memory, and read as the store's content when it is freed the next time. So it does not hear of
        // the break any more; of the discard it hears behind this, since the caller holds the lock of the discards.
        let pages = self.pages_of(range);
        inner.broken.retain(|page| !pages.contains(page));
        Ok(())
    }

    /// Ends the registration of a range of store mappings.
    pub(crate) fn unregister(&self, range: &Range<usize>) -> io::Result<()> {
        self.uffd.unregister(range.start, range.len())
    }

    fn view(&self) -> std::sync::RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn page_at(&self, address: usize) -> Option<Page> {
        self.view().memory.page_at(address)
    }

    pub(crate) fn stats(&self) -> (BreakStats, Reserve) {
        let inner = self.lock();
        (inner.stats, inner.reserve.figures())
    }

    /// Pages broken by writers since the last call.
    pub(crate) fn take_broken(&self) -> Vec<Page> {
        std::mem::take(&mut self.lock().broken)
    }

    /// Lets the reserve grow to another size, e.g. by an operator who sees writers wait.
    pub(crate) fn set_reserve(&self, pages: usize, floor_bytes: u64) {
        self.lock().reserve.set_target(pages, floor_bytes);
    }

    /// The same for the pages alone.
    pub(crate) fn set_reserve_pages(&self, pages: usize) {
        self.lock().reserve.target = pages;
    }

    /// Protects a range that was just mapped from the store, before anyone is woken there. If that fails the kernel
    /// copies on write.
    ///
    /// Since the range was mapped, somebody who had not been waiting may have written it (or pinned a page for a DMA),
    /// and the kernel copied for him. Once the range is protected that cannot happen any more; so what is private then
    /// is left to the kernel for good, and only the rest is ours to break.
    pub(crate) fn adopt(&self, pagemap: &mut Pagemap, run: &Range<usize>) {
        if self.managed {
            let private = self.protect(pagemap, run);
            self.take_over(&mut self.lock(), run, &private);
        }
    }

    /// Protects a range that was just mapped; what of it is private then.
    fn protect(&self, pagemap: &mut Pagemap, run: &Range<usize>) -> Vec<Range<usize>> {
        // A write to a page that is protected but not mapped yet is copied by the kernel before we hear of it.
        if let Err(error) = vma::populate_read(run.start, run.len()) {
            late_log::note(
                "mapping shared pages for reading",
                &error,
                "first writes are left to the kernel",
            );
        }
        let protected = self
            .uffd
            .register(run.start, run.len(), Mode::Wp)
            .and_then(|()| self.uffd.write_protect(run.start, run.len(), true))
            .and_then(|()| pagemap.private(run.clone()));
        protected.unwrap_or_else(|error| {
            late_log::note(
                "protecting shared pages",
                &error,
                "writes to them are left to the kernel",
            );
            vec![run.clone()]
        })
    }

    /// Serves the writers of a protected range, but for what is private in it.
    fn take_over(&self, inner: &mut Inner, run: &Range<usize>, private: &[Range<usize>]) {
        if self.stop.load(Ordering::Acquire) {
            return self.leave(inner, run);
        }
        for stretch in private {
            self.leave(inner, stretch);
        }
        // Marked last: the fault thread touches nothing that is not marked.
        for ours in gaps(run, private) {
            self.forget_left(inner, &ours);
            self.mark(&ours, true);
        }
    }

    /// Whether it was the kernel that copied a shared page which is found private.
    pub(crate) fn kernel_broke(&self, page: Page) -> bool {
        // Under the lock: the fault thread replaces a page and notes it in one step.
        let inner = self.lock();
        !self.managed || inner.left.contains(&page) || self.is_shared(page)
    }

    /// Turns the still shared pages of a store mapping into anonymous ones. What the kernel copied earlier stays as
    /// it is, and what a writer just made the fault thread replace is not touched at all. `room` was prepared for the run.
    pub(crate) fn make_private(
        &self,
        pagemap: &mut Pagemap,
        run: &Range<usize>,
        room: &mut CopyRoom,
    ) -> MadePrivate {
        let mut inner = self.lock();
        let mut outcome = MadePrivate {
            examined: self.ours(&inner, run),
            ..MadePrivate::default()
        };
        for part in outcome.examined.clone() {
            let before = outcome.anonymous.len();
            let anonymous = &mut outcome.anonymous;
            let done = self.make_private_locked(&mut inner, pagemap, &part, room, anonymous);
            // What is left of the part belongs to the kernel's copy-on-write.
            for rest in complement(&part, &outcome.anonymous[before..]) {
                self.leave(&mut inner, &rest);
            }
            if let Err(error) = done {
                outcome.error = Some(error);
                break;
            }
        }
        wake(&self.uffd, run);
        outcome
    }

    /// Keeps runs of store mappings as they are while `work` runs, which puts other memory in their place. Readers go on
    /// meanwhile. On an error, also one of `work`, nothing was changed.
    pub(crate) fn with_writers_waiting<E: From<NotFrozen>>(
        &self,
        pagemap: &mut Pagemap,
        runs: &[Range<usize>],
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut frozen = self.freeze(runs.iter().cloned())?;
        for run in frozen.runs() {
            is_the_stores(run, pagemap)?;
        }
        work()?;
        for run in &mut frozen.runs {
            run.note_replaced(run.range().clone());
        }
        Ok(())
    }

    /// Freezes runs of store mappings.
    ///
    /// # Errors
    /// [`NotFrozen::Broken`] if the fault thread has replaced a page of them, or [`NotFrozen::Refused`]; nothing is frozen then.
    pub(crate) fn freeze(
        &self,
        runs: impl IntoIterator<Item = Range<usize>>,
    ) -> Result<FrozenRuns<'_>, NotFrozen> {
        // Locked, so that the fault thread replaces nothing.
        let inner = self.lock();
        let freeze = |run: Range<usize>| {
            let afterwards = self.afterwards(&inner, &run).ok_or(NotFrozen::Broken)?;
            Frozen::freeze(&self.uffd, run, afterwards).map_err(|error| {
                late_log::note("protecting shared pages", &error, "they stay as they are for now");
                NotFrozen::Refused
            })
        };
        let frozen: Result<Vec<Frozen<'_>>, NotFrozen> = runs.into_iter().map(freeze).collect();
        Ok(FrozenRuns {
            runs: frozen?,
            breaker: self,
            inner,
        })
    }

    /// What becomes of a run that is frozen; `None` if the fault thread has replaced a page.
    fn afterwards(&self, inner: &Inner, run: &Range<usize>) -> Option<Afterwards> {
        if !self.managed {
            return Some(Afterwards::Unregistered);
        }
        let first = self.page_at(run.start)?;
        let mut served: Vec<Range<usize>> = Vec::new();
        for (page, at) in (first..).zip(run.clone().step_by(PAGE_SIZE)) {
            match (self.is_shared(page), served.last_mut()) {
                (true, Some(last)) if last.end == at => last.end += PAGE_SIZE,
                (true, _) => served.push(at..at + PAGE_SIZE),
                (false, _) if inner.left.contains(&page) => {}
                (false, _) => return None,
            }
        }
        Some(Afterwards::Served(served))
    }

    /// The parts of a run of store mappings that the fault thread has not replaced.
    fn ours(&self, inner: &Inner, run: &Range<usize>) -> Vec<Range<usize>> {
        let Some(first) = self.page_at(run.start).filter(|_| self.managed) else {
            return vec![run.clone()];
        };
        let mut parts: Vec<Range<usize>> = Vec::new();
        for (page, at) in (first..).zip(run.clone().step_by(PAGE_SIZE)) {
            if self.is_shared(page) || inner.left.contains(&page) {
                match parts.last_mut() {
                    Some(last) if last.end == at => last.end += PAGE_SIZE,
                    _ => parts.push(at..at + PAGE_SIZE),
                }
            }
        }
        parts
    }

    fn make_private_locked(
        &self,
        inner: &mut Inner,
        pagemap: &mut Pagemap,
        run: &Range<usize>,
        room: &mut CopyRoom,
        anonymous: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        // From here on nobody changes a page, or pins one for writing: even where the kernel still copies one that was
        // not mapped, its writer then waits for us.
        let mut frozen = Frozen::freeze(&self.uffd, run.clone(), Afterwards::Unregistered)?;
        for shared in room.shared(run, frozen.copies(pagemap)?) {
            self.replace(inner, &shared, room.take(shared.len())?)?;
            frozen.note_replaced(shared.clone());
            anonymous.push(shared);
        }
        Ok(())
    }

    /// Ends the protection of a range: its writers go on through the kernel's copy-on-write.
    pub(super) fn leave(&self, inner: &mut Inner, range: &Range<usize>) {
        self.mark(range, false);
        if self.managed
            && let Some(first) = self.page_at(range.start)
        {
            inner.left.extend((first..).take(range.len() / PAGE_SIZE));
        }
        unprotect(&self.uffd, range);
        wake(&self.uffd, range);
    }

    /// Copies the pages of a protected range to `fresh`, memory of ours, and moves that into their place.
    #[allow(unsafe_code)] // copies and replaces guest pages
    pub(super) fn replace(&self, inner: &mut Inner, range: &Range<usize>, fresh: usize) -> io::Result<()> {
        let mut page = [0; PAGE_WORDS];
        self.view().memory.advise_copy(range, fresh);
        for offset in (0..range.len()).step_by(PAGE_SIZE) {
            // SAFETY: guest memory is mapped; it is protected, so the copy is not torn. `fresh` is our own.
            unsafe {
                guest::copy_page(range.start + offset, &mut page);
                guest::store_page(fresh + offset, &page);
            }
        }
        // SAFETY: fresh holds what the guest sees now, and the guest cannot change it before the step is done.
        unsafe { put_over(fresh, range) }?;
        self.forget_left(inner, range);
        self.mark(range, false);
        // Tracked from now on like any other memory.
        track(&self.tracker, range.clone(), "tracking writes to private memory");
        Ok(())
    }

    /// What is protected, and served by the fault thread.
    pub(super) fn protected(&self) -> Vec<Range<usize>> {
        let all = self.view().memory.existing(0..Page::MAX);
        self.protected_of(all)
    }

    /// What is protected of some pages, each of which are in one region.
    fn protected_of(&self, pages: impl IntoIterator<Item = Range<Page>>) -> Vec<Range<usize>> {
        let view = self.view();
        let runs = pages.into_iter().flat_map(|pages| view.shared.runs(pages));
        runs.map(|run| view.memory.addresses(&run)).collect()
    }

    /// Those of a range in one region; none, if nobody knows it.
    fn pages_of(&self, range: &Range<usize>) -> Range<Page> {
        let first = self.page_at(range.start).unwrap_or(Page::MAX);
        first..first.saturating_add(Page::try_from(range.len() / PAGE_SIZE).unwrap_or(Page::MAX))
    }

    fn forget_left(&self, inner: &mut Inner, range: &Range<usize>) {
        if let Some(first) = self.page_at(range.start).filter(|_| !inner.left.is_empty()) {
            for page in (first..).take(range.len() / PAGE_SIZE) {
                inner.left.remove(&page);
            }
        }
    }

    pub(super) fn mark(&self, range: &Range<usize>, shared: bool) {
        if !self.managed {
            return;
        }
        let Some(first) = self.page_at(range.start) else {
            return;
        };
        let view = self.view();
        for page in (first..).take(range.len() / PAGE_SIZE) {
            view.shared.set(page, shared);
        }
    }

    pub(super) fn is_shared(&self, page: Page) -> bool {
        self.view().shared.get(page)
    }

    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::HostRange;
    use crate::sys::inject::{Call, Injection, Times};
    use crate::sys::page_size::bytes;
    use crate::sys::vma::Anonymous;
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicU64;

    const PAGES: usize = 8;

    #[test]
    fn a_break_is_not_told_of_any_more_when_its_page_was_discarded() {
        let Ok(tracker) = Uffd::tracker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let area = Anonymous::new(PAGES).unwrap();
        let memory = Memory::new(&[HostRange::try_new(area.base(), bytes(PAGES)).unwrap()]).unwrap();
        let reserve = Some(Reserve::default());
        let breaker = Breaker::new(Arc::new(tracker), Arc::new(memory), reserve).unwrap();
        breaker.lock().broken.extend([1, 2, 5, 6]);
        let failed = || Err(io::ErrorKind::OutOfMemory.into());
        let discarded = area.base() + bytes(2)..area.base() + bytes(6);
        assert!(breaker.discard(&discarded, failed).is_err());
        breaker.discard(&discarded, || Ok(())).unwrap();
        assert_eq!(breaker.take_broken(), [1, 6]);
    }

    #[test]
    #[allow(unsafe_code)] // memory of the test's own
    fn writers_wait_only_while_all_pages_are_seen_to_be_the_stores() {
        let Ok(tracker) = Uffd::tracker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let (file, _content) = vmm_dedup_protocol::mapping::staging_memfd(bytes(PAGES)).unwrap();
        let area = Anonymous::new(PAGES).unwrap();
        let base = area.base();
        let memory = Memory::new(&[HostRange::try_new(base, bytes(PAGES)).unwrap()]).unwrap();
        // SAFETY: our own mapping, which nothing refers to.
        unsafe { vma::map_segment(base, bytes(PAGES), file.as_fd(), 0) }.unwrap();
        let breaker = Breaker::new(Arc::new(tracker), Arc::new(memory), None).unwrap();
        let mut pagemap = Pagemap::open().unwrap();
        let all = base..base + bytes(PAGES);
        let mut works = 0;
        let mut work = |pagemap: &mut Pagemap| {
            breaker.with_writers_waiting(pagemap, std::slice::from_ref(&all), || {
                works += 1;
                Err(NotFrozen::Refused)
            })
        };
        // Never touched: the page tables say of it what they say of a copy that is swapped out.
        assert_eq!(work(&mut pagemap), Err(NotFrozen::Unseen));
        vma::populate_read(base, bytes(PAGES)).unwrap();
        for call in [Call::Register, Call::WriteProtect, Call::PagemapScan] {
            let injection = Injection::begin(call, libc::ENOMEM, Times::Always);
            assert_eq!(work(&mut pagemap), Err(NotFrozen::Refused), "{call:?}");
            assert!(injection.failed() > 0, "{call:?}");
        }
        // SAFETY: mapped, aligned, and only ever used as this.
        let word = unsafe { &*(base as *const AtomicU64) };
        word.store(7, Ordering::Relaxed);
        assert_eq!(work(&mut pagemap), Err(NotFrozen::Broken));
        assert_eq!(works, 0);
        let rest = base + bytes(1)..all.end;
        let done: Result<(), NotFrozen> = breaker.with_writers_waiting(&mut pagemap, &[rest], || {
            works += 1;
            Ok(())
        });
        assert_eq!((done, works), (Ok(()), 1));
    }
}
