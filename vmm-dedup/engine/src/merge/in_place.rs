//! Replacing pages in mappings of store files where they are, while they are frozen ([`Frozen`]): what following, healing and
//! moving copies out of mappings of store files have in common.
//!
//! # Why no write and no DMA is lost
//!
//! Nobody writes a frozen page, and nobody pins it for writing from then on. What is left is who had it pinned before.
//!
//! - A page that maps a slot is replaced only if it is not anonymous memory now: whoever pins such a page for writing makes the
//!   kernel copy it.
//! - A copy is anonymous memory. It is replaced only if a [`Proof`] says that it is not pinned.
//!
//! A slot that takes a page's place is compared with it first, at the guest's own address, by whatever verifies ([`Verifier`]): neither
//! changes. A device that reads the page meanwhile cannot write it, and has no part in what tells of pins, which was looked at before. A page that stays
//! private ([`Role::Exception`], [`Role::MovedOut`]) is copied instead, while nobody changes it, and the copy takes its place in one
//! step. The memory for copies is there before anything is frozen ([`Room`]): who waits for a page must not wait for reclaim.
//!
//! A page that was not replaced is as it was: so the work ends at any page when somebody waits, or when its time is over
//! ([`Haste`]). But where writers wait all the time something must be done all the same: the first [`COMPARED`] pages and the first
//! mapping of a batch do not heed them.

use crate::compare::{PageId, Pair, StablePage, Verifier, With};
use crate::lookup::request::{MergeRequest, Role};
use crate::memory::layout::Memory;
use crate::merge::ready;
use crate::merge::run::{Open, Outcome, last_run, return_exceptions};
use crate::merge::run_builder::{Pieces, RunBuilder, STAYS, is_exception};
use crate::store::connection::Store;
use crate::sys::fork::Child;
use crate::sys::guest;
use crate::sys::late_log;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::pinners::NobodyPins;
use crate::sys::relocate::track;
use crate::sys::uffd::Uffd;
use crate::sys::vma::Anonymous;
use crate::unmerge::address_space::AddressSpace;
use crate::unmerge::cow::{Breaker, FrozenRuns};
use crate::window::Frozen;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::key::PAGE_WORDS;

/// Most pages that are frozen at once, and most stretches of them: what a writer may have to wait for goes with these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) pages: usize,
    pub(crate) stretches: usize,
}

impl Limit {
    /// So many times as much.
    pub(crate) fn times(self, n: usize) -> Self {
        Self {
            pages: self.pages * n,
            stretches: self.stretches * n,
        }
    }

    /// How many of the requests, which are in page order, it takes.
    pub(crate) fn fits(self, memory: &Memory, requests: &[MergeRequest]) -> usize {
        let mut stretches = 1;
        let fits = |at: &usize| {
            stretches += usize::from(!neighbours(memory, &requests[*at - 1], &requests[*at]));
            stretches <= self.stretches
        };
        let most = requests.len().min(self.pages);
        1 + (1..most).take_while(fits).count()
    }
}

/// Pages that are compared or copied, and mappings that are made, from one question whether somebody waits to the next.
const COMPARED: usize = 64;
const MAPPED: usize = 16;

/// What ends the work on frozen pages early.
#[derive(Clone, Copy, Debug)]
struct Haste<'a> {
    breaker: &'a Breaker,
    until: Instant,
}

impl Haste<'_> {
    fn is_late(&self) -> bool {
        Instant::now() > self.until
    }

    fn is_over(&self) -> bool {
        self.is_late() || self.breaker.somebody_waits(Duration::ZERO)
    }

    /// The same, asked at every so manieth step only.
    fn is_over_at(&self, step: usize, every: usize) -> bool {
        step.is_multiple_of(every) && self.is_over()
    }
}

fn neighbours(memory: &Memory, a: &MergeRequest, b: &MergeRequest) -> bool {
    b.page == a.page + 1 && memory.adjacent(a.page)
}

/// Consecutive pages.
pub(crate) fn stretches<'r>(
    memory: &Memory,
    requests: &'r [MergeRequest],
) -> impl Iterator<Item = &'r [MergeRequest]> {
    requests.chunk_by(|a, b| neighbours(memory, a, b))
}

/// Addresses of consecutive pages.
pub(crate) fn addresses(memory: &Memory, stretch: &[MergeRequest]) -> Range<usize> {
    let start = memory.address(stretch[0].page);
    start..start + bytes(stretch.len())
}

/// Reads a word of each page and slot, so that nobody waits while they come in from swap.
#[allow(unsafe_code)] // reads guest memory
pub(crate) fn touch(memory: &Memory, store: &Store, requests: &[MergeRequest]) {
    ready::touch_slots(store, requests);
    for request in requests {
        // SAFETY: guest memory stays mapped while the service runs.
        unsafe { guest::touch(memory.address(request.page)) };
    }
}

/// How it is known of frozen pages that they are not pinned for writing.
#[derive(Debug)]
pub(crate) enum Proof<'c> {
    /// It is not: anonymous memory stays as it is.
    None,
    /// Nobody can have pages pinned.
    NobodyPins(NobodyPins),
    /// Forked before the pages were frozen; and nobody holds them in a way that no fork tells of.
    Child(
        #[expect(dead_code, reason = "it need only live")] &'c Child,
        NobodyPins,
    ),
    /// It is not known, and copies are replaced all the same: for the test that shows what comes of it.
    #[cfg(feature = "blind-heals")]
    Blind,
}

impl Proof<'_> {
    /// What of frozen pages is anonymous memory, and what of that is not pinned for writing.
    fn look(
        &self,
        run: &Frozen<'_>,
        stretch: &[MergeRequest],
        pagemap: &mut Pagemap,
    ) -> io::Result<FoundCopies> {
        let copies = run.copies(pagemap)?;
        // What is no copy as far as can be seen is replaced for no other role.
        let moved = stretch.iter().any(|request| request.role == Role::Moved);
        let unseen = moved.then(|| run.unseen(pagemap)).transpose()?;
        let free = match self {
            Self::None => Vec::new(),
            Self::NobodyPins(_) => copies.clone(),
            Self::Child(..) => pagemap.shared_with_child(run.range())?,
            #[cfg(feature = "blind-heals")]
            Self::Blind => copies.clone(),
        };
        Ok(FoundCopies {
            copies,
            free,
            unseen: unseen.unwrap_or_default(),
        })
    }
}

/// What frozen pages are.
#[derive(Debug)]
struct FoundCopies {
    /// Anonymous memory.
    copies: Vec<Range<usize>>,
    /// What of it is not pinned for writing.
    free: Vec<Range<usize>>,
    /// Not in memory, and so perhaps a copy.
    unseen: Vec<Range<usize>>,
}

/// Where copies are made, had before anything is frozen. To be dropped when nothing is frozen any more.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Runs with exceptions, of each stretch.
    pieces: Vec<Pieces>,
    /// A page for each that leaves the mappings of store files.
    fresh: Option<Anonymous>,
}

impl Room {
    /// Makes room for what of these requests is copied. Runs that cannot be built are left out when it comes to them.
    ///
    /// # Errors
    /// No memory for pages that leave: nothing is to be frozen then. It is noted.
    pub(crate) fn prepare(
        memory: &Memory,
        store: &Store,
        tracker: &Uffd,
        requests: &[MergeRequest],
    ) -> io::Result<Self> {
        let leave = requests.iter().filter(|request| request.role == Role::MovedOut);
        let pages = leave.count();
        let fresh = (pages > 0).then(|| populated(pages)).transpose();
        let fresh = fresh.inspect_err(|error| late_log::note("making room for copies", error, STAYS))?;
        let mut pieces = Vec::new();
        if requests.iter().any(is_exception) {
            let mut builder = RunBuilder::default();
            let of = |stretch| builder.prepare(tracker, store, stretch);
            pieces.extend(stretches(memory, requests).map(of));
        }
        Ok(Self { pieces, fresh })
    }
}

fn populated(pages: usize) -> io::Result<Anonymous> {
    let area = Anonymous::new(pages)?;
    area.populate()?;
    Ok(area)
}

/// What pages of a stretch are replaced by the help of.
#[derive(Debug)]
struct Means<'a> {
    memory: &'a Memory,
    store: &'a Store,
    /// Runs with exceptions of the stretch, if it may have any.
    pieces: Option<&'a mut Pieces>,
    fresh: Option<&'a mut Anonymous>,
    haste: Haste<'a>,
}

/// A place in the guest that something else was put into.
#[derive(Debug)]
struct Put {
    at: Range<usize>,
    /// A mapping of the store; else anonymous memory.
    slots: bool,
    zeros: bool,
}

/// Replaces what it can of frozen pages, run by run, until somebody waits or the time is over; the outcome of each request. Also
/// returns what kept it from looking at the page tables: nothing is logged while pages are frozen.
pub(crate) fn replace(
    memory: &Memory,
    (store, verifier): (&Store, &mut Verifier),
    space: &mut AddressSpace,
    mut frozen: FrozenRuns<'_>,
    (requests, room): (&[MergeRequest], &mut Room),
    proof: &Proof<'_>,
    until: Instant,
) -> (Vec<Outcome>, Option<io::Error>) {
    let breaker = frozen.breaker();
    let haste = Haste { breaker, until };
    let (mut outcomes, mut put) = (Vec::with_capacity(requests.len()), Vec::new());
    let (mut rest, mut failure) = (Outcome::Contended, None);
    let mut pieces = room.pieces.iter_mut();
    for (run, stretch) in frozen.runs_mut().zip(stretches(memory, requests)) {
        let first = outcomes.is_empty();
        if haste.is_late() || !first && haste.is_over() {
            break;
        }
        let found = match proof.look(run, stretch, &mut space.pagemap) {
            Ok(found) => found,
            Err(error) => {
                (rest, failure) = (Outcome::Untold, Some(error));
                break;
            }
        };
        let mut compared = compare(run, &found, (store, &mut *verifier), stretch, haste);
        return_exceptions(stretch, &mut compared, Open::default());
        let mut means = Means {
            memory,
            store,
            pieces: pieces.next(),
            fresh: room.fresh.as_mut(),
            haste,
        };
        put_runs(&mut means, run, stretch, &mut compared, &mut put);
        outcomes.extend(compared);
    }
    outcomes.resize(requests.len(), rest);
    let slots = put.iter().filter(|put| put.slots);
    let slots: Vec<Range<usize>> = slots.map(|put| put.at.clone()).collect();
    frozen.adopt(&mut space.pagemap, &slots);
    for Put { at, slots, zeros } in put {
        if slots {
            memory.advise_mapped(&at);
            continue;
        }
        if zeros {
            memory.advise_again(&at);
        }
        track(&space.uffd, at, "tracking writes to pages that were moved out");
    }
    (outcomes, failure)
}

/// Compares frozen pages with what shall take their places, by whatever verifies: some at a time, and more only if nobody waits.
fn compare(
    run: &Frozen<'_>,
    found: &FoundCopies,
    (store, verifier): (&Store, &mut Verifier),
    stretch: &[MergeRequest],
    haste: Haste<'_>,
) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(stretch.len());
    for (n, part) in stretch.chunks(COMPARED).enumerate() {
        if n > 0 && haste.is_over() {
            break;
        }
        let addresses = (run.range().start + bytes(n * COMPARED)..).step_by(PAGE_SIZE);
        let known = part.iter().zip(addresses.clone());
        outcomes.extend(known.map(|(request, at)| found.before_comparing(request, at)));
        let these = part.iter().zip(&mut outcomes[n * COMPARED..]).zip(addresses);
        let pairs = these.filter_map(|((request, outcome), at)| {
            if *outcome != Outcome::Merged || stays_private(request) {
                return None;
            }
            let pair = pair(run, at, store, request);
            if pair.is_none() {
                // Its segment has not been announced here yet.
                *outcome = Outcome::Refused;
            }
            Some((pair?, outcome))
        });
        // (It is not called off. An engine has its time for so many, then the CPU compares.)
        verifier.verify(pairs, |outcome| **outcome = Outcome::Different, || true);
    }
    outcomes.resize(stretch.len(), Outcome::Contended);
    outcomes
}

/// A frozen page, and what is to replace it; `None` if that slot is not there.
#[allow(unsafe_code)] // reads guest memory
fn pair<'r>(run: &'r Frozen<'_>, at: usize, store: &'r Store, request: &MergeRequest) -> Option<Pair<'r>> {
    let with = match request.slot {
        None => With::Zeros,
        Some(slot) => With::Slot {
            id: PageId::of_node(slot.number()),
            // SAFETY: the slot is mapped while the store is borrowed, and it is not written after it could be found.
            page: unsafe { StablePage::at(store.slot(slot)?) },
        },
    };
    // SAFETY: it is frozen. It is the store's, so that nobody has it pinned for writing, or known not to be pinned.
    let taken = unsafe { run.page(at) };
    Some(Pair { taken, with })
}

/// Whether a page is copied into memory of its own, and compared with nothing.
fn stays_private(request: &MergeRequest) -> bool {
    matches!(request.role, Role::Exception | Role::MovedOut)
}

impl FoundCopies {
    /// What becomes of a frozen page as far as its pins tell: [`Outcome::Merged`] if it may be replaced.
    fn before_comparing(&self, request: &MergeRequest, at: usize) -> Outcome {
        let within = |ranges: &[Range<usize>]| ranges.iter().any(|range| range.contains(&at));
        match request.role {
            Role::Moved if within(&self.copies) => Outcome::Absent,
            // It is tried again, once it was read in.
            Role::Moved if within(&self.unseen) => Outcome::NotTaken,
            Role::Moved => Outcome::Merged,
            _ if within(&self.free) => Outcome::Merged,
            _ => Outcome::Pinned,
        }
    }
}

/// Puts what was found right into place, run by run.
fn put_runs(
    means: &mut Means<'_>,
    frozen: &mut Frozen<'_>,
    stretch: &[MergeRequest],
    outcomes: &mut [Outcome],
    put: &mut Vec<Put>,
) {
    let haste = means.haste;
    let start = frozen.range().start;
    let (mut end, mut runs) = (stretch.len(), 0);
    while let Some(place) = last_run(stretch, outcomes, end) {
        let first_of_all = put.is_empty();
        if haste.is_late() || !first_of_all && haste.is_over_at(runs, MAPPED) {
            let rest = outcomes[..place.end].iter_mut();
            rest.filter(|outcome| **outcome == Outcome::Merged)
                .for_each(|outcome| *outcome = Outcome::Contended);
            return;
        }
        runs += 1;
        end = place.start;
        let at = start + bytes(place.start)..start + bytes(place.end);
        let run = &stretch[place.clone()];
        match put_run(means, frozen, (run, place.clone()), &at) {
            Ok(false) => outcomes[place].fill(Outcome::Contended),
            Ok(true) => put.push(Put {
                at,
                slots: run[0].slot.is_some(),
                zeros: run[0].slot.is_none() && run[0].role != Role::MovedOut,
            }),
            Err(outcome) => outcomes[place].fill(outcome),
        }
    }
}

/// A call that maps something over guest pages failed.
#[allow(clippy::needless_pass_by_value)] // for map_err
fn not_mapped(error: io::Error) -> Outcome {
    late_log::note(
        "mapping over guest pages",
        &error,
        "they stay as they are for now",
    );
    Outcome::NoVma
}

/// Replaces a run, which has this place in its stretch. Whether it was in time.
#[allow(unsafe_code)] // replaces guest pages
fn put_run(
    means: &mut Means<'_>,
    frozen: &mut Frozen<'_>,
    (run, place): (&[MergeRequest], Range<usize>),
    at: &Range<usize>,
) -> Result<bool, Outcome> {
    let Some(slot) = run[0].slot else {
        if run[0].role == Role::MovedOut {
            let fresh = means.fresh.as_deref_mut().ok_or(Outcome::Refused)?;
            return move_out(means.memory, frozen, at, fresh, means.haste);
        }
        // SAFETY: the pages are zero, and not pinned for writing.
        unsafe { frozen.map_zeros(at.clone()) }.map_err(not_mapped)?;
        return Ok(true);
    };
    let file = means.store.file_to_map(slot).ok_or(Outcome::Refused)?;
    if !run.iter().any(is_exception) {
        // SAFETY: the pages are equal to the slots. They are the store's, or not pinned for writing.
        unsafe { frozen.map_slots(at.clone(), file, slot.offset()) }.map_err(not_mapped)?;
        return Ok(true);
    }
    let pieces = means.pieces.as_mut().ok_or(Outcome::Refused)?;
    let mut piece = pieces.take(&place)?;
    let exceptions = (0..).zip(run).filter(|(_, request)| is_exception(request));
    for (copied, (page, _)) in exceptions.enumerate() {
        if copied > 0 && means.haste.is_over_at(copied, COMPARED) {
            pieces.leave(piece);
            return Ok(false);
        }
        // SAFETY: guest memory is mapped, and nobody writes it while it is frozen.
        unsafe { piece.fill(page, at.start + bytes(page)) };
    }
    // SAFETY: the pages are equal to the slots, or were just copied. They are the store's, or not pinned for writing, and nobody
    // can write them.
    unsafe { frozen.put(at.clone(), piece.into_address()) }.map_err(not_mapped)?;
    Ok(true)
}

/// Puts copies into memory of their own, which is populated. Whether it was in time.
#[allow(unsafe_code)] // replaces guest pages
fn move_out(
    memory: &Memory,
    frozen: &mut Frozen<'_>,
    at: &Range<usize>,
    fresh: &mut Anonymous,
    haste: Haste<'_>,
) -> Result<bool, Outcome> {
    let pages: Vec<usize> = (0..at.len() / PAGE_SIZE).collect();
    if fresh.pages() < pages.len() {
        return Err(Outcome::Refused);
    }
    for (n, part) in pages.chunks(COMPARED).enumerate() {
        if n > 0 && haste.is_over() {
            return Ok(false);
        }
        copy(at, fresh.base(), part);
    }
    let fresh = fresh.take_front(pages.len());
    memory.advise_copy(at, fresh);
    // SAFETY: each page was just copied, is not pinned for writing, and nobody can write it.
    unsafe { frozen.put(at.clone(), fresh) }.map_err(not_mapped)?;
    Ok(true)
}

/// Copies frozen guest pages into memory of ours.
#[allow(unsafe_code)] // copies guest pages
fn copy(from: &Range<usize>, to: usize, pages: &[usize]) {
    let mut page = [0; PAGE_WORDS];
    for offset in pages.iter().map(|page| bytes(*page)) {
        // SAFETY: guest memory is mapped; it is frozen, so the copy is not torn. `to` is our own.
        unsafe {
            guest::copy_page(from.start + offset, &mut page);
            guest::store_page(to + offset, &page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::HostRange;
    use crate::sys::inject::{Call, Injection, Times};
    use crate::sys::vma;
    use crate::window::Afterwards;
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use vmm_dedup_protocol::Slot;

    const PAGES: usize = 2 * COMPARED;

    #[test]
    #[allow(unsafe_code)] // memory of the test's own
    fn what_is_not_in_memory_follows_only_once_it_was_read_in() {
        let Ok(breaker) = Uffd::breaker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            return eprintln!("SKIPPED: no userfaultfd");
        };
        const FEW: usize = 4;
        let (file, _content) = vmm_dedup_protocol::mapping::staging_memfd(bytes(FEW)).unwrap();
        let area = Anonymous::new(FEW).unwrap();
        let (base, all) = (area.base(), area.base()..area.base() + bytes(FEW));
        // SAFETY: our own mapping, which nothing refers to.
        unsafe { vma::map_segment(base, bytes(FEW), file.as_fd(), 0) }.unwrap();
        let slot = |page| Slot::try_new(page).unwrap();
        let stretch: Vec<MergeRequest> = (0..4).map(|page| MergeRequest::moved(page, slot(page))).collect();
        let mut pagemap = Pagemap::open().unwrap();
        let mut become_of_them = || {
            let frozen = Frozen::freeze(&breaker, all.clone(), Afterwards::Unregistered).unwrap();
            let found = Proof::None.look(&frozen, &stretch, &mut pagemap).unwrap();
            let places = stretch.iter().zip(all.clone().step_by(PAGE_SIZE));
            places
                .map(|(request, at)| found.before_comparing(request, at))
                .collect::<Vec<_>>()
        };
        // Never touched: the page tables say of these what they say of copies that are swapped out.
        assert_eq!(become_of_them(), [Outcome::NotTaken; FEW]);
        vma::populate_read(base, bytes(2)).unwrap();
        // SAFETY: mapped, aligned, and only ever used as this.
        unsafe { &*(base as *const AtomicU64) }.store(7, Ordering::Relaxed);
        let (merged, unseen) = (Outcome::Merged, Outcome::NotTaken);
        assert_eq!(become_of_them(), [Outcome::Absent, merged, unseen, unseen]);
    }

    #[test]
    #[allow(unsafe_code)] // memory of the test's own
    fn while_somebody_waits_some_pages_are_moved_out_and_not_many() {
        let Ok(tracker) = Uffd::tracker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let (file, _content) = vmm_dedup_protocol::mapping::staging_memfd(bytes(PAGES)).unwrap();
        let area = Anonymous::new(PAGES).unwrap();
        let base = area.base();
        let ranges = [HostRange::try_new(base, bytes(PAGES)).unwrap()];
        let memory = Arc::new(Memory::new(&ranges).unwrap());
        // SAFETY: our own mapping, which nothing refers to.
        unsafe { vma::map_segment(base, bytes(PAGES), file.as_fd(), 0) }.unwrap();
        // SAFETY: mapped, aligned, and only ever used as this.
        let word = |page: usize| unsafe { &*((base + bytes(page)) as *const AtomicU64) };
        (0..PAGES).for_each(|page| word(page).store(page as u64, Ordering::Relaxed));
        let breaker = Breaker::new(Arc::new(tracker), memory.clone(), None).unwrap();
        let all = base..base + bytes(PAGES);
        for call in [Call::MapAnonymous, Call::Populate] {
            let injection = Injection::begin(call, libc::ENOMEM, Times::Always);
            assert!(populated(PAGES).is_err(), "{call:?}");
            assert!(injection.failed() > 0, "{call:?}");
        }
        let mut fresh = populated(2 * PAGES).unwrap();
        std::thread::scope(|scope| {
            let mut runs = breaker.freeze([all.clone()]).unwrap();
            let writer = scope.spawn(|| word(0).store(99, Ordering::Relaxed));
            assert!(breaker.somebody_waits(Duration::from_secs(10)));
            let haste = Haste {
                breaker: &breaker,
                until: Instant::now() + Duration::from_secs(60),
            };
            let mut put = |frozen: &mut Frozen<'_>, at| move_out(&memory, frozen, at, &mut fresh, haste);
            let frozen = runs.runs_mut().next().unwrap();
            // What takes memory was made before: none of it is asked for while somebody waits.
            let none = [Call::MapAnonymous, Call::Populate]
                .map(|call| Injection::begin(call, libc::ENOMEM, Times::Always));
            assert_eq!(put(frozen, &all), Ok(false));
            let some = base..base + bytes(COMPARED);
            let injection = Injection::begin(Call::Remap, libc::ENOMEM, Times::Always);
            assert_eq!(put(frozen, &some), Err(Outcome::NoVma));
            assert!(injection.failed() > 0 && frozen.replaced().is_empty());
            drop(injection);
            assert_eq!(put(frozen, &some), Ok(true));
            assert_eq!(frozen.replaced(), [some]);
            assert_eq!(none.map(|injection| injection.failed()), [0, 0]);
            drop(runs);
            writer.join().unwrap();
        });
        assert_eq!(word(0).load(Ordering::Relaxed), 99);
        assert!((1..PAGES).all(|page| word(page).load(Ordering::Relaxed) == page as u64));
    }
}
