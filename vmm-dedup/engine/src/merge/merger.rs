//! Admitted > merged, one window: take, verify, map, wake.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Take*, in a [`Window`]: nobody can reach a taken page, no device points to it, and whoever touches its place waits.
//! 2. *Verify.* A taken page cannot change, and a slot's content never changes in the file that is mapped: what the index ever named
//!    is not written again there, whatever becomes of the slot's number or of the connection. So an equal comparison stays true. The CPU
//!    makes it, or an engine that the operator trusts ([`Verifier`]); when this ends no engine has a page any more.
//! 3. *Map.* The slot is mapped over the empty place, privately, from a read-only descriptor. Waiting threads still
//!    wait. A page that was not equal, or could not be mapped, is moved back: its place is still empty. A run with
//!    exceptions ([`bridged_runs`]) takes those as well. It was mapped beside the guest before the window, is filled with copies
//!    of them, and moves over the empty places in one step ([`run_builder`]). A copy is as good as the page: it was taken,
//!    so nobody has it pinned and nobody changes it.
//! 4. *Wake.* Only now are waiters woken; they fault again and find the mapping, or their own page.
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
//!
//! [`bridged_runs`]: mod@crate::merge::bridged_runs
//! [`run_builder`]: mod@crate::merge::run_builder

use crate::account::ns;
use crate::compare::{PageId, Pair, StablePage, Verifier, With};
use crate::error::Error;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Memory;
use crate::merge::run::{Open, Outcome, Take, last_run, return_exceptions};
use crate::merge::run_builder::{Piece, Pieces, RunBuilder, STAYS, STAYS_FOR_MAPPINGS, is_exception};
use crate::merge::verify_engine::VerifyEngine;
use crate::store::connection::Store;
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::mend_hole;
use crate::sys::sched::Urgent;
use crate::sys::uffd::Uffd;
use crate::sys::vma::map_segment;
use crate::unmerge::address_space::AddressSpace;
use crate::window::{HugeScratch, PageSet, Window};
use std::ops::Range;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::Slot;

/// Takes and maps. One per service, used by the scanning thread alone.
#[derive(Debug)]
pub(crate) struct Merger {
    /// Where huge pages are taken to as a whole, made when there is the first.
    huge: Option<HugeScratch>,
    /// Where runs with exceptions are built.
    builder: RunBuilder,
    /// What compares taken pages with slots.
    pub(crate) verify_engine: VerifyEngine,
}

/// Requests that lie within [`MAX_WINDOW`](crate::window::MAX_WINDOW) consecutive pages of one region, in page order. Pages
/// between them are not touched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    pub(crate) requests: &'a [MergeRequest],
    /// Which of its runs go on beyond the window.
    pub(crate) open: Open,
    pub(crate) take: Take,
}

impl Batch<'_> {
    /// A request's page, counted from the window's first.
    fn offset(&self, request: &MergeRequest) -> usize {
        (request.page - self.requests[0].page) as usize
    }

    /// Offsets of consecutive requests.
    fn span(&self, requests: &[MergeRequest]) -> Range<usize> {
        let first = self.offset(&requests[0]);
        first..first + requests.len()
    }
}

/// The result of a window.
#[derive(Debug)]
pub(crate) struct Merged {
    /// One for each request.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long anybody may have waited for one of its pages, from when the kernel let him wait, nanoseconds.
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

    fn somebody_waits(&mut self, window: &Window<'_>) -> bool {
        self.unasked = self.unasked.max(self.asked.elapsed());
        self.asked = Instant::now();
        window.somebody_waits()
    }

    fn longest_wait(&self) -> Duration {
        self.unasked + self.asked.elapsed()
    }
}

impl Merger {
    pub(crate) fn new(verify_engine: VerifyEngine) -> Self {
        Self {
            huge: None,
            builder: RunBuilder::default(),
            verify_engine,
        }
    }

    /// Merges a window.
    ///
    /// # Errors
    /// Only when the range cannot be registered; nothing was changed then.
    pub(crate) fn merge(
        &mut self,
        memory: &Memory,
        store: &Store,
        space: &mut AddressSpace,
        batch: Batch<'_>,
    ) -> Result<Merged, Error> {
        let uffd = space.uffd.clone();
        let requests = batch.requests;
        let start = memory.address(requests[0].page);
        let pages = PageSet::of(requests.iter().map(|r| batch.offset(r)..batch.offset(r) + 1));
        let huge = match batch.take {
            Take::Pages => None,
            Take::HugePage { .. } => self.huge_place(&uffd),
        };
        let as_one = huge.is_some();
        let place = huge.unwrap_or_else(|| {
            let span = batch.offset(&requests[requests.len() - 1]) + 1;
            space.scratch.place(span)
        });
        let give_back = as_one && batch.take == Take::HugePage { give_back: true };
        let mut pieces = self.builder.prepare(&uffd, store, requests);
        let verifier = self.verify_engine.begin_window(store);
        // Whoever waits for a page that is away must not wait for memory, so what is noted of pages has its place before.
        let mut outcomes = Vec::with_capacity(requests.len());
        let mut runs = Vec::with_capacity(requests.len());
        let urgent = Urgent::begin();
        let mut window = Window::open(&uffd, start, place, &pages)?;
        let mut watch = Watch::start();
        if as_one {
            window.take_huge();
        } else {
            pages.runs().for_each(|run| window.take(run));
        }
        let taken = pages.runs().flat_map(|run| window.became(run));
        outcomes.extend(taken.map(|taken| Outcome::of_taking(*taken)));
        let verified = verify(verifier, &window, store, batch, &mut outcomes, || {
            !give_back || !watch.somebody_waits(&window)
        });
        if !verified {
            window.put_back_all();
            let taken = outcomes.iter_mut().filter(|outcome| outcome.was_taken());
            taken.for_each(|outcome| *outcome = Outcome::Contended);
        }
        return_exceptions(requests, &mut outcomes, batch.open);
        map_runs(
            &mut window,
            (&uffd, store, &mut pieces),
            batch,
            &mut outcomes,
            &mut runs,
        );
        if as_one {
            window.put_copies_back(0..CHUNK_PAGES);
        } else {
            window.put_back_all();
        }
        for run in &runs {
            space.breaker.adopt(&mut space.pagemap, run);
        }
        // Whoever waits for a page can go on; only where nothing is, waiting ends with the registration.
        window.wake();
        let mut stop = watch.longest_wait();
        window.close();
        if outcomes.contains(&Outcome::Absent) {
            stop = watch.start.elapsed();
        }
        let stays_huge = |o: &Outcome| matches!(o, Outcome::Pinned | Outcome::Contended);
        // A huge page that stayed is not tracked, and protecting its pages would split it.
        if !(as_one && outcomes.iter().all(stays_huge)) {
            protect_again(&uffd, start, batch, &outcomes);
        }
        drop(urgent);
        drop(pieces);
        if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
            memory.advise_mapped(&(first.start..last.end));
        }
        // Where a hole was mended the memory is new.
        let unmapped = |(request, outcome): (&MergeRequest, &Outcome)| {
            let page = memory.address(request.page);
            (*outcome == Outcome::NoVma).then_some(page..page + PAGE_SIZE)
        };
        let unmapped = requests.iter().zip(&outcomes).filter_map(unmapped);
        unmapped.for_each(|page| memory.advise_again(&page));
        if as_one {
            self.free_huge(&mut space.pagemap, place);
        }
        Ok(Merged {
            outcomes,
            stop_ns: ns(stop),
        })
    }

    /// A place in which a huge page can stay one; `None` for want of memory.
    fn huge_place(&mut self, uffd: &Uffd) -> Option<usize> {
        let made = self.huge.take().map_or_else(|| HugeScratch::new(uffd, 1), Ok);
        let then = "huge pages are taken in small ones, which takes longer";
        let scratch = made.inspect_err(|error| late_log::note("making room for a huge page", error, then));
        Some(self.huge.insert(scratch.ok()?).place(0))
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

    /// To be called after some windows.
    pub(crate) fn clean_up(&mut self) {
        self.builder.clean_up();
        self.verify_engine.clean_up();
    }
}

/// Maps runs of verified pages; notes the ranges that map the store then, in order.
fn map_runs(
    window: &mut Window<'_>,
    with: (&Uffd, &Store, &mut Pieces),
    batch: Batch<'_>,
    outcomes: &mut [Outcome],
    runs: &mut Vec<Range<usize>>,
) {
    let (uffd, store, pieces) = with;
    let requests = batch.requests;
    let mut end = requests.len();
    while let Some(place) = last_run(requests, outcomes, end) {
        end = place.start;
        let run = &requests[place.clone()];
        let pages = batch.span(run);
        let mapped = match run[0].slot {
            None => window.put_zeros(pages).map_err(|error| {
                late_log::note("mapping the zero page", &error, STAYS);
                Outcome::Refused
            }),
            Some(slot) => {
                let piece = run.iter().any(is_exception).then(|| pieces.take(&place));
                let mapped = piece
                    .transpose()
                    .and_then(|piece| map_slots(window, (uffd, store), slot, run, &pages, piece));
                mapped.map(|()| {
                    let run = window.address(pages.start)..window.address(pages.end);
                    match runs.last_mut() {
                        Some(next) if next.start == run.end => next.start = run.start,
                        _ => runs.push(run),
                    }
                })
            }
        };
        if let Err(outcome) = mapped {
            outcomes[place].fill(outcome);
        }
    }
    runs.reverse();
}

/// Maps a run over its empty places: `piece`, if it has exceptions.
#[allow(unsafe_code)] // maps over guest memory
fn map_slots(
    window: &mut Window<'_>,
    (uffd, store): (&Uffd, &Store),
    slot: Slot,
    run: &[MergeRequest],
    pages: &Range<usize>,
    piece: Option<Piece>,
) -> Result<(), Outcome> {
    let (at, len) = (window.address(pages.start), bytes(pages.len()));
    let mapped = if let Some(mut piece) = piece {
        for (n, _) in (0..).zip(run).filter(|(_, request)| is_exception(request)) {
            // SAFETY: the page was taken, so nobody writes it.
            unsafe { piece.fill(n, window.taken(pages.start + n)) };
        }
        // SAFETY: the range is guest memory whose pages were taken. Those that are shared were verified equal to the
        // slots, the others were filled in.
        unsafe { piece.move_to(at) }
    } else {
        let file = store.file_to_map(slot).ok_or(Outcome::Refused)?;
        // SAFETY: the range is guest memory whose pages were taken and verified equal to the slots.
        unsafe { map_segment(at, len, file, slot.offset()) }
    };
    if let Err(error) = mapped {
        late_log::note("mapping shared pages", &error, STAYS_FOR_MAPPINGS);
        mend_hole(uffd, &(at..at + len));
        return Err(Outcome::NoVma);
    }
    window.replaced(pages.clone());
    Ok(())
}

/// Compares what was taken with its slots, while `go_on` says so, which is asked again and again; whether to the end.
fn verify(
    verifier: &mut Verifier,
    window: &Window<'_>,
    store: &Store,
    batch: Batch<'_>,
    outcomes: &mut [Outcome],
    go_on: impl FnMut() -> bool,
) -> bool {
    let shared = |(request, outcome): &(&MergeRequest, &mut Outcome)| {
        !is_exception(request) && **outcome == Outcome::Merged
    };
    let taken = batch.requests.iter().zip(outcomes).filter(shared);
    let pairs = taken.filter_map(|(request, outcome)| {
        let pair = pair(window, store, batch.offset(request), request.slot);
        if pair.is_none() {
            // Its segment has not been announced here yet. The page is found again.
            *outcome = Outcome::Refused;
        }
        Some((pair?, outcome))
    });
    verifier.verify(pairs, |outcome| **outcome = Outcome::Different, go_on)
}

/// A page that was taken, and what is to replace it; `None` if that slot is not there.
#[allow(unsafe_code)] // compares raw pages
fn pair<'w>(window: &'w Window<'_>, store: &'w Store, page: usize, slot: Option<Slot>) -> Option<Pair<'w>> {
    // SAFETY: the page was taken: it is ours and readable, and nobody writes it before it goes back, for which the window
    // must be borrowed mutably.
    let taken = unsafe { StablePage::at(window.taken(page)) };
    let with = match slot {
        None => With::Zeros,
        Some(slot) => With::Slot {
            id: PageId::of_node(slot.number()),
            // SAFETY: the slot is mapped while the store is borrowed, and immutable while its epoch is not acknowledged.
            page: unsafe { StablePage::at(store.slot(slot)?) },
        },
    };
    Some(Pair { taken, with })
}

/// Pages that could not be taken stayed in place without tracking for a moment: what was written meanwhile must not
/// look unwritten for ever. They are keyed anew, protected from here on.
fn protect_again(uffd: &Uffd, start: usize, batch: Batch<'_>, outcomes: &[Outcome]) {
    let stayed = |o: &Outcome| matches!(o, Outcome::Pinned | Outcome::NotTaken);
    let requests = batch.requests.iter().zip(outcomes);
    for (request, _) in requests.filter(|(_, outcome)| stayed(outcome)) {
        let at = start + bytes(batch.offset(request));
        if let Err(error) = uffd.write_protect(at, PAGE_SIZE, true) {
            late_log::note("protecting pages that stayed", &error, "they count as written");
        }
    }
}
