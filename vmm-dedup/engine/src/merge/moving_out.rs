//! Copies that leave the mappings of store files in which they lie, and which they would keep.

use crate::lookup::request::MergeRequest;
use crate::memory::layout::Page;
use crate::memory::page_map::VMAS_PER_RUN;
use crate::merge::context::{Context, Tools};
use crate::merge::healer::{Healed, Healer};
use crate::merge::in_place::Limit;
use crate::merge::run::Outcome;

/// Those that leave at once: each is copied while its writers wait.
const MOVED_OUT: Limit = Limit {
    pages: 256,
    stretches: 32,
};
/// Mappings that these may add.
const MOVED_OUT_VMAS: i64 = 32 * VMAS_PER_RUN;
/// Whether copies can be told from pages that are in use by direct I/O now.
pub(crate) fn can_move(with: &mut Context<'_>, healer: &mut Healer) -> bool {
    with.direct_io.glance_again() && healer.can_heal(with.map, with.pass)
}

/// Copies that are to leave, as far as it can be told that they are not pinned, and how far that has come.
#[derive(Debug)]
pub(crate) struct MovingOut {
    /// What is left, in batches of neighbours in page order; the next one is the last.
    left: Vec<Vec<MergeRequest>>,
    /// None has stayed so far.
    all: bool,
}

impl MovingOut {
    /// Of these pages, which are in order.
    pub(crate) fn new(copies: &[Page]) -> Self {
        let requests = copies.iter().copied().map(MergeRequest::move_out).collect();
        Self {
            left: vec![requests],
            all: true,
        }
    }

    /// Whether all have left so far.
    pub(crate) fn all(&self) -> bool {
        self.all
    }

    /// Lets the next ones leave; whether there were any, and more may be tried.
    pub(crate) fn step(&mut self, with: &mut Context<'_>, healer: &mut Healer) -> bool {
        let Some(mut batch) = self.left.pop().filter(|batch| !batch.is_empty()) else {
            return false;
        };
        if !can_move(with, healer) || !with.map.has_vmas_for(MOVED_OUT_VMAS) {
            return self.end();
        }
        let memory = with.map.memory();
        let most = healer.batch_len(memory, &batch);
        let rest = batch.split_off(MOVED_OUT.fits(memory, &batch).min(most));
        if !rest.is_empty() {
            self.left.push(rest);
        }
        match move_out(with, healer, &batch) {
            Outcome::Merged => {}
            // Each try is a fork, which holds up the VM: the rest is tried another time.
            Outcome::Contended if healer.forks_tell() => return self.end(),
            // Some page is written all the time: the others need not wait for it.
            Outcome::Contended if batch.len() > 1 => {
                let second = batch.split_off(batch.len() / 2);
                self.left.extend([second, batch]);
            }
            _ => self.all = false,
        }
        true
    }

    fn end(&mut self) -> bool {
        self.left.clear();
        self.all = false;
        false
    }
}

/// [`Outcome::Merged`]: all are in memory of their own; [`Outcome::Contended`]: some are not, since somebody waited.
fn move_out(with: &mut Context<'_>, healer: &mut Healer, requests: &[MergeRequest]) -> Outcome {
    // No discard meets frozen pages, until the states say what became of them.
    let discards = with.space.discards.clone();
    let mut discards = discards.lock();
    with.space.note_discards(&mut discards, with.map);
    let there = |request: &&MergeRequest| with.map.backing(request.page).is_copied();
    let batch: Vec<MergeRequest> = requests.iter().filter(there).copied().collect();
    let Some(store) = with.session.store().filter(|_| !batch.is_empty()) else {
        return Outcome::Merged;
    };
    let mut tools = Tools {
        store,
        space: with.space,
        verify: with.verify,
    };
    let Healed { outcomes, stall_ns } = healer.heal(with.map, &mut tools, with.pass, &batch);
    let stats = &mut with.account.stats;
    stall_ns.into_iter().for_each(|ns| stats.heal.observe(ns));
    for (request, outcome) in batch.iter().zip(&outcomes) {
        match outcome {
            Outcome::Merged => with.map.made_private(request.page),
            Outcome::Contended => stats.heal_contended_total += 1,
            _ => stats.heal_pinned_total += 1,
        }
    }
    let all = |wanted: &[Outcome]| outcomes.iter().all(|outcome| wanted.contains(outcome));
    match () {
        () if all(&[Outcome::Merged]) => Outcome::Merged,
        () if all(&[Outcome::Merged, Outcome::Contended]) => Outcome::Contended,
        () => Outcome::Pinned,
    }
}
