//! One side through all rounds: what the bench does is the same for KSM and for us.

use super::fleet::{Fleet, Setup};
use super::measured::{Ours, Round, Run, Store, Writes};
use crate::host::{self, seconds};
use std::time::Duration;
use vmm_dedup_host::{Failure, note};

/// What merges.
pub(super) trait Side {
    /// Makes the guests' memory known.
    fn begin(&mut self, fleet: &mut Fleet<'_>) -> Result<(), Failure>;

    /// CPU time of all that dedup does so far, nanoseconds.
    fn cpu_ns(&self, fleet: &Fleet<'_>) -> Result<u64, Failure>;

    /// Works beside the guests that write, from `true` to `false`.
    fn work_beside(&mut self, fleet: &mut Fleet<'_>, work: bool) -> Result<(), Failure>;

    /// Works until sharing has settled.
    fn settle(&mut self, fleet: &mut Fleet<'_>) -> Result<Settled, Failure>;

    /// What there is then. No more work is done when this returns.
    fn look(&mut self, fleet: &mut Fleet<'_>) -> Result<Seen, Failure>;

    /// After all guests but one have ended.
    fn last(&mut self, fleet: &mut Fleet<'_>) -> Result<Option<Store>, Failure>;
}

/// When sharing had settled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settled {
    /// [`Side::cpu_ns`] at that time.
    pub(super) cpu_ns: u64,
    pub(super) after: Duration,
}

/// What a side says at the end of a round.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) saved_pages: u64,
    /// [`Side::cpu_ns`] when work ended that came after [`Side::settle`]; `None`: there was none.
    pub(super) cpu_ns: Option<u64>,
    pub(super) ours: Option<Ours>,
}

/// Measures one side.
pub(super) fn measure(setup: &Setup<'_>, side: &mut dyn Side) -> Result<Run, Failure> {
    let mut fleet = Fleet::start(setup)?;
    let before = host::available()?;
    side.begin(&mut fleet)?;
    let mut rounds = Vec::new();
    for round in 0..=setup.rounds {
        let start = side.cpu_ns(&fleet)?;
        side.work_beside(&mut fleet, true)?;
        let writes = match round {
            0 => Writes::default(),
            _ => fleet.write()?,
        };
        side.work_beside(&mut fleet, false)?;
        let settled = side.settle(&mut fleet)?;
        let seen = side.look(&mut fleet)?;
        let end = side.cpu_ns(&fleet)?;
        let common_pages = fleet.common_pages();
        note!(
            "  round {round} of {}: {} of {common_pages} pages saved",
            setup.rounds,
            seen.saved_pages
        );
        rounds.push(Round {
            round,
            common_pages,
            common_runs: fleet.common_runs(),
            saved_pages: seen.saved_pages,
            saved_of_common: seen.saved_pages as f64 / common_pages.max(1) as f64,
            freed_bytes: host::available()?.cast_signed() - before.cast_signed(),
            cpu_s: seconds(seen.cpu_ns.unwrap_or(settled.cpu_ns) - start),
            cpu_with_checks_s: seconds(end - start),
            settled_s: settled.after.as_secs_f64(),
            writes,
            ours: seen.ours,
        });
    }
    fleet.check()?;
    fleet.end_all_but_one();
    let one_guest_left = side.last(&mut fleet)?;
    fleet.check()?;
    Ok(Run {
        rounds,
        one_guest_left,
    })
}
