//! Building huge pages again of small ones.
//!
//! # Why no write and no DMA is lost
//!
//! 512 small pages are gathered in a fresh huge page, which is put in their place:
//!
//! 1. The huge page is allocated and zeroed beside the guest, and what is swapped out is read in. If there is no memory, nothing was touched.
//! 2. Shared pages are write-protected on the breaker's userfaultfd, as for breaking (`crate::unmerge::cow`): they still
//!    are the store's, so nobody has them pinned for writing, and whoever writes from here on waits. Readers go on.
//! 3. Private pages are taken in a [`Window`]: pinned ones refuse, and whoever touches their place waits. A place without a
//!    page stays without, since its first touch waits as well; it stands for zeros.
//! 4. Now nobody can change any of the range. Its bytes are copied, and mremap() puts the copy over the range in one
//!    step: who reads sees the old page or the new one, which are equal, and who waits is woken afterwards.
//!
//! Pages that the service broke lie in mappings of their own, and taking each costs a system call and, for a guest, a flush of
//! its translations. If there are many, all would be away for as long as that takes. So these steps are done twice: first for
//! an eighth of the range at a time, with small pages as the copy, which leaves one mapping; that is then taken in one call.
//!
//! A pinned page, or one that the kernel copied on write and that is still in a mapping of the store (it may be pinned), ends it:
//! everything goes back as it was. Where it can be told that such pages are not pinned, they were moved out before.
//!
//! MADV_COLLAPSE would do without a copy of our own, but not here: it wants all of the range in one anonymous mapping, and
//! where sharing was broken by remapping it never is again.

use crate::account::{Account, ns};
use crate::memory::layout::Page;
use crate::memory::page_map::{PageMap, VMAS_PER_HUGE_PAGE};
use crate::memory::page_state::Known;
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::put_over;
use crate::sys::sched::Urgent;
use crate::sys::uffd::Uffd;
use crate::sys::vma::Anonymous;
use crate::sys::{guest, proc, vma};
use crate::unmerge::address_space::AddressSpace;
use crate::unmerge::cow::NotFrozen;
use crate::window::{PageSet, Taken, Window};
use std::io;
use std::ops::Range;
use std::time::Instant;
use vmm_dedup_protocol::key::PAGE_WORDS;

/// Bytes that the host must have available beyond the huge page: rebuilding gives up memory, and must not take the last.
const MEMORY_TO_SPARE: u64 = 128 << 20;
/// Stretches of private pages that are taken together with all the rest.
const FEW_STRETCHES: usize = 16;
/// Pages that are gathered at a time if there are more.
const PIECE: usize = CHUNK_PAGES / 8;
#[allow(clippy::cast_possible_truncation)] // 64
const PIECE_SPAN: Page = PIECE as Page;
/// Tries while writers go on breaking pages that are to stand still.
const TRIES: usize = 16;
/// Intervals to wait after a rebuild that failed; memory and pins do not come and go at once.
const PAUSE: u8 = 4;
/// The same where writers were in the way, and their pages can be moved out.
const BRIEF_PAUSE: u8 = 1;

/// What fails, for the log, and what becomes of it.
const STEP: &str = "building a huge page";
const STAYS: &str = "the small pages stay for now; memory or mappings (vm.max_map_count) are short";

/// Why a huge page was not built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NotBuilt {
    /// A page is pinned.
    Pinned,
    /// The kernel copied a page on write, so that it may be pinned.
    Copied,
    /// The host has too little memory, or no huge page; or a page was swapped out again and again.
    Memory,
    /// No mapping left, or a call failed.
    Other,
}

/// Builds a huge page of a chunk's small ones, or notes why not. On a failure some of them may have gone back to private memory.
///
/// Whether the kernel copied a page on write since such pages were moved out. That is not noted: they may be moved out again, or the
/// chunk is to be [put off](put_off_copied).
pub(crate) fn collapse(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    pass: u64,
    at: usize,
) -> bool {
    let done = try_to_collapse(map, space, account, pass, at);
    space.scratch.free();
    match done {
        Ok(()) => {
            map.note_collapsed(at);
            account.stats.huge_rebuilt_total += 1;
        }
        Err(NotBuilt::Copied) => return true,
        Err(reason) => put_off(map, account, at, reason, PAUSE),
    }
    false
}

/// A chunk of which the kernel copied a page stays small: until the next interval if something `tells` that such pages are not pinned,
/// else as long as for a pinned one.
pub(crate) fn put_off_copied(map: &mut PageMap, account: &mut Account, at: usize, tells: bool) {
    let pause = if tells { BRIEF_PAUSE } else { PAUSE };
    put_off(map, account, at, NotBuilt::Copied, pause);
}

fn put_off(map: &mut PageMap, account: &mut Account, at: usize, reason: NotBuilt, pause: u8) {
    log::debug!("the {at}th 2 MiB stay small: {reason:?}");
    let counter = match reason {
        NotBuilt::Pinned | NotBuilt::Copied => &mut account.stats.rebuild_pinned_total,
        NotBuilt::Memory => &mut account.stats.rebuild_memory_total,
        NotBuilt::Other => &mut account.stats.rebuild_other_total,
    };
    *counter += 1;
    map.delay_rebuild(at, pause);
    map.requeue_chunk(at);
}

fn try_to_collapse(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    pass: u64,
    at: usize,
) -> Result<(), NotBuilt> {
    let pages = map.chunk_at(at).pages.clone();
    if pages.len() != CHUNK_PAGES || !map.has_vmas_for(VMAS_PER_HUGE_PAGE) {
        return Err(NotBuilt::Other);
    }
    space.take_broken(map, account);
    let may_be_pinned = |page| {
        let state = map.state(page);
        let waits = matches!(state.known, Known::Pinned(retry) if !retry.is_due(pass));
        // (Also what was packed and could not go home is nobody's to take.)
        state.backing.stays_where_it_is() || waits
    };
    if pages.clone().any(|page| map.backing(page).is_copied()) {
        return Err(NotBuilt::Copied);
    }
    if pages.clone().any(may_be_pinned) {
        return Err(NotBuilt::Pinned);
    }
    let mut huge = fresh_huge_page(space)?;
    if private_stretches(map, at) > FEW_STRETCHES {
        let mut small = Anonymous::new(CHUNK_PAGES)
            .and_then(populated)
            .map_err(no_memory)?;
        for first in pages.clone().step_by(PIECE) {
            put_in_place(map, space, account, at, &(first..first + PIECE_SPAN), &mut small)?;
        }
    }
    put_in_place(map, space, account, at, &pages, &mut huge)
}

/// Mappings with private pages in a chunk, about.
fn private_stretches(map: &PageMap, at: usize) -> usize {
    let pages = map.chunk_at(at).pages.clone();
    let private = |page| !map.backing(page).in_file_mapping();
    let begins = |page: &Page| private(*page) && (*page == pages.start || !private(*page - 1));
    pages.clone().filter(begins).count() + usize::from(map.chunk(at).thp.broken)
}

/// An empty huge page of our own.
fn fresh_huge_page(space: &mut AddressSpace) -> Result<Anonymous, NotBuilt> {
    let spare = MEMORY_TO_SPARE.max(space.breaker.stats().1.floor_bytes);
    let needed = spare.saturating_add(2 * HUGE_SIZE as u64);
    if proc::mem_available().is_none_or(|available| available < needed) {
        return Err(NotBuilt::Memory);
    }
    let area = Anonymous::new_huge().and_then(populated).map_err(no_memory)?;
    let is_huge = space.pagemap.is_huge(area.base());
    is_huge.then_some(area).ok_or(NotBuilt::Memory)
}

fn populated(area: Anonymous) -> io::Result<Anonymous> {
    area.populate()?;
    Ok(area)
}

/// Memory for copies could not be had.
#[allow(clippy::needless_pass_by_value)] // for map_err
fn no_memory(error: io::Error) -> NotBuilt {
    late_log::note(STEP, &error, STAYS);
    NotBuilt::Memory
}

/// Puts copies of consecutive pages of a chunk into their place, made at the front of `fresh`.
fn put_in_place(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    at: usize,
    pages: &Range<Page>,
    fresh: &mut Anonymous,
) -> Result<(), NotBuilt> {
    let mut last = NotFrozen::Broken;
    for _ in 0..TRIES {
        // What the fault thread replaced for a writer is private now.
        space.take_broken(map, account);
        match try_to_put_in_place(map, space, account, pages, fresh) {
            Ok(()) => {
                for page in pages.clone() {
                    account.stats.unmerged_total += u64::from(map.backing(page).maps_a_slot());
                    map.made_private(page);
                }
                map.note_own_mapping(at);
                return Ok(());
            }
            Err(NotPut::For(reason)) => return Err(reason),
            // What the kernel copied stays where it is.
            Err(NotPut::NotFrozen(NotFrozen::Broken)) if !space.breaker.managed() => {
                return Err(NotBuilt::Copied);
            }
            Err(NotPut::NotFrozen(not_frozen)) => last = not_frozen,
        }
    }
    Err(match last {
        NotFrozen::Broken => NotBuilt::Pinned,
        NotFrozen::Unseen => NotBuilt::Memory,
        NotFrozen::Refused => NotBuilt::Other,
    })
}

/// Why copies were not put into place.
#[derive(Debug)]
enum NotPut {
    /// For a reason that stays.
    For(NotBuilt),
    /// Shared pages did not stand still: it may be tried again.
    NotFrozen(NotFrozen),
}

impl From<NotFrozen> for NotPut {
    fn from(not_frozen: NotFrozen) -> Self {
        Self::NotFrozen(not_frozen)
    }
}

fn try_to_put_in_place(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    pages: &Range<Page>,
    fresh: &mut Anonymous,
) -> Result<(), NotPut> {
    // Nobody frees any of it meanwhile.
    let discards = space.discards.clone();
    let mut discards = discards.lock();
    space.note_discards(&mut discards, map);
    let start = map.memory().address(pages.start);
    let range = start..start + bytes(pages.len());
    let (mut shared, mut private): (Vec<Range<usize>>, PageSet) = (Vec::new(), PageSet::default());
    for (offset, page) in pages.clone().enumerate() {
        let backing = map.backing(page);
        let address = start + bytes(offset);
        if backing.is_copied() {
            return Err(NotPut::For(NotBuilt::Copied));
        }
        if !backing.maps_a_slot() {
            private.insert(offset..offset + 1);
            continue;
        }
        match shared.last_mut() {
            Some(run) if run.end == address => run.end += PAGE_SIZE,
            _ => shared.push(address..address + PAGE_SIZE),
        }
    }
    read_in(&mut space.pagemap, &range, &shared).map_err(|error| NotPut::For(no_memory(error)))?;
    let breaker = space.breaker.clone();
    let place = space.scratch.place(pages.len());
    map.memory().advise_copy(&range, fresh.base());
    breaker.with_writers_waiting(&mut space.pagemap, &shared, || {
        let clock = Instant::now();
        let done = replace(&space.uffd, place, &range, &shared, &private, fresh);
        account.stats.rebuild.observe(ns(clock.elapsed()));
        done.map_err(NotPut::For)
    })
}

/// Reads in what is swapped out, of the guest's own pages and of the store's: who waits for a page that is away must not wait for a
/// disk as well.
fn read_in(pagemap: &mut Pagemap, range: &Range<usize>, shared: &[Range<usize>]) -> io::Result<()> {
    let swapped = pagemap.swapped(range.clone())?;
    let mut parts = swapped.iter().chain(shared);
    parts.try_for_each(|part| vma::populate_read(part.start, part.len()))
}

/// Steps 3 and 4. The shared pages stand still.
#[allow(unsafe_code)] // copies and replaces guest pages
fn replace(
    uffd: &Uffd,
    place: usize,
    range: &Range<usize>,
    shared: &[Range<usize>],
    private: &PageSet,
    fresh: &mut Anonymous,
) -> Result<(), NotBuilt> {
    let pages = range.len() / PAGE_SIZE;
    let _urgent = Urgent::begin();
    let mut window = Window::open(uffd, range.start, place, private).map_err(|_| NotBuilt::Other)?;
    for run in private.runs() {
        let known = |taken: &Taken| matches!(taken, Taken::Yes | Taken::Absent);
        window.take(run.clone());
        if !window.became(run).iter().all(known) {
            // Everything goes back, and all that was armed counts as written.
            return Err(NotBuilt::Pinned);
        }
    }
    let copies = fresh.base();
    let copy = |from: usize, offset: usize| {
        let mut words = [0; PAGE_WORDS];
        // SAFETY: what was taken is ours, and shared pages are readable and stand still; the copies' place is ours.
        unsafe {
            guest::copy_page(from, &mut words);
            guest::store_page(copies + offset, &words);
        }
    };
    let taken = window.away().runs().flatten();
    taken.for_each(|page| copy(window.taken(page), bytes(page)));
    let shared = shared.iter().flat_map(|run| run.clone().step_by(PAGE_SIZE));
    shared.for_each(|address| copy(address, address - range.start));
    // SAFETY: the copies hold what the guest's pages hold, and nobody can change those.
    let put = unsafe { put_over(fresh.take_front(pages), range) };
    put.map_err(|error| {
        late_log::note(STEP, &error, STAYS);
        NotBuilt::Other
    })?;
    window.replaced(0..pages);
    window.track(0..pages);
    window.close();
    Ok(())
}
