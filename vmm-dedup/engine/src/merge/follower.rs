//! Moved > followed: pages of this guest that map slots whose pages have moved map the new ones.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Freeze* ([`Frozen`]): nobody writes the pages from here on, and nobody pins them for writing.
//! 2. *Look.* What is anonymous memory now (the kernel has copied it for a writer) stays as it is. The rest are pages of the
//!    store, which nobody has pinned for writing: that pin would have made the kernel copy them.
//! 3. *Compare*, with the CPU, what the guest sees with the new slot: neither changes. The store is not trusted to have copied
//!    right.
//! 4. *Map and thaw*: see [`Frozen`]. A device that reads the old page goes on reading that, which holds the same.
//!
//! Readers never wait. What is not equal, or cannot be followed for another reason, goes on mapping the old slot, whose
//! references keep it. When its segment has gone it is made private.

use crate::account::ns;
use crate::compare::{PageId, Pair, StablePage, With};
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Memory;
use crate::merge::ready;
use crate::merge::run::{Outcome, continues};
use crate::store::connection::Store;
use crate::sys::guest;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::sched::Urgent;
use crate::unmerge::address_space::AddressSpace;
use crate::window::Frozen;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Most pages that follow at once, and most stretches of them: what a writer may have to wait for goes with these.
pub(crate) const MOST_PAGES: usize = 512;
const MOST_STRETCHES: usize = 32;

/// The result for a batch of requests.
#[derive(Debug)]
pub(crate) struct Followed {
    /// One for each request: [`Outcome::Merged`] if it maps the new slot, [`Outcome::Absent`] if the kernel has copied it.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long a writer may have waited, nanoseconds.
    pub(crate) stall_ns: u64,
}

/// Lets pages that map slots map others. Requests are in page order, and no more than [`batch_len`] says.
pub(crate) fn follow(
    memory: &Memory,
    store: &Store,
    space: &mut AddressSpace,
    requests: &[MergeRequest],
) -> Followed {
    touch(memory, store, requests);
    let stretches: Vec<&[MergeRequest]> = stretches(memory, requests).collect();
    let addresses = stretches.iter().map(|stretch| {
        let start = memory.address(stretch[0].page);
        start..start + bytes(stretch.len())
    });
    let (clock, urgent) = (Instant::now(), Urgent::begin());
    let breaker = space.breaker.clone();
    let Some(mut frozen) = breaker.freeze(addresses) else {
        return Followed {
            outcomes: vec![Outcome::NotTaken; requests.len()],
            stall_ns: 0,
        };
    };
    let (mut outcomes, mut mapped) = (Vec::with_capacity(requests.len()), Vec::new());
    for (run, stretch) in frozen.runs_mut().zip(&stretches) {
        if run.somebody_waits(Duration::ZERO) {
            break;
        }
        let compared = match run.copies(&mut space.pagemap) {
            Ok(copies) => {
                let mut compared = compare(run, &copies, store, stretch);
                map_runs(run, store, stretch, &mut compared, &mut mapped);
                compared
            }
            Err(_) => vec![Outcome::NotTaken; stretch.len()],
        };
        outcomes.extend(compared);
    }
    outcomes.resize(requests.len(), Outcome::Contended);
    frozen.adopt(&mut space.pagemap, &mapped);
    drop(urgent);
    let stall_ns = ns(clock.elapsed());
    mapped.iter().for_each(|at| memory.advise_mapped(at));
    Followed { outcomes, stall_ns }
}

/// How many of the requests make one batch.
pub(crate) fn batch_len(memory: &Memory, requests: &[MergeRequest]) -> usize {
    let mut stretches = 1;
    let fits = |at: &usize| {
        stretches += usize::from(!neighbours(memory, &requests[*at - 1], &requests[*at]));
        stretches <= MOST_STRETCHES
    };
    let most = requests.len().min(MOST_PAGES);
    1 + (1..most).take_while(fits).count()
}

fn neighbours(memory: &Memory, a: &MergeRequest, b: &MergeRequest) -> bool {
    b.page == a.page + 1 && memory.adjacent(a.page)
}

/// Consecutive pages.
fn stretches<'r>(memory: &Memory, requests: &'r [MergeRequest]) -> impl Iterator<Item = &'r [MergeRequest]> {
    requests.chunk_by(|a, b| neighbours(memory, a, b))
}

/// Reads a word of each page and slot, so that nobody waits while they come in from swap.
#[allow(unsafe_code)] // reads guest memory
fn touch(memory: &Memory, store: &Store, requests: &[MergeRequest]) {
    ready::touch_slots(store, requests);
    for request in requests {
        // SAFETY: guest memory stays mapped while the service runs.
        unsafe { guest::touch(memory.address(request.page)) };
    }
}

/// Compares frozen pages of the store with the slots that they moved to.
#[allow(unsafe_code)] // reads guest memory
fn compare(
    run: &Frozen<'_>,
    copies: &[Range<usize>],
    store: &Store,
    stretch: &[MergeRequest],
) -> Vec<Outcome> {
    let outcome = |(request, at): (&MergeRequest, usize)| {
        if copies.iter().any(|copy| copy.contains(&at)) {
            return Outcome::Absent;
        }
        let Some((slot, (_, page))) = request.slot.and_then(|slot| Some((slot, store.slot(slot)?))) else {
            return Outcome::Refused;
        };
        let with = With::Slot {
            id: PageId::of_node(slot.number()),
            // SAFETY: the slot is mapped while the store is borrowed, and it is not written after it could be found.
            page: unsafe { StablePage::at(page) },
        };
        // SAFETY: it is the store's, so nobody has it pinned for writing.
        let taken = unsafe { run.page(at) };
        if (Pair { taken, with }).equal() {
            Outcome::Merged
        } else {
            Outcome::Different
        }
    };
    let addresses = run.range().clone().step_by(PAGE_SIZE);
    stretch.iter().zip(addresses).map(outcome).collect()
}

/// Maps what was equal, from the last run to the first: the kernel splits a mapping cheaper at its end.
#[allow(unsafe_code)] // maps over guest memory
fn map_runs(
    frozen: &mut Frozen<'_>,
    store: &Store,
    stretch: &[MergeRequest],
    outcomes: &mut [Outcome],
    mapped: &mut Vec<Range<usize>>,
) {
    let start = frozen.range().start;
    let mut end = stretch.len();
    while end > 0 {
        if outcomes[end - 1] != Outcome::Merged {
            end -= 1;
            continue;
        }
        let mut first = end - 1;
        while first > 0
            && outcomes[first - 1] == Outcome::Merged
            && continues(&stretch[first - 1], &stretch[first])
        {
            first -= 1;
        }
        let at = start + bytes(first)..start + bytes(end);
        let slot = stretch[first].slot;
        let done = match slot.and_then(|slot| Some((slot, store.slot(slot)?.0))) {
            // SAFETY: the pages are the store's and equal to the slots.
            Some((slot, file)) => unsafe { frozen.map_slots(at.clone(), file, slot.offset()) },
            None => Err(std::io::ErrorKind::NotFound.into()),
        };
        match done {
            Ok(()) => mapped.push(at),
            Err(_) => outcomes[first..end].fill(Outcome::NoVma),
        }
        end = first;
    }
}
