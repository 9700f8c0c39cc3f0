//! Merged: what is noted of each page once its window is closed, or its batch is thawed.

use crate::account::Account;
use crate::lookup::request::{MergeRequest, Role};
use crate::memory::layout::Page;
use crate::memory::page_map::{NotMerged, PageMap, Reference};
use crate::merge::run::Outcome;
use crate::sys::pagemap::Pagemap;
use crate::thp::monitor::Monitor;
use crate::thp::split;

/// What outcomes tell of how twins were found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Learnt {
    /// Pages that were not equal to their slots.
    pub(crate) different: Vec<MergeRequest>,
}

impl Learnt {
    /// How many of these an engine had proposed.
    pub(crate) fn wrong_proposals(&self) -> usize {
        let proposed = |request: &&MergeRequest| request.role == Role::Proposed;
        self.different.iter().filter(proposed).count()
    }
}

/// Notes what became of each page of a window.
pub(crate) fn note(
    map: &mut PageMap,
    account: &mut Account,
    pass: u64,
    requests: &[MergeRequest],
    outcomes: &[Outcome],
) -> Learnt {
    let mut learnt = Learnt::default();
    for (request, outcome) in requests.iter().zip(outcomes) {
        match (outcome, request.slot) {
            (Outcome::Merged, Some(place)) if request.role == Role::Exception => {
                map.bridge(request.page, place);
            }
            (Outcome::Merged, Some(slot)) => {
                let counted = request.publisher_ref().is_some();
                let reference = if counted {
                    Reference::Counted
                } else {
                    Reference::New
                };
                map.share(request.page, slot, reference);
                account.stats.merges_total += 1;
            }
            (Outcome::Merged, None) => {
                map.zero(request.page);
                account.stats.zero_merges_total += 1;
            }
            (outcome, _) => {
                if *outcome == Outcome::Different {
                    learnt.different.push(*request);
                }
                note_failure(map, account, pass, request, *outcome);
            }
        }
    }
    learnt
}

/// Notes what became of each copy of a batch.
pub(crate) fn note_healed(
    map: &mut PageMap,
    account: &mut Account,
    pass: u64,
    requests: &[MergeRequest],
    outcomes: &[Outcome],
) -> Learnt {
    let mut learnt = Learnt::default();
    for (request, outcome) in requests.iter().zip(outcomes) {
        let stats = &mut account.stats;
        let counter = match outcome {
            Outcome::Merged => {
                stats.heals_total += 1;
                note(map, account, pass, &[*request], &[*outcome]);
                continue;
            }
            Outcome::Pinned => &mut stats.heal_pinned_total,
            Outcome::Untold => &mut stats.heal_failed_total,
            Outcome::Contended => &mut stats.heal_contended_total,
            Outcome::Different => &mut stats.mismatches_total,
            Outcome::NoVma => &mut stats.refused_vmas_total,
            _ => &mut stats.refused_other_total,
        };
        *counter += 1;
        map.give_up_published(request.publisher_ref());
        match outcome {
            Outcome::Pinned => map.copy_may_be_pinned(request.page, pass),
            // For as long as nothing can be told none is tried.
            Outcome::Untold => map.forget_copy(request.page),
            _ => map.key_copy(request.page, None),
        }
        if *outcome == Outcome::NoVma {
            map.no_vma_is_left(pass);
        }
        if *outcome == Outcome::Different {
            learnt.different.push(*request);
        }
    }
    learnt
}

/// What became of a huge page that was to be merged as one.
pub(crate) fn note_huge(
    map: &mut PageMap,
    pagemap: &mut Pagemap,
    account: &mut Account,
    monitor: &Monitor,
    first: Page,
    outcomes: &[Outcome],
) {
    let (chunk, start) = (map.chunk_of(first), map.memory().address(first));
    let contended = outcomes.contains(&Outcome::Contended);
    if outcomes.iter().any(|outcome| outcome.was_taken()) {
        split::note_split(map, account, monitor, chunk);
        let whole = outcomes.iter().all(|outcome| *outcome == Outcome::Merged);
        account.stats.huge_whole_total += u64::from(whole);
    } else if contended && !pagemap.is_huge(start) {
        split::note_split(map, account, monitor, chunk); // on its way back, or it was none any more
    } else {
        map.stayed_huge(chunk);
    }
    if contended {
        account.stats.huge_contended_total += 1;
        map.note_contended(chunk);
    }
}

fn note_failure(
    map: &mut PageMap,
    account: &mut Account,
    pass: u64,
    request: &MergeRequest,
    outcome: Outcome,
) {
    map.give_up_published(request.publisher_ref());
    let counter = match outcome {
        _ if request.role == Role::Exception => None,
        Outcome::Contended | Outcome::Merged => None, // once for all of the huge page
        Outcome::Different => Some(&mut account.stats.mismatches_total),
        Outcome::Pinned => Some(&mut account.stats.refused_pinned_total),
        Outcome::NoVma => Some(&mut account.stats.refused_vmas_total),
        Outcome::Absent | Outcome::Untold | Outcome::NotTaken | Outcome::Refused | Outcome::Returned => {
            Some(&mut account.stats.refused_other_total)
        }
    };
    if let Some(counter) = counter {
        *counter += 1;
    }
    if outcome == Outcome::NoVma {
        map.no_vma_is_left(pass);
    }
    // A page that was not moved is protected: a pinned one is tried again later, others are keyed anew. What was moved
    // came back unprotected.
    let why = match outcome {
        Outcome::Pinned => NotMerged::Pinned,
        Outcome::NotTaken => NotMerged::Stayed,
        _ => NotMerged::Returned,
    };
    map.not_merged(request.page, why, pass);
}
