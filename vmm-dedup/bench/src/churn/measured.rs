//! What one measurement tells.

use crate::host::seconds;
use serde::{Deserialize, Serialize};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::message::StoreStats;

/// What writing took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Writes {
    /// Pages written by all guests.
    pub(super) pages_written: u64,
    /// Time of all writers together.
    pub(super) writers_s: f64,
    /// Of single pages.
    pub(super) write_p50_us: f64,
    pub(super) write_p99_us: f64,
    pub(super) write_max_us: f64,
}

impl Writes {
    /// Of the time that each page took, nanoseconds.
    pub(super) fn of(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let us = |at: usize| times.get(at).map_or(0.0, |ns| *ns as f64 / 1e3);
        let last = times.len().saturating_sub(1);
        Self {
            pages_written: times.len() as u64,
            writers_s: seconds(times.iter().sum()),
            write_p50_us: us(last / 2),
            write_p99_us: us(last * 99 / 100),
            write_max_us: us(last),
        }
    }
}

/// One round of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    /// From 1; 0 is the first merging, before anything is written.
    pub(super) round: u32,
    /// Pages that sharing can save: those of all guests beyond the first of each content.
    pub(super) common_pages: u64,
    /// Stretches of the guests' memory in which common content follows on: about as many mappings are needed to share it.
    pub(super) common_runs: u64,
    pub(super) saved_pages: u64,
    /// `saved_pages` as a part of `common_pages`.
    pub(super) saved_of_common: f64,
    /// What the host has more than before the first merging, with the same memory filled.
    pub(super) freed_bytes: i64,
    /// CPU time of all that dedup does, from the first write until sharing had settled; KSM's scans after that, and our
    /// passes, are not in it.
    pub(super) cpu_s: f64,
    /// The same with what was only done to find out that it had settled.
    pub(super) cpu_with_checks_s: f64,
    /// From the last write until sharing had settled.
    pub(super) settled_s: f64,
    #[serde(flatten)]
    pub(super) writes: Writes,
    /// What only a service and a store of ours have.
    #[serde(flatten)]
    pub(super) ours: Option<Ours>,
}

/// What only a service and a store of ours have.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ours {
    /// Pages that map the store, by the kernel's word.
    pub(super) mapped_pages: u64,
    /// Pages that stay private in mappings of the store.
    pub(super) broken_pages: u64,
    /// The net saving that our metrics claim, to be compared with `freed_bytes`.
    pub(super) claimed_bytes: i64,
    pub(super) vmas: u64,
    pub(super) vmas_per_merged_page: f64,
    #[serde(flatten)]
    pub(super) store: Store,
}

/// What the store holds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Store {
    /// What its segments take of the host's memory.
    pub(super) store_resident_bytes: u64,
    pub(super) slots_in_use: u64,
    /// How long after sharing had settled its size was in keeping with its use; `None`: not while it was waited for.
    pub(super) store_settled_s: Option<f64>,
}

/// Resident memory in keeping with use: so many hundredths of the slots in use, and so many bytes beside.
const STORE_OF_USE: u64 = 115;
const STORE_BESIDE: u64 = 8 << 20;

impl Store {
    pub(super) fn of(stats: &StoreStats, settled_s: Option<f64>) -> Self {
        Self {
            store_resident_bytes: stats.resident_bytes,
            slots_in_use: stats.pages_shared,
            store_settled_s: settled_s,
        }
    }
}

/// Whether the store's size is in keeping with its use.
pub(super) fn store_is_settled(stats: &StoreStats) -> bool {
    let used = stats.pages_shared * PAGE_SIZE as u64;
    stats.resident_bytes <= used * STORE_OF_USE / 100 + STORE_BESIDE
}

/// All rounds of one side.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Run {
    pub(super) rounds: Vec<Round>,
    /// Our store after all guests but one had ended; its time counts from their end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) one_guest_left: Option<Store>,
}

impl Run {
    /// The rounds that replaced something.
    pub(super) fn churn(&self) -> impl Iterator<Item = &Round> {
        self.rounds.iter().filter(|round| round.round > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_writes_are_those_of_single_pages() {
        let writes = Writes::of((1..=1000).rev().map(|us| us * 1000).collect());
        assert_eq!(
            writes,
            Writes {
                pages_written: 1000,
                writers_s: 0.5005,
                write_p50_us: 500.0,
                write_p99_us: 990.0,
                write_max_us: 1000.0,
            }
        );
        assert_eq!(Writes::of(Vec::new()), Writes::default());
    }

    #[test]
    fn a_store_may_have_a_little_more_than_it_uses() {
        let stats = |mib: u64, slots: u64| StoreStats {
            resident_bytes: mib << 20,
            pages_shared: slots,
            ..StoreStats::default()
        };
        assert!(store_is_settled(&stats(8, 0)) && !store_is_settled(&stats(9, 0)));
        assert!(store_is_settled(&stats(123, 100 << 8)) && !store_is_settled(&stats(124, 100 << 8)));
    }
}
