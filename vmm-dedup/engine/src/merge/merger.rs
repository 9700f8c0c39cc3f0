//! Merging: take, verify, map, wake.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Take.* The pages' addresses are registered for missing pages, then UFFDIO_MOVE moves the pages into scratch
//!    memory of ours. The kernel does this page by page under the page table lock, and refuses (EBUSY) a page that is
//!    pinned, so no device or io_uring buffer points to what we hold. A vCPU or a system call that touches an address
//!    from now on finds it empty and waits; writes before the move are in the page that we got.
//! 2. *Verify.* Nobody else can reach the taken page, and a slot's content never changes while it is in the index and
//!    its epoch is not acknowledged (see `vmm_dedup_protocol::index`). So an equal comparison stays true.
//! 3. *Map.* The slot is mapped over the empty place, privately, from a read-only descriptor. Waiting threads still
//!    wait. A page that was not equal, or could not be mapped, is moved back: its place is still empty. A run with
//!    exceptions ([`crate::merge::bridged_runs`]) takes those as well; it is built aside with copies of them, and moved over the
//!    empty places in one step ([`crate::merge::run_builder`]). A copy is as good as the page: it was taken, so nobody has it pinned
//!    and nobody changes it.
//! 4. *Wake.* Only now are waiters woken; they fault again and find the mapping, or their own page.
//!
//! Anything unexpected ends in "put back", and putting back is tried until it works: the page exists nowhere else.
//!
//! # Huge pages
//!
//! A huge page all of whose pages have twins is taken as one: UFFDIO_MOVE moves its mapping, a microsecond instead of the
//! hundreds that splitting it takes, and it is freed as one. That works only into an empty place of 2 MiB without a page
//! table ([`HugeScratch`]); into any other the kernel splits the huge page on the way, which is slow and as safe. What
//! is put back is copied: moving a part of the huge page would split it. Pins count for all of a huge page, so if one page
//! is pinned all stay.
//!
//! Comparing 512 pages takes some hundred microseconds, too long for who waits meanwhile. So it is asked after every few pages
//! whether somebody does: then the huge page goes back at once, as one unless the kernel is out of huge pages (a writer who
//! waits may then have got a page table), and is taken another time.

use crate::error::Error;
use crate::memory::layout::{Memory, Page};
use crate::merge::request::{Item, Open, Outcome, return_exceptions};
use crate::merge::run_builder::Aside;
use crate::merge::window::Hold;
use crate::store::connection::Store;
use crate::sys::huge_scratch::HugeScratch;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::sched::Urgent;
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma::Anonymous;
use crate::unmerge::cow::Breaker;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most pages in one window.
pub(crate) const MAX_WINDOW: usize = CHUNK_PAGES;
/// Pages of scratch memory: windows go one behind the other, and what they leave is freed for many at once.
const SCRATCH_PAGES: usize = 2 * MAX_WINDOW;

/// Takes and maps. One per service, used by the scanning thread alone.
#[derive(Debug)]
pub(crate) struct Merger {
    tracker: Arc<Uffd>,
    scratch: Anonymous,
    /// Pages of it in use, from the first on.
    used: usize,
    /// Where huge pages are taken to as a whole, made when there is the first.
    huge: Option<HugeScratch>,
    /// Where runs with exceptions are built.
    aside: Option<Aside>,
}

/// Where a window's pages are while they are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    /// In scratch memory for small pages, which is freed for many windows at once.
    Pages,
    /// The window is a huge page: in a place where it can stay one.
    HugePage {
        /// Whether it goes back at once if somebody waits for it.
        give_back: bool,
    },
}

/// Items that lie within [`MAX_WINDOW`] consecutive pages of one region, in page order. Pages between them are not touched.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) items: &'a [Item],
    /// Which of its runs go on beyond the window.
    pub(crate) open: Open,
    pub(crate) take: Take,
}

/// The result of a window.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// One for each item.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long anybody may have waited for one of its pages, from when the kernel let him wait.
    pub(crate) stop_ns: u64,
}

/// How long somebody may wait while pages are away: until it is asked whether he does, and what is done then; or, behind the
/// last such question, until the end. (Who *writes* to a huge page that is away has the kernel clear a fresh one before it
/// lets him wait; that comes on top.)
struct Watch {
    start: Instant,
    asked: Instant,
    /// Longest time between two questions.
    unasked: Duration,
}

impl Watch {
    fn start() -> Self {
        let start = Instant::now();
        Self {
            start,
            asked: start,
            unasked: Duration::ZERO,
        }
    }

    /// Asks. (Nothing is away but the window, so it is the window that is waited for.)
    fn nobody_waits(&mut self, tracker: &Uffd) -> bool {
        self.unasked = self.unasked.max(self.asked.elapsed());
        self.asked = Instant::now();
        !tracker.wait_for_fault(Duration::ZERO)
    }

    fn longest_wait(&self) -> Duration {
        self.unasked + self.asked.elapsed()
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

impl Merger {
    pub(crate) fn new(tracker: Arc<Uffd>) -> Result<Self, Error> {
        Ok(Self {
            scratch: new_scratch(&tracker).map_err(Error::Scratch)?,
            tracker,
            used: 0,
            huge: None,
            aside: None,
        })
    }

    /// Merges a window.
    ///
    /// # Errors
    /// Only when the range cannot be registered, or there is no scratch memory; nothing was changed then.
    pub(crate) fn merge(
        &mut self,
        memory: &Memory,
        store: &Store,
        breaker: &Breaker,
        pagemap: &mut Pagemap,
        request: &Request<'_>,
    ) -> Result<Window, Error> {
        let Request { items, open, take } = *request;
        let (Some(first), Some(last)) = (items.first(), items.last()) else {
            return Ok(Window::default());
        };
        let pages = (last.page - first.page) as usize + 1;
        let tracker = self.tracker.clone();
        let huge = match take {
            Take::Pages => None,
            Take::HugePage { .. } => self.hold_huge(memory, first.page, &tracker),
        };
        let as_one = huge.is_some();
        let hold = huge.unwrap_or_else(|| self.hold(memory, first.page, pages, &tracker));
        let start = hold.start;
        let stretches = hold.stretches(items);
        hold.arm(&stretches)?;
        let urgent = Urgent::begin();
        let mut watch = Watch::start();
        let mut outcomes = if as_one {
            hold.take_whole(items)
        } else {
            hold.take(items)
        };
        let give_back = as_one && take == Take::HugePage { give_back: true };
        let go_on = || !give_back || watch.nobody_waits(&tracker);
        if !hold.verify(store, items, &mut outcomes, go_on) {
            hold.put_all_back(items, &mut outcomes);
        }
        return_exceptions(items, &mut outcomes, open);
        let runs = hold.map(store, &mut self.aside, items, &mut outcomes);
        if as_one {
            hold.put_copies_back(items, &outcomes);
        } else {
            hold.put_back(items, &outcomes);
        }
        for run in &runs {
            breaker.adopt(pagemap, run);
        }
        // Whoever waits for a page can go on; only where nothing is, waiting ends with the registration.
        let _ = tracker.wake(start, bytes(pages));
        let mut stop = watch.longest_wait();
        hold.disarm(&stretches, &runs);
        // A huge page that stayed is not tracked, and protecting its pages would split it.
        if !(as_one
            && outcomes
                .iter()
                .all(|o| matches!(o, Outcome::Pinned | Outcome::Wanted)))
        {
            hold.protect_again(items, &outcomes);
        }
        let _ = tracker.wake(start, bytes(pages));
        if outcomes.contains(&Outcome::Absent) {
            stop = watch.elapsed();
        }
        drop(urgent);
        if !runs.is_empty() {
            memory.advise_mapped(&(start..start + bytes(pages)));
        }
        if as_one {
            self.free_huge(pagemap, hold.scratch);
        }
        let stop_ns = u64::try_from(stop.as_nanos()).unwrap_or(u64::MAX);
        Ok(Window { outcomes, stop_ns })
    }

    /// As [`Self::hold`], for a huge page that is to stay one; `None` for want of memory.
    fn hold_huge<'a>(&mut self, memory: &Memory, first: Page, tracker: &'a Uffd) -> Option<Hold<'a>> {
        let made = self.huge.take().map_or_else(|| HugeScratch::new(tracker, 1), Ok);
        let scratch = made.inspect_err(|e| log::debug!("no place for a huge page: {e}"));
        let scratch = self.huge.insert(scratch.ok()?).place(0);
        Some(Hold {
            tracker,
            start: memory.address(first),
            scratch,
            first,
        })
    }

    /// Frees what is left of a huge page. If it was none any more there is a page table now, which would be in the next
    /// one's way: then the place is given up with it.
    fn free_huge(&mut self, pagemap: &mut Pagemap, place: usize) {
        let clean = pagemap.is_huge(place);
        let freed = self.huge.as_ref().is_some_and(|scratch| scratch.free(0).is_ok());
        if !(clean && freed) {
            self.huge = None;
        }
    }

    /// Scratch memory for consecutive pages that are about to be taken.
    pub(crate) fn hold<'a>(
        &mut self,
        memory: &Memory,
        first: Page,
        pages: usize,
        tracker: &'a Uffd,
    ) -> Hold<'a> {
        assert!(pages <= MAX_WINDOW);
        if self.used + pages > SCRATCH_PAGES {
            self.free_taken();
        }
        let scratch = self.scratch.base() + bytes(self.used);
        self.used += pages;
        Hold {
            tracker,
            start: memory.address(first),
            scratch,
            first,
        }
    }

    /// To be called after some windows: frees what they left behind.
    pub(crate) fn clean_up(&mut self) {
        self.aside = None;
        self.free_taken();
    }

    /// Frees the pages that were merged. What is taken next must find its place empty.
    fn free_taken(&mut self) {
        while let Err(error) = self.scratch.discard(0, bytes(self.used)) {
            log::error!("cannot free {} merged pages: {error}", self.used);
            if let Ok(fresh) = new_scratch(&self.tracker) {
                self.scratch = fresh;
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.used = 0;
    }
}

fn new_scratch(tracker: &Uffd) -> io::Result<Anonymous> {
    let scratch = Anonymous::new(SCRATCH_PAGES)?;
    scratch.hide();
    // UFFDIO_MOVE wants its destination registered and to have been anonymous memory in use: one page is enough.
    scratch.populate_part(0, PAGE_SIZE)?;
    scratch.discard(0, PAGE_SIZE)?;
    tracker.register(scratch.base(), bytes(SCRATCH_PAGES), Mode::Missing)?;
    Ok(scratch)
}
