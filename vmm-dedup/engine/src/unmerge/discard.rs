//! Memory that a guest gives up: balloon, free page reporting, virtio-mem.
//!
//! A VMM frees such a range with madvise(MADV_DONTNEED), after which the guest must read zeros. On a mapping of the
//! store the call would bring the store's content back instead. [`Discarder::discard`] does what the VMM meant: it
//! maps fresh anonymous memory over whatever lies in store mappings, and frees the rest as ever.
//!
//! # Why nothing stale is ever read, and nothing else is lost
//!
//! - Only the scanning thread and the fault thread replace guest pages. The scanning thread does it under
//!   [`Discards`]' lock (merge windows, giving back), the fault thread under the breaker's; a discard holds both. So
//!   it never meets a page that is away, about to be put back, or half replaced.
//! - Which pages lie in store mappings says a bit for each page, which changes under the lock wherever it is set, and is set before
//!   a slot is mapped, so that it is right whenever the scanning thread may die. Where it is set too often (the fault thread
//!   just replaced the page) fresh memory is mapped over anonymous memory, which is the same as freeing it.
//! - What is packed of the range is given up first, under the table's lock: from then on its empty places are zeros
//!   ([`pack`](mod@crate::pack)).
//! - Between the call and its end, what the guest reads and writes there is undefined, as for MADV_DONTNEED itself:
//!   it sees the old content or zeros. A device that has the old page pinned keeps the old page, as it would.
//! - What the guest writes afterwards lies in memory that is not tracked, so it counts as written, until the scanning
//!   thread has taken note of the discard and registered it. It does so before it next replaces anything.
//!
//! The caller may be a thread whose system calls are filtered: only mmap, madvise and futex are used.

use crate::memory::bitmap::Bits;
use crate::memory::layout::{Memory, Page};
use crate::pack::Packer;
use crate::sync::{RwLock, read, write};
use crate::sys::home::Home;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::{guest, late_log, vma};
use crate::unmerge::cow::Breaker;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Held by whoever replaces guest pages; remembers what was discarded.
#[derive(Debug)]
pub(crate) struct Discards(Mutex<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    memory: Arc<Memory>,
    in_file: Arc<Bits>,
    discarded: Bits,
    any: bool,
}

impl Discards {
    pub(crate) fn new(memory: Arc<Memory>, in_file: Arc<Bits>) -> Self {
        let discarded = Bits::new(memory.end());
        Self(Mutex::new(Inner {
            memory,
            in_file,
            discarded,
            any: false,
        }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bytes(&self) -> usize {
        let inner = self.lock();
        inner.in_file.bytes() + inner.discarded.bytes()
    }
}

impl Inner {
    pub(crate) fn set_memory(&mut self, memory: Arc<Memory>, in_file: Arc<Bits>) {
        self.discarded = self.discarded.resized(memory.end());
        (self.memory, self.in_file) = (memory, in_file);
    }

    /// Pages discarded since the last call.
    pub(super) fn take(&mut self) -> Vec<Range<Page>> {
        if !std::mem::take(&mut self.any) {
            return Vec::new();
        }
        let runs = self.discarded.runs(0..Page::MAX);
        let pages = runs.iter().cloned().flatten();
        pages.for_each(|page| self.discarded.set(page, false));
        runs
    }
}

/// What one service needs to know of discards.
#[derive(Clone, Debug)]
struct Served {
    discards: Arc<Discards>,
    breaker: Arc<Breaker>,
    packer: Option<Arc<Packer>>,
}

/// Frees guest memory in the VMM's place. It exists before there is a service
/// ([`Supervisor::discarder`](crate::supervisor::Supervisor::discarder)), and frees memory as the VMM would until then; it works
/// for as long as it lives, also after the service has ended. Its clones are one.
///
/// # Why a discard meets a service's start in no wrong order
///
/// A service is adopted while nothing is merged yet (under a supervisor it starts paused), and not before every discard that does not know
/// it has returned: both hold the lock. So plain madvise never meets a mapping of the store.
///
/// In a child by fork it is of no use, whose locks may have been held by others when it was forked: a discard fails there, nothing is covered
/// and there is nothing to forget.
#[derive(Clone, Debug, Default)]
pub struct Discarder {
    home: Arc<Home>,
    served: Arc<RwLock<Vec<Served>>>,
}

impl Discarder {
    /// Keeps everybody out who discards or forgets, as a thread does that is at work.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Drop + '_ {
        write(&self.served)
    }

    /// Whether this is the process that it was made in, and no child of that.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    /// One that knows a service.
    pub(crate) fn of(discards: Arc<Discards>, breaker: Arc<Breaker>, packer: Option<Arc<Packer>>) -> Self {
        let served = Served {
            discards,
            breaker,
            packer,
        };
        Self {
            home: Arc::default(),
            served: Arc::new(RwLock::new(vec![served])),
        }
    }

    /// Learns of another one's services. No discard that does not know them goes on when this returns.
    pub(crate) fn adopt(&self, other: &Self) {
        let others = read(&other.served).clone();
        let mut served = write(&self.served);
        // Those whose memory has gone are not needed any more.
        served.retain(|old| old.has_memory());
        served.extend(others);
    }

    /// Does to a range of addresses what the VMM wants of madvise(MADV_DONTNEED): afterwards it reads as zeros and
    /// holds no memory, whether it was shared or not.
    ///
    /// # Safety
    /// As for madvise(MADV_DONTNEED): the range is guest memory, and nothing in it is needed any more.
    ///
    /// # Errors
    /// Those of madvise; in a child by fork [`io::ErrorKind::Unsupported`], and nothing is freed.
    #[allow(unsafe_code)] // frees guest memory
    pub unsafe fn discard(&self, start: usize, len: usize) -> io::Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.discard_and_tell(start, len, |_| ()) }
    }

    /// As [`Self::discard`]; `renewed` is told where fresh memory was mapped. No userfaultfd is registered there any more: a VMM
    /// that has registered one of its own (for memory that it was lent) registers it again. It is told in the calling thread, when all is
    /// freed and no lock is held: it may discard, and a panic of it is the caller's.
    ///
    /// # Safety
    /// As for [`Self::discard`].
    ///
    /// # Errors
    /// As for [`Self::discard`].
    #[allow(unsafe_code)] // frees guest memory
    pub unsafe fn discard_and_tell(
        &self,
        start: usize,
        len: usize,
        mut renewed: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        let end = start.checked_add(len).map(|end| end.next_multiple_of(PAGE_SIZE));
        let (Some(end), true) = (end, start.is_multiple_of(PAGE_SIZE)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if !self.is_here() {
            let text = "this is a child by fork, whose memory nobody deduplicates: discard in the process that the discarder was made in";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let range = start..end;
        let (mut fresh, mut kept) = (Vec::new(), Vec::new());
        let served = read(&self.served);
        // All at once, and in one order: what is freed below may be memory of each.
        let mut locked: Vec<_> = served
            .iter()
            .map(|service| (service, service.discards.lock()))
            .collect();
        for (service, inner) in &mut locked {
            service.discard(inner, &range, &mut fresh, &mut kept);
        }
        // SAFETY: as promised by the caller.
        let done = unsafe { vma::dont_need(range.start, range.len()) };
        drop(locked);
        drop(served);
        // No mapping was left for these: they get zeros of their own, by copy-on-write. Without the locks, since in
        // managed mode a write may have to wait for the fault thread.
        for at in kept.into_iter().flat_map(|run| run.step_by(PAGE_SIZE)) {
            // SAFETY: as promised by the caller; the place is mapped.
            unsafe { guest::store_page(at, &[0; vmm_dedup_protocol::key::PAGE_WORDS]) };
        }
        fresh.into_iter().for_each(&mut renewed);
        done
    }

    /// The VMM is about to unmap or replace a range: from now on it is freed as any other memory. To be called where nobody
    /// else tells the service ([`crate::DedupService::remove_range`]), since that has ended: other memory may come to the
    /// same addresses.
    pub fn forget(&self, start: usize, len: usize) {
        let range = start..start.saturating_add(len);
        if !self.is_here() {
            return;
        }
        for service in read(&self.served).iter() {
            let mut inner = service.discards.lock();
            inner.memory = Arc::new(inner.memory.without(&range));
            if let Some(packer) = &service.packer {
                packer.forget(&range);
            }
        }
    }

    /// Whether a range has memory of a service.
    #[must_use]
    pub fn covers(&self, start: usize, len: usize) -> bool {
        let range = start..start.saturating_add(len);
        let has = |service: &Served| {
            let inner = service.discards.lock();
            inner
                .memory
                .regions()
                .any(|r| r.start < range.end && range.start < r.end)
        };
        self.is_here() && read(&self.served).iter().any(has)
    }
}

impl Served {
    fn has_memory(&self) -> bool {
        self.discards.lock().memory.regions().next().is_some()
    }

    /// Maps `fresh` memory over what of a range lies in mappings of the store, and takes note that the range is freed; what got none
    /// is `kept`.
    fn discard(
        &self,
        inner: &mut Inner,
        range: &Range<usize>,
        fresh: &mut Vec<Range<usize>>,
        kept: &mut Vec<Range<usize>>,
    ) {
        for pages in inner.memory.within(range) {
            if let Some(packer) = &self.packer {
                packer.discard(&pages);
            }
            for run in inner.in_file.runs(pages.clone()) {
                let at = inner.memory.address(run.start);
                let run = at..at + bytes(run.len());
                // SAFETY: guest memory that the caller gives up.
                #[allow(unsafe_code)]
                let replaced = self
                    .breaker
                    .discard(&run, || unsafe { vma::renew(run.start, run.len()) });
                match replaced {
                    Ok(()) => {
                        inner.memory.advise_again(&run);
                        fresh.push(run);
                    }
                    Err(error) => {
                        late_log::note(
                            "freeing shared pages",
                            &error,
                            "zeros were written to copies of them",
                        );
                        kept.push(run);
                    }
                }
            }
            // What was kept still lies in mappings of files: its copies are found as any others.
            let kept = |page: Page| kept.iter().any(|run| run.contains(&inner.memory.address(page)));
            let gone: Vec<Page> = pages.filter(|page| !kept(*page)).collect();
            gone.into_iter().for_each(|page| inner.discarded.set(page, true));
            inner.any = true;
        }
    }
}
