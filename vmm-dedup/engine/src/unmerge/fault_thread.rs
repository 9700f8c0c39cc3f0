//! The fault thread: breaks sharing for guests that write (managed mode).

use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::{unprotect, wake};
use crate::sys::sched::Urgent;
use crate::unmerge::cow::Breaker;
use crate::unmerge::page_reserve::Reserve;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Mappings that a broken page may add.
const VMAS_PER_BREAK: i64 = 2;

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

impl Breaker {
    /// Ends [`Self::run`], and that anybody waits for it: the kernel copies from here on. A [`Discarder`] may keep the userfaultfd
    /// open for long, so closing that does not do it.
    ///
    /// [`Discarder`]: crate::unmerge::discard::Discarder
    pub(crate) fn end(&self) {
        // Under the lock: nobody must be in the middle of replacing a page that is not protected any more.
        let inner = self.lock();
        self.stop.store(true, Ordering::Release);
        for range in self.protected() {
            self.mark(&range, false);
            if self.unregister(&range).is_err() {
                unprotect(&self.uffd, &range);
            }
            wake(&self.uffd, &range);
        }
        drop(inner);
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
                late_log::note("reading write faults", &error, "it is tried again");
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
        // Nothing is protected any more: who still waits goes on by the kernel's copy.
        for writer in queue {
            wake(&self.uffd, &writer.page());
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
                Err(error) => {
                    return late_log::note("refilling the copy-on-write reserve", &error, "it stays smaller");
                }
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
                            late_log::note(
                                "replacing a shared page for a writer",
                                &error,
                                "the kernel copies it",
                            );
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
            wake(&self.uffd, &writer.page());
            let ns = u64::try_from(writer.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            inner.stats.latency.observe(ns);
        }
    }
}
