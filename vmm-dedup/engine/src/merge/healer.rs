//! Admitted > merged, for pages that the kernel copied: anonymous memory in mappings of the store, which cannot be taken.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Freeze* ([`Frozen`]): nobody writes the pages from here on, and nobody pins them for writing.
//! 2. *Grace.* Another process that writes this one's memory (a debugger, by process_vm_writev or /proc/PID/mem) has pages
//!    pinned while it copies into them, which is microseconds, and no file of ours shows it. Whoever had begun before the
//!    pages were frozen is given [`GRACE`] to end. If somebody waits for a page meanwhile, all are thawed at once, and are tried
//!    another time: so nobody waits for the grace.
//! 3. *Ask.* [`Pinners`] tells whether any open file can have pages pinned. Whoever had them pinned before they were frozen has
//!    done so through a file that was open then. It still is, or its I/O goes on although it was closed, which
//!    [`direct_io`](mod@crate::sys::direct_io) cannot see either.
//! 4. *Compare*, with the CPU, at the guest's own address: nobody changes the page, and a slot does not change.
//! 5. *Map and thaw*: see [`Frozen`].
//!
//! What remains: a debugger that is held up for longer than the grace between pinning a page and writing it loses that
//! write.

use crate::account::ns;
use crate::compare::{PageId, Pair, StablePage, With};
use crate::config::Config;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Memory;
use crate::merge::ready;
use crate::merge::run::{Outcome, continues};
use crate::store::connection::Store;
use crate::sys::direct_io::DirectIo;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::pinners::{NobodyPins, Pinners};
use crate::sys::sched::Urgent;
use crate::unmerge::address_space::AddressSpace;
use crate::unmerge::cow::FrozenRuns;
use crate::window::Frozen;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long who writes this process's memory from outside may take for that.
const GRACE: Duration = Duration::from_millis(5);
/// Most pages that are healed at once, and most stretches of them: what a writer may have to wait for goes with these.
pub(crate) const MOST_PAGES: usize = 2048;
const MOST_STRETCHES: usize = 64;

/// Merges copies.
#[derive(Debug)]
pub(crate) struct Healer {
    pinners: Pinners,
    /// The VMM says that nobody pins unseen.
    visible: bool,
    /// Why nothing could be healed when it was last tried.
    refused: Option<String>,
}

/// The result for a batch of requests.
#[derive(Debug)]
pub(crate) struct Healed {
    /// One for each request.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long a writer may have waited, nanoseconds.
    pub(crate) stall_ns: u64,
}

impl Healed {
    /// Nothing was done.
    pub(crate) fn none(requests: &[MergeRequest], outcome: Outcome) -> Self {
        Self {
            outcomes: vec![outcome; requests.len()],
            stall_ns: 0,
        }
    }
}

impl Healer {
    pub(crate) fn new(config: &Config, files: &DirectIo) -> Self {
        Self {
            pinners: Pinners::new(files),
            visible: config.pins_are_visible,
            refused: None,
        }
    }

    /// Why copies stay private, as of the last try.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Whether copies can be merged, for all that can be told before they are frozen.
    pub(crate) fn can_heal(&mut self, managed: bool) -> bool {
        !managed && self.nobody_pins().is_some()
    }

    fn nobody_pins(&mut self) -> Option<NobodyPins> {
        if !self.visible {
            let why = "the VMM does not say that pins are visible (pins_are_visible)";
            self.refused = Some(why.to_owned());
            return None;
        }
        match self.pinners.look() {
            Ok(nobody) => {
                self.refused = None;
                Some(nobody)
            }
            Err(pinner) => {
                self.refused = Some(format!("pages may be pinned: {pinner}"));
                None
            }
        }
    }

    /// Merges copies, which are in page order and no more than [`batch_len`] says.
    pub(crate) fn heal(
        &mut self,
        memory: &Memory,
        store: &Store,
        space: &mut AddressSpace,
        requests: &[MergeRequest],
    ) -> Healed {
        ready::touch_slots(store, requests);
        let stretches: Vec<&[MergeRequest]> = stretches(memory, requests).collect();
        let addresses = stretches.iter().map(|stretch| {
            let start = memory.address(stretch[0].page);
            start..start + bytes(stretch.len())
        });
        let breaker = space.breaker.clone();
        let Some(mut frozen) = breaker.freeze(addresses) else {
            return Healed::none(requests, Outcome::NotTaken);
        };
        if somebody_waits(&frozen, GRACE) {
            return Healed::none(requests, Outcome::Contended);
        }
        let (clock, _urgent) = (Instant::now(), Urgent::begin());
        let Some(nobody_pins) = self.nobody_pins() else {
            return Healed::none(requests, Outcome::Pinned);
        };
        let (mut outcomes, mut mapped) = (Vec::with_capacity(requests.len()), Vec::new());
        for (run, stretch) in frozen.runs_mut().zip(&stretches) {
            if run.somebody_waits(Duration::ZERO) {
                break;
            }
            let copies = run.copies(&mut space.pagemap).unwrap_or_default();
            let mut compared = compare(run, &copies, store, stretch, &nobody_pins);
            map_runs(run, store, stretch, &mut compared, &nobody_pins, &mut mapped);
            outcomes.extend(compared);
        }
        outcomes.resize(requests.len(), Outcome::Contended);
        let slots: Vec<Range<usize>> = mapped
            .iter()
            .filter(|run| !run.zeros)
            .map(|run| run.at.clone())
            .collect();
        frozen.adopt(&mut space.pagemap, &slots);
        let stall_ns = ns(clock.elapsed());
        for Mapped { at, zeros } in mapped {
            if zeros {
                memory.advise_again(&at);
                // Not tracked if that fails, so it counts as written for ever: it is only never merged again.
                let _ = space.register(&at);
            } else {
                memory.advise_mapped(&at);
            }
        }
        Healed { outcomes, stall_ns }
    }
}

/// A place in the guest that something else was mapped over.
struct Mapped {
    at: Range<usize>,
    /// Empty anonymous memory; else slots.
    zeros: bool,
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

fn somebody_waits(frozen: &FrozenRuns<'_>, time: Duration) -> bool {
    // All wait for the same descriptor.
    frozen.runs().next().is_some_and(|run| run.somebody_waits(time))
}

/// Compares frozen copies with their slots.
#[allow(unsafe_code)] // reads guest memory
fn compare(
    run: &Frozen<'_>,
    copies: &[Range<usize>],
    store: &Store,
    stretch: &[MergeRequest],
    _: &NobodyPins,
) -> Vec<Outcome> {
    let outcome = |(request, at): (&MergeRequest, usize)| {
        // What was swapped out since it was looked at stays there.
        if !copies.iter().any(|copy| copy.contains(&at)) {
            return Outcome::NotTaken;
        }
        let with = match request.slot {
            None => With::Zeros,
            Some(slot) => match store.slot(slot) {
                None => return Outcome::Different,
                Some((_, page)) => With::Slot {
                    id: PageId::of_node(slot.number()),
                    // SAFETY: the slot is mapped while the store is borrowed, and immutable while its epoch is not acknowledged.
                    page: unsafe { StablePage::at(page) },
                },
            },
        };
        // SAFETY: nobody has frozen pages pinned.
        let taken = unsafe { run.page(at) };
        if (Pair { taken, with }).equal() {
            Outcome::Merged
        } else {
            Outcome::Different
        }
    };
    stretch
        .iter()
        .zip(run.range().clone().step_by(PAGE_SIZE))
        .map(outcome)
        .collect()
}

/// Maps what was equal, from the last run to the first: the kernel splits a mapping cheaper at its end.
#[allow(unsafe_code)] // maps over guest memory
fn map_runs(
    frozen: &mut Frozen<'_>,
    store: &Store,
    stretch: &[MergeRequest],
    outcomes: &mut [Outcome],
    _: &NobodyPins,
    mapped: &mut Vec<Mapped>,
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
        let done = match stretch[first].slot {
            // SAFETY: the pages are zero, and nobody has frozen pages pinned.
            None => unsafe { frozen.map_zeros(at.clone()) },
            Some(slot) => match store.slot(slot) {
                // SAFETY: the pages are equal to the slots, and nobody has frozen pages pinned.
                Some((file, _)) => unsafe { frozen.map_slots(at.clone(), file, slot.offset()) },
                None => Err(std::io::ErrorKind::NotFound.into()),
            },
        };
        match done {
            Ok(()) => mapped.push(Mapped {
                at,
                zeros: stretch[first].slot.is_none(),
            }),
            Err(_) => outcomes[first..end].fill(Outcome::NoVma),
        }
        end = first;
    }
}
