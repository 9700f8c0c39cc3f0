//! What one scrape shows.

use crate::ledger::accounts;
use crate::ledger::allocator::Counts;
use crate::requests::exchange::ExchangeCounters;
use crate::requests::peers::PeerCounters;
use crate::state::State;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::refusal::Reason;
use vmm_dedup_protocol::stats::ServiceStats;

/// Copied from the state, which is not locked while it is encoded.
pub(super) struct Snapshot {
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
    /// Segments that went and that some VM still maps, and what their memory costs.
    pub(super) held: (u64, u64),
    /// Pages moved, ever.
    pub(super) moved: u64,
    pub(super) started: f64,
}

impl Snapshot {
    pub(super) fn of(state: &State) -> Self {
        let (statistics, segments) = (state.statistics(), state.exchange.pool.segments());
        let services = state.peers.services();
        // Zeros of one that has not reported yet would look like counters that began anew.
        let vms: Vec<_> = services
            .filter(|(_, _, s)| s.has_reported)
            .map(|(id, _, s)| (s.name.clone(), statistics.vm(id, s)))
            .collect();
        let started = state
            .started
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
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
            held: segments
                .retired()
                .fold((0, 0), |(count, sum), (_, bytes, _)| (count + 1, sum + bytes)),
            moved: state.exchange.pool.moved(),
            started: started.as_secs_f64(),
        }
    }
}
