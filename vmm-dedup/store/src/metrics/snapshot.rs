//! What one scrape shows.

use crate::ledger::accounts;
use crate::ledger::allocator::Counts;
use crate::requests::exchange::ExchangeCounters;
use crate::requests::peers::PeerCounters;
use crate::state::State;
use std::time::{SystemTime, UNIX_EPOCH};
use vmm_dedup_protocol::clock;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::refusal::Reason;
use vmm_dedup_protocol::stats::ServiceStats;

/// Makes dates of times since the host's boot.
#[derive(Debug)]
pub(crate) struct Times {
    started_ms: u64,
    /// Unix time of the boot by the wall clock as it is set now, in seconds.
    booted: f64,
}

impl Times {
    fn now(started_ms: u64) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let booted = unix.as_secs_f64() - clock::since_boot().as_secs_f64();
        Self {
            started_ms,
            // Two readings of two clocks differ a little each time; what they tell of is to be the same number each time.
            booted: (booted * 10.0).round() / 10.0,
        }
    }

    /// When the store started, Unix time.
    pub(super) fn started(&self) -> f64 {
        self.unix(self.started_ms)
    }

    /// The Unix time of what happened so many milliseconds after the boot; 0 if it never did.
    pub(super) fn unix(&self, at_ms: u64) -> f64 {
        match at_ms {
            0 => 0.0,
            at => self.booted + at as f64 / 1e3,
        }
    }
}

/// Copied from the state, and encoded in another thread than the store's.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(super) store: StoreStats,
    pub(super) exchange: ExchangeCounters,
    pub(super) peers: PeerCounters,
    pub(super) huge_pages: u64,
    pub(super) vms: Vec<(String, ServiceStats)>,
    /// Name, pages and reason of those without a service.
    pub(super) refused: Vec<(String, u64, Reason)>,
    pub(super) gauges: ServiceStats,
    pub(super) totals: ServiceStats,
    pub(super) orphans: (u64, u64),
    pub(super) connections: u64,
    pub(super) slots: Counts,
    pub(super) segments: u64,
    /// Segments that went and that somebody keeps, and what their memory costs.
    pub(super) held: (u64, u64),
    /// Pages moved, ever.
    pub(super) moved: u64,
    pub(super) times: Times,
}

impl Snapshot {
    pub(crate) fn of(state: &State) -> Self {
        let (statistics, segments) = (state.statistics(), state.exchange.pool.segments());
        let services = state.peers.services();
        // Zeros of one that has not reported yet would look like counters that began anew.
        let vms: Vec<_> = services
            .filter(|(_, _, s)| s.has_reported)
            .map(|(id, _, s)| (s.name.clone(), statistics.vm(id, s)))
            .collect();
        let refused = state
            .peers
            .refused()
            .map(|vm| (vm.name.clone(), vm.pages, vm.refusal.reason));
        Self {
            refused: refused.collect(),
            store: statistics.store(),
            exchange: state.exchange.counters,
            peers: state.peers.counters,
            huge_pages: state.exchange.pool.collapsed(),
            gauges: accounts::sum(vms.iter().map(|(_, stats)| stats)),
            vms,
            totals: state.totals,
            orphans: statistics.orphans(),
            connections: state.peers.len() as u64,
            slots: segments.allocator().counts(),
            segments: segments.count(),
            held: segments.held(),
            moved: state.exchange.pool.moved(),
            times: Times::now(state.started_ms),
        }
    }
}
