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
//! A page that was copied by the kernel earlier may be pinned, and nothing tells, so it is left where it is. (A
//! long-term read-only pin makes a page private without a write fault; so whether a page is still the store's is
//! asked again before each break.)

use crate::error::Error;
use crate::memory::bitmap::Bits;
use crate::memory::layout::{Memory, Page};
use crate::memory::ranges::complement;
use crate::sys::guest;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::put_over;
use crate::sys::sched::Urgent;
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma::{self, Anonymous};
use crate::unmerge::page_reserve::Reserve;
use std::collections::{HashSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::key::PAGE_WORDS;
use vmm_dedup_protocol::stats::Histogram;

/// Pages copied at a time when a range is given back.
const RESTORE_PAGES: usize = 512;

/// Figures of the fault thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BreakStats {
    pub(crate) broken: u64,
    pub(crate) waits: u64,
    pub(crate) waiting: u64,
    pub(crate) latency: Histogram,
    pub(crate) cpu_ns: u64,
}

/// A thread that waits to write a shared page.
#[derive(Debug)]
struct Writer {
    address: usize,
    since: Instant,
    /// Whether it was counted as one that had to wait for the reserve.
    waited: bool,
}

impl Writer {
    fn page(&self) -> Range<usize> {
        self.address..self.address + PAGE_SIZE
    }
}

/// What became of a run that should go back to anonymous memory.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    /// What was looked at: the rest had been replaced already.
    pub(crate) examined: Vec<Range<usize>>,
    /// What is anonymous now.
    pub(crate) anonymous: Vec<Range<usize>>,
    /// Why it ended early; what is not anonymous then may still be shared.
    pub(crate) error: Option<io::Error>,
}

/// Mappings that a broken page may add.
const VMAS_PER_BREAK: i64 = 2;

/// Shared by the scanning thread, which maps and unmerges, and the fault thread, which breaks.
#[derive(Debug)]
pub(crate) struct Breaker {
    uffd: Uffd,
    tracker: Arc<Uffd>,
    managed: bool,
    view: RwLock<View>,
    inner: Mutex<Inner>,
    stop: AtomicBool,
    /// Mappings that breaking may still add before the next pass counts them.
    vmas_left: AtomicI64,
}

/// The memory as it is now.
#[derive(Debug)]
struct View {
    memory: Arc<Memory>,
    /// Mapped from the store and protected here (managed mode).
    shared: Bits,
}

#[derive(Debug)]
struct Inner {
    reserve: Reserve,
    /// Pages broken since the scanning thread last asked.
    broken: Vec<Page>,
    /// Pages of store mappings that are not protected: the kernel copies them on write.
    left: HashSet<Page>,
    stats: BreakStats,
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

    /// Lets `replace` put fresh memory into the place of a range, which nobody protects or breaks afterwards. Only
    /// memory is touched here, so that threads whose system calls are filtered may come.
    pub(crate) fn give_up(&self, range: &Range<usize>, replace: impl FnOnce()) {
        // Under the lock: the fault thread must not be in the middle of copying what is given up.
        let mut inner = self.lock();
        self.mark(range, false);
        self.forget_left(&mut inner, range);
        replace();
    }

    /// Ends the registration of a range of store mappings.
    pub(crate) fn unregister(&self, range: &Range<usize>) -> io::Result<()> {
        self.uffd.unregister(range.start, range.len())
    }

    fn view(&self) -> std::sync::RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn page_at(&self, address: usize) -> Option<Page> {
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
        if !self.managed {
            return;
        }
        // A write to a page that is protected but not mapped yet is copied by the kernel before we hear of it.
        vma::populate_read(run.start, run.len());
        let protected = self
            .uffd
            .register(run.start, run.len(), Mode::Wp)
            .and_then(|()| self.uffd.write_protect(run.start, run.len(), true))
            .and_then(|()| pagemap.private(run.clone()));
        let private = protected.unwrap_or_else(|error| {
            log::warn!("writes to {run:x?} are left to the kernel's copy-on-write: {error}");
            vec![run.clone()]
        });
        for stretch in &private {
            self.leave(&mut self.lock(), stretch);
        }
        // Marked last: the fault thread touches nothing that is not marked.
        for ours in complement(run, &private) {
            self.forget_left(&mut self.lock(), &ours);
            self.mark(&ours, true);
        }
    }

    /// Whether it was the kernel that copied a shared page which is found private.
    pub(crate) fn kernel_broke(&self, page: Page) -> bool {
        // Under the lock: the fault thread replaces a page and notes it in one step.
        let mut inner = self.lock();
        !self.managed || inner.left.remove(&page) || self.is_shared(page)
    }

    /// Turns the still shared pages of a store mapping into anonymous ones. What the kernel copied earlier stays as
    /// it is, and what a writer just made the fault thread replace is not touched at all.
    pub(crate) fn restore(&self, pagemap: &mut Pagemap, run: &Range<usize>) -> Restored {
        let mut inner = self.lock();
        let mut outcome = Restored {
            examined: self.ours(&inner, run),
            ..Restored::default()
        };
        for part in outcome.examined.clone() {
            let before = outcome.anonymous.len();
            let done = self.restore_locked(&mut inner, pagemap, &part, &mut outcome.anonymous);
            // What is left of the part belongs to the kernel's copy-on-write.
            for rest in complement(&part, &outcome.anonymous[before..]) {
                self.leave(&mut inner, &rest);
            }
            if let Err(error) = done {
                outcome.error = Some(error);
                break;
            }
        }
        let _ = self.uffd.wake(run.start, run.len());
        outcome
    }

    /// Keeps runs of store mappings as they are while `work` runs, which puts other memory in their place. Readers go on
    /// meanwhile. `None`: some page is not the store's any more, or `work` said so; then nothing was changed.
    pub(crate) fn hold_still<T>(
        &self,
        pagemap: &mut Pagemap,
        runs: &[Range<usize>],
        work: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        // Locked, so that the fault thread replaces nothing.
        let mut inner = self.lock();
        let mut held = runs.iter().take_while(|run| self.hold_run(pagemap, run));
        let done = if held.by_ref().count() == runs.len() {
            work()
        } else {
            None
        };
        for run in runs {
            if done.is_some() {
                self.forget_left(&mut inner, run);
                self.mark(run, false);
            } else if !self.managed {
                let _ = self.uffd.unregister(run.start, run.len());
            }
            let _ = self.uffd.wake(run.start, run.len());
        }
        done
    }

    /// Makes writers of a run wait; whether all of it still is the store's then. What is, nobody can change or pin for
    /// writing from here on.
    fn hold_run(&self, pagemap: &mut Pagemap, run: &Range<usize>) -> bool {
        let protected = if self.managed {
            let first = self.page_at(run.start);
            let mut pages = first
                .into_iter()
                .flat_map(|first| first..)
                .take(run.len() / PAGE_SIZE);
            pages.all(|page| self.is_shared(page))
        } else {
            let armed = self.uffd.register(run.start, run.len(), Mode::Wp);
            armed
                .and_then(|()| self.uffd.write_protect(run.start, run.len(), true))
                .is_ok()
        };
        protected
            && pagemap
                .private(run.clone())
                .is_ok_and(|private| private.is_empty())
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

    fn restore_locked(
        &self,
        inner: &mut Inner,
        pagemap: &mut Pagemap,
        run: &Range<usize>,
        restored: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        self.uffd.register(run.start, run.len(), Mode::Wp)?;
        self.uffd.write_protect(run.start, run.len(), true)?;
        // From here on nobody changes a page, or pins one for writing: even where the kernel still copies one that was
        // not mapped, its writer then waits for us.
        let private = pagemap.private(run.clone())?;
        for shared in complement(run, &private) {
            for start in shared.clone().step_by(bytes(RESTORE_PAGES)) {
                let stretch = start..shared.end.min(start + bytes(RESTORE_PAGES));
                self.copy_and_replace(inner, &stretch)?;
                restored.push(stretch);
            }
        }
        Ok(())
    }

    /// Ends the protection of a range: its writers go on through the kernel's copy-on-write.
    fn leave(&self, inner: &mut Inner, range: &Range<usize>) {
        self.mark(range, false);
        if self.managed
            && let Some(first) = self.page_at(range.start)
        {
            inner.left.extend((first..).take(range.len() / PAGE_SIZE));
        }
        let _ = self.uffd.write_protect(range.start, range.len(), false);
        let _ = self.uffd.wake(range.start, range.len());
    }

    fn copy_and_replace(&self, inner: &mut Inner, stretch: &Range<usize>) -> io::Result<()> {
        let pages = stretch.len() / PAGE_SIZE;
        let mut area = Anonymous::new(pages)?;
        area.populate()?;
        self.replace(inner, stretch, area.take_front(pages))
    }

    /// Copies the pages of a protected range to `fresh`, memory of ours, and moves that into their place.
    #[allow(unsafe_code)] // copies and replaces guest pages
    fn replace(&self, inner: &mut Inner, range: &Range<usize>, fresh: usize) -> io::Result<()> {
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
        // Tracked from now on like any other memory; should that fail it is only never merged again.
        self.tracker.register(range.start, range.len(), Mode::Wp)
    }

    fn forget_left(&self, inner: &mut Inner, range: &Range<usize>) {
        if let Some(first) = self.page_at(range.start).filter(|_| !inner.left.is_empty()) {
            for page in (first..).take(range.len() / PAGE_SIZE) {
                inner.left.remove(&page);
            }
        }
    }

    fn mark(&self, range: &Range<usize>, shared: bool) {
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

    fn is_shared(&self, page: Page) -> bool {
        self.view().shared.get(page)
    }

    /// Ends [`Self::run`].
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// The fault thread: serves writers until [`Self::stop`]. A writer for whom there is no page waits in the queue.
    pub(crate) fn run(&self, mut pagemap: Pagemap) {
        crate::sys::sched::enter_service_thread();
        let mut queue: VecDeque<Writer> = VecDeque::new();
        let mut faults = Vec::new();
        while !self.stop.load(Ordering::Acquire) {
            let patience = if queue.is_empty() { 100 } else { 5 };
            self.uffd.wait_for_fault(Duration::from_millis(patience));
            if let Err(error) = self.uffd.read_faults(&mut faults) {
                log::error!("cannot read write faults: {error}");
            }
            let since = Instant::now();
            let new = faults.drain(..).map(|at| Writer {
                address: at & !(PAGE_SIZE - 1),
                since,
                waited: false,
            });
            queue.extend(new);
            self.serve(&mut pagemap, &mut queue);
            self.refill();
            self.serve(&mut pagemap, &mut queue);
            let mut inner = self.lock();
            inner.stats.waiting = queue.len() as u64;
            inner.stats.cpu_ns = crate::sys::proc::thread_cpu_ns();
        }
        // Nobody serves from here on: the kernel copies for those who still wait. For those who come later it does
        // as soon as the descriptor is closed.
        for writer in queue {
            self.leave(&mut self.lock(), &writer.page());
        }
    }

    /// Fills the reserve without holding the lock while memory is allocated: the scanning thread may hold a window.
    fn refill(&self) {
        loop {
            let Some(pages) = self.lock().reserve.wanted() else {
                return;
            };
            match Reserve::allocate(pages) {
                Ok(block) => self.lock().reserve.push(block),
                Err(error) => return log::warn!("the copy-on-write reserve cannot be refilled: {error}"),
            }
        }
    }

    fn serve(&self, pagemap: &mut Pagemap, queue: &mut VecDeque<Writer>) {
        for _ in 0..queue.len() {
            let Some(mut writer) = queue.pop_front() else {
                return;
            };
            let _urgent = Urgent::begin();
            let mut inner = self.lock();
            let page = self.page_at(writer.address);
            if page.is_some_and(|p| self.is_shared(p)) {
                // Private already? Then it may be pinned for reading, which unshares a page without asking us.
                let still_shared = pagemap.private(writer.page()).is_ok_and(|p| p.is_empty());
                if !still_shared
                    || self.vmas_left.fetch_sub(VMAS_PER_BREAK, Ordering::Relaxed) < VMAS_PER_BREAK
                {
                    self.leave(&mut inner, &writer.page());
                } else if let Some(fresh) = inner.reserve.take() {
                    match self.replace(&mut inner, &writer.page(), fresh) {
                        Ok(()) => {
                            inner.broken.extend(page);
                            inner.stats.broken += 1;
                        }
                        Err(error) => {
                            log::warn!("leaving a copy-on-write to the kernel: {error}");
                            self.leave(&mut inner, &writer.page());
                        }
                    }
                } else {
                    self.vmas_left.fetch_add(VMAS_PER_BREAK, Ordering::Relaxed);
                    inner.stats.waits += u64::from(!std::mem::replace(&mut writer.waited, true));
                    queue.push_back(writer);
                    continue;
                }
            }
            // Else another writer's fault on the same page was served already.
            let _ = self.uffd.wake(writer.address, PAGE_SIZE);
            let ns = u64::try_from(writer.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            inner.stats.latency.observe(ns);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
