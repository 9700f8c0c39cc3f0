//! The fault thread: breaks sharing for guests that write (managed mode).

use crate::memory::layout::Page;
use crate::sys::late_log;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::{unprotect, wake};
use crate::sys::sched::Urgent;
use crate::unmerge::cow::{Breaker, Inner};
use crate::unmerge::foresight::Foresight;
use crate::unmerge::page_reserve::Reserve;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Mappings that a broken page may add.
const VMAS_PER_BREAK: i64 = 2;

/// How long faults are polled for after one was served, while they keep coming: sleeping and being woken takes a writer longer
/// than copying his page.
const POLL: Duration = Duration::from_micros(50);

/// What became of a writer's page.
enum Served {
    /// It is private memory now, and with it so many pages in all.
    Broken(usize),
    /// The kernel copies it.
    Left,
    /// There is no memory for it.
    Waits,
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

/// What the fault thread lives on. However it ends, also before it serves anybody, nobody waits for it afterwards.
pub(crate) struct Faults(Arc<Breaker>);

impl Faults {
    pub(crate) fn of(breaker: Arc<Breaker>) -> Self {
        Self(breaker)
    }

    /// The thread: serves writers until [`Breaker::end`].
    pub(crate) fn serve(self, pagemap: Pagemap) {
        self.0.run(pagemap);
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abandon();
        }
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

    /// The fault thread has died: the kernel copies from here on, and what is mapped later is left to it as well.
    fn abandon(&self) {
        let mut inner = self.lock();
        self.stop.store(true, Ordering::Release);
        self.wanted.store(false, Ordering::Release);
        for range in self.protected() {
            self.leave(&mut inner, &range);
        }
    }

    /// Serves writers until [`Self::stop`]. A writer for whom there is no page waits in the queue.
    fn run(&self, mut pagemap: Pagemap) {
        let mut queue: VecDeque<Writer> = VecDeque::new();
        let (mut faults, mut foresight) = (Vec::new(), Foresight::default());
        let mut keep_coming = false;
        while !self.stop.load(Ordering::Acquire) {
            keep_coming = keep_coming && self.poll();
            if !keep_coming {
                let patience = if queue.is_empty() { 100 } else { 5 };
                self.wait_for_faults(Duration::from_millis(patience));
            }
            if let Err(error) = self.uffd.read_faults(&mut faults) {
                late_log::note("reading write faults", &error, "it is tried again");
            }
            let since = Instant::now();
            keep_coming = !faults.is_empty();
            self.wanted.store(keep_coming, Ordering::Release);
            let new = faults.drain(..).map(|at| Writer {
                address: at & !(PAGE_SIZE - 1),
                since,
                waited: false,
            });
            queue.extend(new);
            self.serve(&mut pagemap, &mut foresight, &mut queue);
            self.wanted.store(false, Ordering::Release);
            self.refill();
            self.serve(&mut pagemap, &mut foresight, &mut queue);
            let mut inner = self.lock();
            inner.stats.waiting = queue.len() as u64;
            inner.stats.cpu_ns = crate::sys::proc::thread_cpu_ns();
        }
        // Nothing is protected any more: who still waits goes on by the kernel's copy.
        for writer in queue {
            wake(&self.uffd, &writer.page());
        }
    }

    /// Whether somebody waits to write a page that is protected here, or comes to within so much time: his fault can be read, or
    /// the fault thread has just read it, and may wait for the lock.
    pub(crate) fn somebody_waits(&self, time: Duration) -> bool {
        self.wanted.load(Ordering::Acquire)
            || self.uffd.somebody_waits(time)
            || self.wanted.load(Ordering::Acquire)
    }

    /// Waits for a fault, or so long. If the kernel does not let it wait, it is asked what there is, and soon again.
    fn wait_for_faults(&self, patience: Duration) {
        if let Err(error) = self.uffd.wait_for_fault(patience) {
            late_log::note(
                "waiting for write faults",
                &error,
                "they are asked for again and again",
            );
            std::thread::sleep(POLL);
        }
    }

    /// Whether there is a fault soon.
    fn poll(&self) -> bool {
        let begin = Instant::now();
        loop {
            if self.uffd.somebody_waits(Duration::ZERO) {
                return true;
            }
            if begin.elapsed() > POLL {
                return false;
            }
            std::hint::spin_loop();
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

    fn serve(&self, pagemap: &mut Pagemap, foresight: &mut Foresight, queue: &mut VecDeque<Writer>) {
        for _ in 0..queue.len() {
            let Some(mut writer) = queue.pop_front() else {
                return;
            };
            let _urgent = Urgent::begin();
            let mut inner = self.lock();
            let page = self.page_at(writer.address);
            // Else another writer's fault on the same page was served already.
            if let Some(page) = page.filter(|page| self.is_shared(*page)) {
                let wanted = self.shared_from(page, writer.address, foresight.pages(writer.address));
                match self.break_pages(&mut inner, pagemap, page, &wanted) {
                    Served::Broken(pages) => foresight.note(writer.address, pages),
                    Served::Left => {}
                    Served::Waits => {
                        inner.stats.waits += u64::from(!std::mem::replace(&mut writer.waited, true));
                        queue.push_back(writer);
                        continue;
                    }
                }
            }
            wake(&self.uffd, &writer.page());
            let ns = u64::try_from(writer.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            inner.stats.latency.observe(ns);
        }
    }

    /// Pages from this one on, at this address, that are ours to break; as many as wanted.
    fn shared_from(&self, page: Page, address: usize, wanted: usize) -> Range<usize> {
        let ours = |ahead: &usize| {
            let at = address + bytes(*ahead);
            Page::try_from(*ahead)
                .ok()
                .and_then(|ahead| page.checked_add(ahead))
                .is_some_and(|page| self.page_at(at) == Some(page) && self.is_shared(page))
        };
        let pages = (1..wanted).find(|ahead| !ours(ahead)).unwrap_or(wanted);
        address..address + bytes(pages)
    }

    /// Breaks shared pages, of which the first is waited for; fewer if there are no more.
    fn break_pages(
        &self,
        inner: &mut Inner,
        pagemap: &mut Pagemap,
        first: Page,
        wanted: &Range<usize>,
    ) -> Served {
        // Private already? Then it may be pinned for reading, which unshares a page without asking us.
        let private = pagemap.private(wanted.clone());
        let end = private.map_or(wanted.start, |private| {
            private.first().map_or(wanted.end, |private| private.start)
        });
        let vmas = |n| self.vmas_left.fetch_add(n, Ordering::Relaxed);
        if end == wanted.start || vmas(-VMAS_PER_BREAK) < VMAS_PER_BREAK {
            self.leave(inner, &(wanted.start..wanted.start + PAGE_SIZE));
            return Served::Left;
        }
        let Some((fresh, pages)) = inner.reserve.take((end - wanted.start) / PAGE_SIZE) else {
            vmas(VMAS_PER_BREAK);
            return Served::Waits;
        };
        let range = wanted.start..wanted.start + bytes(pages);
        if let Err(error) = self.replace(inner, &range, fresh) {
            late_log::note(
                "replacing a shared page for a writer",
                &error,
                "the kernel copies it",
            );
            self.leave(inner, &(wanted.start..wanted.start + PAGE_SIZE));
            return Served::Left;
        }
        inner.broken.extend((first..).take(pages));
        inner.stats.broken += pages as u64;
        // Others may wait for the pages behind the first.
        wake(&self.uffd, &range);
        Served::Broken(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::{HostRange, Memory};
    use crate::seccomp::Part;
    use crate::sys::thread;
    use crate::sys::uffd::Uffd;
    use crate::sys::vma::{self, Anonymous};
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicU64;

    const PAGES: usize = 8;

    #[test]
    #[allow(unsafe_code)] // memory of the test's own
    fn a_fault_thread_that_dies_leaves_its_writers_to_the_kernel() {
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
        let reserve = Some(Reserve::default());
        let breaker = Arc::new(Breaker::new(Arc::new(tracker), Arc::new(memory), reserve).unwrap());
        let mut pagemap = Pagemap::open().unwrap();
        let (first, second) = (
            base..base + bytes(PAGES / 2),
            base + bytes(PAGES / 2)..base + bytes(PAGES),
        );
        breaker.adopt(&mut pagemap, &first);
        let write = |page: usize| {
            let at = (base + bytes(page)) as *const AtomicU64;
            // SAFETY: mapped, aligned, and only ever used as this.
            unsafe { &*at }.store(7, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| write(1));
            assert!(breaker.uffd.somebody_waits(Duration::from_secs(10)));
            breaker.wanted.store(true, Ordering::Release);
            let faults = Faults::of(breaker.clone());
            // What an embedder has every thread do first, before the thread serves anybody.
            let each: thread::Each = Arc::new(|part| assert_ne!(part, Part::Fault, "the fault thread dies"));
            let dies = scope.spawn(move || {
                thread::enter(Part::Start, Some(each));
                let served = Pagemap::open().unwrap();
                thread::spawn(Part::Fault, move || faults.serve(served)).map(drop)
            });
            assert!(dies.join().unwrap().is_err());
            writer.join().unwrap();
        });
        assert!(!breaker.somebody_waits(Duration::ZERO), "nobody is left to serve");
        // What is mapped afterwards is nobody's to serve either.
        breaker.adopt(&mut pagemap, &second);
        write(PAGES - 1);
        let page = breaker.page_at(base + bytes(1)).unwrap();
        assert!(breaker.kernel_broke(page), "the kernel copied it");
    }
}
