//! Moved > followed: pages of this guest that map slots whose pages have moved map the new ones.
//!
//! # Why no write and no DMA is lost
//!
//! 1. *Freeze* ([`Frozen`](crate::window::Frozen)): nobody writes the pages from here on, and nobody pins them for writing.
//! 2. *Look.* What is anonymous memory now (the kernel has copied it for a writer) stays as it is. The rest are pages of the
//!    store, which nobody has pinned for writing: that pin would have made the kernel copy them.
//! 3. *Compare*, with the CPU, what the guest sees with the new slot: neither changes. The store is not trusted to have copied
//!    right.
//! 4. *Map and thaw*: see [`Frozen`](crate::window::Frozen). A device that reads the old page goes on reading that, which holds the same.
//!
//! Readers never wait. What is not equal, or cannot be followed for another reason, goes on mapping the old slot, whose
//! references keep it. When its segment has gone it is made private.

use crate::account::ns;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Memory;
use crate::merge::context::Tools;
use crate::merge::in_place::{self, Limit, Proof, Room, addresses, stretches};
use crate::merge::run::Outcome;
use crate::sys::sched::Urgent;
use std::time::{Duration, Instant};

/// What follows at once.
pub(crate) const LIMIT: Limit = Limit {
    pages: 512,
    stretches: 32,
};

/// How long pages may be frozen for it. The rest goes on mapping the old slots until it is tried again.
const LONGEST: Duration = Duration::from_millis(5);

/// The result for a batch of requests.
#[derive(Debug)]
pub(crate) struct Followed {
    /// One for each request: [`Outcome::Merged`] if it maps the new slot, [`Outcome::Absent`] if the kernel has copied it.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long a writer may have waited, nanoseconds.
    pub(crate) stall_ns: u64,
}

/// Lets pages that map slots map others. Requests are in page order, and no more than [`LIMIT`] takes.
pub(crate) fn follow(memory: &Memory, tools: &mut Tools<'_>, requests: &[MergeRequest]) -> Followed {
    let (store, space) = (tools.store, &mut *tools.space);
    in_place::touch(memory, store, requests);
    let verifier = tools.verify.begin_window(store);
    let (clock, _urgent) = (Instant::now(), Urgent::begin());
    let breaker = space.breaker.clone();
    let Ok(frozen) = breaker.freeze(stretches(memory, requests).map(|stretch| addresses(memory, stretch)))
    else {
        return Followed {
            outcomes: vec![Outcome::NotTaken; requests.len()],
            stall_ns: 0,
        };
    };
    let (outcomes, _) = in_place::replace(
        memory,
        (store, verifier),
        space,
        frozen,
        // None of them is copied.
        (requests, &mut Room::default()),
        &Proof::None,
        clock + LONGEST,
    );
    Followed {
        outcomes,
        stall_ns: ns(clock.elapsed()),
    }
}
