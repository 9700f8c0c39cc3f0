//! What threads share that pack, rebuild, and give pages up.

use crate::error::Error;
use crate::memory::bitmap::Bits;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::pack::figures::Figures;
use crate::pack::table::{Returned, Table};
use crate::store::connection::{HeldSlot, Membership, Store};
use crate::sys::bell::Bell;
use crate::sys::cache;
use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::relocate::{track, track_again, wake};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma::{self, MEMORY_PAUSE};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::Slot;

#[cfg(feature = "inject")]
static DELAY_NS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Lets whoever touches a packed page whose first bit is set wait for so much longer, from now on: a leak, for tests that must find one.
#[cfg(feature = "inject")]
pub fn delay_by_first_bit(ns: u64) {
    DELAY_NS.store(ns, Ordering::Relaxed);
}

#[cfg(feature = "inject")]
#[allow(unsafe_code)] // reads a page of ours
fn delay(rebuilt: usize) {
    let delay = Duration::from_nanos(DELAY_NS.load(Ordering::Relaxed));
    // SAFETY: the page is ours, or a slot that is held.
    if !delay.is_zero() && unsafe { std::ptr::read_volatile(rebuilt as *const u8) } & 1 == 1 {
        let since = Instant::now();
        while since.elapsed() < delay {
            std::hint::spin_loop();
        }
    }
}

/// See the [room's](mod@crate::pack) text.
#[derive(Debug)]
pub(crate) struct Packer {
    pub(super) uffd: Arc<Uffd>,
    tracker: Arc<Uffd>,
    inner: Mutex<Inner>,
    /// Rung at the end.
    pub(super) bell: Bell,
    pub(super) stop: AtomicBool,
    /// The rebuilding thread has read faults that it has not served.
    pub(super) wanted: AtomicBool,
    began: Instant,
    /// So many faults more are met by a panic.
    #[cfg(test)]
    pub(super) panics: std::sync::atomic::AtomicU64,
    /// The panic comes with so many comparisons more.
    #[cfg(test)]
    pub(super) panics_comparing: std::sync::atomic::AtomicU64,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) memory: Arc<Memory>,
    /// Pages whose places are registered with the packer, or may be.
    registered: Bits,
    pub(super) table: Table,
    pub(super) figures: Figures,
}

/// What became of a page that was to be brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brought {
    /// It is there: it was packed.
    Rebuilt,
    /// It was there, or there is a page of zeros now.
    WasThere,
    /// Not yet: there is no memory for it.
    Later,
}

/// Whether places are registered with the packer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    Yes,
    /// Some of them: nobody may take their pages. They are there, and go home.
    Partly,
    /// They are the tracker's, as they were.
    No,
}

/// Whether registrations of neighbours have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Yes,
    /// The kernel lacks memory for that.
    Later,
    /// Some of the places are not ours (any more): unmapped, replaced by other memory, or forgotten.
    Foreign,
}

impl Packer {
    pub(crate) fn new(tracker: Arc<Uffd>, memory: Arc<Memory>) -> Result<Self, Error> {
        Ok(Self {
            uffd: Arc::new(Uffd::packer()?),
            tracker,
            inner: Mutex::new(Inner {
                registered: Bits::new(memory.end()),
                memory,
                table: Table::new().map_err(Error::Scratch)?,
                figures: Figures::default(),
            }),
            bell: Bell::new().map_err(Error::Eventfd)?,
            stop: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            began: Instant::now(),
            #[cfg(test)]
            panics: std::sync::atomic::AtomicU64::default(),
            #[cfg(test)]
            panics_comparing: std::sync::atomic::AtomicU64::default(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn seconds(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    pub(crate) fn figures(&self) -> Figures {
        let mut inner = self.lock();
        let (bytes, metadata) = inner.table.bytes();
        Figures {
            pages: inner.table.len() as u64,
            bytes,
            metadata_bytes: metadata + inner.registered.bytes() as u64,
            ..inner.figures
        }
    }

    /// CPU time of the rebuilding thread.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.lock().figures.cpu_ns
    }

    /// Memory came or went. Of what went nothing is packed any more.
    pub(crate) fn set_memory(&self, memory: Arc<Memory>) {
        let mut inner = self.lock();
        inner.registered = inner.registered.resized(memory.end());
        for page in inner.registered.runs(0..Page::MAX).into_iter().flatten() {
            if !memory.has(page) {
                inner.registered.set(page, false);
                inner.table.give_up(&(page..page + 1));
            }
        }
        inner.memory = memory;
    }

    /// The VMM is about to unmap or replace a range, of which the scanning thread does not hear any more: nothing is packed of it, and
    /// other memory at its addresses is nobody's to fill. Only memory is touched: the caller's system calls may be filtered.
    /// (Whoever touches it before it is unmapped, which nobody may, is woken again and again until then.)
    pub(crate) fn forget(&self, range: &Range<usize>) {
        let mut inner = self.lock();
        for pages in inner.memory.within(range) {
            inner.table.give_up(&pages);
            pages.for_each(|page| inner.registered.set(page, false));
        }
        inner.memory = Arc::new(inner.memory.without(range));
    }

    /// The guest gives pages up: from now on they are zeros. To be called while the discards' lock is held; only memory is touched.
    pub(crate) fn discard(&self, pages: &Range<Page>) {
        self.lock().table.give_up(pages);
    }

    /// Whether somebody waits for a page, as far as is known.
    pub(super) fn somebody_waits(&self) -> bool {
        self.wanted.load(Ordering::Acquire) || self.uffd.somebody_waits(Duration::ZERO)
    }

    /// Registers the places of consecutive pages, which are there, for missing pages, instead of for write tracking. If that fails
    /// they are as they were, or go home later.
    pub(super) fn arm(&self, map: &mut PageMap, pages: &Range<Page>) -> bool {
        let range = map.memory().addresses(pages);
        // Before they are, so that none stays registered that is not said to be, should this thread die in between.
        self.note_registered(pages, true);
        let armed = self.try_to_arm(&range);
        if armed == Armed::No {
            self.note_registered(pages, false);
            pages.clone().for_each(|page| map.requeue(page));
            return false;
        }
        pages.clone().for_each(|page| map.pack(page));
        if armed == Armed::Partly {
            let mut inner = self.lock();
            pages.clone().for_each(|page| inner.table.return_again(page));
        }
        armed == Armed::Yes
    }

    fn try_to_arm(&self, range: &Range<usize>) -> Armed {
        let step = "registering places of pages to be packed";
        if let Err(error) = self.tracker.unregister(range.start, range.len()) {
            late_log::note(step, &error, "the pages stay as they are");
            // A part of them may be registered no more.
            track_again(&self.tracker, range);
            return Armed::No;
        }
        let Err(error) = self.uffd.register(range.start, range.len(), Mode::Missing) else {
            return Armed::Yes;
        };
        late_log::note(step, &error, "the pages stay as they are");
        // For want of a mapping the kernel ends in the middle. Else it did nothing, and the place may be somebody else's.
        let partly = error.raw_os_error() == Some(libc::ENOMEM);
        if partly && self.uffd.unregister(range.start, range.len()).is_err() {
            return Armed::Partly;
        }
        track(
            &self.tracker,
            range.clone(),
            "tracking writes to pages that were not packed",
        );
        Armed::No
    }

    fn note_registered(&self, pages: &Range<Page>, registered: bool) {
        let inner = self.lock();
        pages
            .clone()
            .for_each(|page| inner.registered.set(page, registered));
    }

    /// What is in the table no more since the last call.
    pub(crate) fn take_returned(&self) -> Vec<Returned> {
        let mut inner = self.lock();
        inner.table.sweep();
        inner.table.take_returned()
    }

    /// Lets the places of pages that are not in the table go back to the tracker, as far as the kernel allows; those that it does
    /// not come with the next [`Self::take_returned`].
    pub(crate) fn go_home(&self, map: &mut PageMap, pages: impl IntoIterator<Item = Page>) {
        let is_away = |inner: &Inner, page: &Page| inner.table.get(*page).is_none();
        let mut pages: Vec<Page> = pages.into_iter().collect();
        {
            let inner = self.lock();
            pages.retain(|page| {
                map.memory().has(*page) && map.backing(*page).is_with_packer() && is_away(&inner, page)
            });
        }
        pages.sort_unstable();
        pages.dedup();
        let memory = map.memory().clone();
        let lent = |map: &PageMap, page: Page| map.is_lent(page);
        let runs: Vec<Range<Page>> = pages
            .chunk_by(|a, b| *b == a + 1 && memory.adjacent(*a) && lent(map, *a) == lent(map, *b))
            .map(|run| run[0]..run[run.len() - 1] + 1)
            .collect();
        for run in runs {
            self.send_home(map, run);
        }
    }

    fn send_home(&self, map: &mut PageMap, run: Range<Page>) {
        let range = map.memory().addresses(&run);
        {
            // Under the lock: the rebuilding thread fills no place that is not registered with the packer any more.
            let mut inner = self.lock();
            if let Err(error) = self.uffd.unregister(range.start, range.len()) {
                late_log::note(
                    "ending registrations of packed pages",
                    &error,
                    "the pages are there; it is tried again in the next pass",
                );
                return run.for_each(|page| inner.table.return_again(page));
            }
            run.clone().for_each(|page| inner.registered.set(page, false));
        }
        // Memory that is lent is somebody else's to register.
        if !map.is_lent(run.start) {
            track(&self.tracker, range, "tracking writes to pages that were packed");
        }
        run.for_each(|page| map.unpack(page));
    }

    /// Brings back all packed pages among some; whether all are back. What the kernel has no memory for is tried again, until no page
    /// has come back for so long. It stays packed then, as it was: the bytes are nowhere else.
    pub(crate) fn bring_back(&self, pages: &Range<Page>, patience: Duration) -> bool {
        let (mut failures, mut since) = (0usize, Instant::now());
        loop {
            let mut inner = self.lock();
            let Some(page) = inner.table.first(pages) else {
                return true;
            };
            let address = inner.memory.address(page);
            let brought = self.bring(&mut inner, page, false);
            drop(inner);
            if brought != Brought::Later {
                wake(&self.uffd, &(address..address + PAGE_SIZE));
                since = Instant::now();
                continue;
            }
            if since.elapsed() > patience {
                return false;
            }
            failures += 1;
            cry_at_times(failures);
            std::thread::sleep(MEMORY_PAUSE);
        }
    }

    /// Puts a packed page to its place; zeros where there is neither a page nor a packed one. Whoever waits is not woken.
    #[allow(unsafe_code)] // fills a place in the guest
    pub(super) fn bring(&self, inner: &mut Inner, page: Page, touched: bool) -> Brought {
        let address = inner.memory.address(page);
        let Some(since) = inner.table.get(page).map(|record| record.since) else {
            return self.fill_with_zeros(inner, page);
        };
        let rebuilt = inner.table.rebuild(page);
        #[cfg(feature = "inject")]
        rebuilt.into_iter().for_each(delay);
        let filled = match rebuilt {
            // SAFETY: the table's buffer is a page, and ours, as is the mapping of a slot that is held; the place is in the guest, of which there are no Rust references, and
            // the kernel fills it only if nothing is there.
            Some(rebuilt) => match unsafe { self.uffd.copy(address, rebuilt, PAGE_SIZE) } {
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                    match vma::populate_read(rebuilt, PAGE_SIZE) {
                        // There was no memory to read it in.
                        Ok(()) => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
                        Err(error) if is_broken(&error) => self.poison(inner, address),
                        Err(error) => Err(error),
                    }
                }
                filled => filled,
            },
            None => self.poison(inner, address),
        };
        if let Err(error) = filled
            && !self.is_done_with(address, &error)
        {
            return Brought::Later;
        }
        let after = self.seconds().saturating_sub(since);
        inner.table.remove(page, touched.then_some(after));
        inner.leave_no_trace();
        if touched {
            inner.figures.touched += 1;
        } else {
            inner.figures.brought_back += 1;
        }
        Brought::Rebuilt
    }

    fn poison(&self, inner: &mut Inner, address: usize) -> io::Result<()> {
        self.uffd.poison(address, PAGE_SIZE).inspect(|()| {
            inner.figures.broken += 1;
            late_log::note(
                "rebuilding a packed page",
                &io::Error::from_raw_os_error(libc::EHWPOISON),
                "the guest meets a memory error there",
            );
        })
    }

    /// A place in our registration that is empty and of which nothing is packed was given up, or never had a page. One that is not
    /// registered with the packer must not be filled, whoever waited there once: its page may be away in a window of merging.
    fn fill_with_zeros(&self, inner: &Inner, page: Page) -> Brought {
        if !inner.registered.get(page) {
            return Brought::WasThere;
        }
        let address = inner.memory.address(page);
        match self.uffd.zero_page(address, PAGE_SIZE) {
            Err(error) if !self.is_done_with(address, &error) => Brought::Later,
            _ => Brought::WasThere,
        }
    }

    /// After a place could not be filled: whether nothing is to be done there any more.
    fn is_done_with(&self, address: usize, error: &io::Error) -> bool {
        // There is a page: the kernel did it, or this is done a second time.
        if self.uffd.filled(address) {
            return true;
        }
        late_log::note(
            "bringing a packed page back",
            error,
            "it stays packed, and is tried again",
        );
        match error.raw_os_error() {
            // Nothing is registered there with anybody (mm/userfaultfd.c, uffd_mfill_lock). Only the packer ends its registrations, of
            // places whose page is not in the table: so the VMM has unmapped the place or mapped something else there without
            // telling, and what is there now must never get old bytes.
            Some(libc::ENOENT) => true,
            Some(libc::EINVAL) => {
                let again = || self.uffd.register(address, PAGE_SIZE, Mode::Missing);
                !vma::is_mapped(address, PAGE_SIZE) || again().is_err_and(|error| is_foreign(&error))
            }
            _ => false,
        }
    }
}

/// Memory that goes, and the end.
impl Packer {
    /// Gives up what is packed of memory that goes, and could not come back. Whoever has that memory still meets memory errors there,
    /// never other bytes. The memory is the packer's still.
    fn abandon(&self, range: &Range<usize>) {
        let mut inner = self.lock();
        for pages in inner.memory.within(range) {
            while let Some(page) = inner.table.first(&pages) {
                let address = inner.memory.address(page);
                let error = self.uffd.poison(address, PAGE_SIZE).err();
                if let Some(error) = &error
                    && !self.uffd.filled(address)
                {
                    // It stays a hole that nobody fills: its registration ends when it is unmapped.
                    inner.registered.set(page, false);
                    late_log::note(
                        "giving up packed pages of memory that goes",
                        error,
                        "whoever touches them waits until that is unmapped",
                    );
                } else {
                    late_log::note(
                        "bringing back packed pages of memory that goes",
                        &io::Error::from_raw_os_error(libc::ENOMEM),
                        "whoever touches them before that is unmapped meets a memory error",
                    );
                    wake(&self.uffd, &(address..address + PAGE_SIZE));
                }
                inner.table.give_up(&(page..page + 1));
            }
        }
    }

    /// As [`Self::abandon`], and whoever has the addresses next does not meet the packer's registrations, as far as the kernel allows that
    /// for so long.
    pub(crate) fn let_go(&self, range: &Range<usize>, patience: Duration) {
        self.abandon(range);
        let pages = self.lock().memory.within(range);
        pages
            .iter()
            .for_each(|pages| _ = self.end_registrations(pages, patience));
    }

    /// Ends the registrations of pages of which nothing is packed any more, and tries that until it has not worked for so long; whether
    /// all have ended.
    pub(super) fn end_registrations(&self, pages: &Range<Page>, patience: Duration) -> bool {
        let runs = {
            let inner = self.lock();
            let pages = inner.registered.runs(pages.clone()).into_iter().flatten();
            let pages: Vec<Page> = pages.filter(|page| inner.memory.has(*page)).collect();
            let neighbours = |a: &Page, b: &Page| *b == a + 1 && inner.memory.adjacent(*a);
            let runs = pages.chunk_by(neighbours);
            runs.map(|run| run[0]..run[run.len() - 1] + 1).collect::<Vec<_>>()
        };
        let (mut all, since) = (true, Instant::now());
        for run in runs {
            let left = || patience.saturating_sub(since.elapsed());
            match self.try_to_end_registration(&run, left()) {
                Ended::Yes => {}
                Ended::Later => all = false,
                // Some of it is not what it was. Page by page that is nobody's to wait for.
                Ended::Foreign => {
                    let later =
                        |page: Page| self.try_to_end_registration(&(page..page + 1), left()) == Ended::Later;
                    all &= run.filter(|page| later(*page)).count() == 0;
                }
            }
        }
        all
    }

    fn try_to_end_registration(&self, run: &Range<Page>, patience: Duration) -> Ended {
        let since = Instant::now();
        for failures in 1usize.. {
            let inner = self.lock();
            // Whoever forgets memory has it meanwhile, and the numbers of its pages are nobody's.
            if !run.clone().all(|page| inner.memory.has(page)) {
                return Ended::Foreign;
            }
            let range = inner.memory.addresses(run);
            let done = self.uffd.unregister(range.start, range.len());
            let foreign = done.as_ref().is_err_and(is_foreign);
            if done.is_ok() || (foreign && run.len() == 1) {
                run.clone().for_each(|page| inner.registered.set(page, false));
            }
            let Err(error) = done else { break };
            if foreign {
                return Ended::Foreign;
            }
            drop(inner);
            if since.elapsed() >= patience {
                late_log::note(
                    "ending registrations of packed pages",
                    &error,
                    "they end later, or when the memory is unmapped",
                );
                return Ended::Later;
            }
            late_log::note(
                "ending registrations of packed pages",
                &error,
                "it was tried again until it worked",
            );
            cry_at_times(failures);
            std::thread::sleep(MEMORY_PAUSE);
        }
        Ended::Yes
    }

    /// Ends the rebuilding thread, once it has brought everything back.
    pub(crate) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// Whether memory that could not be read in is lost (MADV_POPULATE_READ): it broke, or the device that it was swapped out to did.
fn is_broken(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EHWPOISON | libc::EFAULT))
}

/// Whether a place is another userfaultfd's, or no anonymous memory.
fn is_foreign(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EINVAL))
}

/// Says so, now and then, while a page cannot be brought back.
pub(super) fn cry_at_times(failures: usize) {
    if failures % 10_000 == 1_000 {
        let error = io::Error::from_raw_os_error(libc::ENOMEM);
        late_log::cry("bringing packed pages back", &error);
    }
}

impl Inner {
    /// Nobody is to tell by the time that the next copy of a slot takes that this one was made.
    fn leave_no_trace(&self) {
        if let Some(held) = self.table.last_freed() {
            cache::flush_page(held.address());
        }
    }

    /// Makes memory ready for the next segment, without the lock.
    pub(super) fn is_ready(&mut self) -> bool {
        self.table.sweep();
        self.table.is_ready()
    }
}

impl Packer {
    /// Slots that no record names any more.
    pub(super) fn take_freed(&self) -> Vec<HeldSlot> {
        self.lock().table.take_freed()
    }

    /// Pages in slots that are meant. The lock is free now and then.
    fn pages_in_slots(&self, is_meant: impl Fn(&HeldSlot) -> bool) -> impl Iterator<Item = (Page, HeldSlot)> {
        let mut from = Some(0);
        let some = move || {
            let (found, next) = self.lock().table.some_slots(from?, &is_meant);
            from = next;
            Some(found)
        };
        std::iter::from_fn(some).flatten()
    }

    /// Lets records name the slots that theirs have moved to. Returns those, for each of which there is a reference more, and whether all
    /// records have followed.
    pub(super) fn follow(&self, store: &Store) -> (Vec<Slot>, bool) {
        let (segments, membership) = (store.evacuated(), store.membership());
        let has_moved =
            |held: &HeldSlot| held.membership == membership && segments.contains(&held.slot.segment());
        let (mut taken, mut all) = (Vec::new(), true);
        for (page, old) in self.pages_in_slots(has_moved) {
            let new = store.forward(old.slot).and_then(|to| store.hold(to));
            let Some(new) = new.filter(|new| cache::are_equal(old.address(), new.address())) else {
                all = false;
                continue;
            };
            let slot = new.slot;
            if self.lock().table.replace_slot(page, &old, new) {
                taken.push(slot);
            }
        }
        (taken, all)
    }

    /// Pages in slots of other connections than this one.
    pub(super) fn pages_of_earlier(&self, now: Membership) -> impl Iterator<Item = Page> {
        self.pages_in_slots(move |held| held.membership != now)
            .map(|(page, _)| page)
    }

    /// Gathers what is packed in fewer segments.
    pub(super) fn compact(&self) {
        self.lock().table.compact();
    }

    /// Makes memory ready for the next segment.
    pub(super) fn make_ready(&self) {
        if self.lock().is_ready() {
            return;
        }
        if let Some(memory) = Table::make_ready() {
            self.lock().table.set_ready(memory);
        }
    }
}

#[cfg(test)]
impl Packer {
    pub(super) fn panic_serving(&self) {
        let left = self.panics.load(Ordering::Relaxed);
        if left > 0 {
            self.panics.store(left - 1, Ordering::Relaxed);
            panic!("while somebody waits");
        }
    }

    pub(super) fn panic_comparing(&self) {
        let left = self.panics_comparing.load(Ordering::Relaxed);
        self.panics_comparing
            .store(left.saturating_sub(1), Ordering::Relaxed);
        assert!(left != 1, "while pages are away");
    }
}
