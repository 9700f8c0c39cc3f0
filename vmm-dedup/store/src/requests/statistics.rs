//! What the store tells of itself and of its VMs in numbers, to observers and to the metrics.

use crate::ledger::accounts;
use crate::ledger::epochs::MemberId;
use crate::ledger::references::References;
use crate::requests::exchange::Exchange;
use crate::requests::peers::{Peers, Phase, Service};
use vmm_dedup_protocol::message::{Kind, Stats, StatsRequest, StoreStats, encode};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

/// A view of what there is to tell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statistics<'a> {
    pub(crate) exchange: &'a Exchange,
    pub(crate) peers: &'a Peers,
}

impl Statistics<'_> {
    /// The store's account.
    pub(crate) fn store(&self) -> StoreStats {
        let Exchange {
            pool,
            sightings,
            counters,
            ..
        } = self.exchange;
        let (slots, segments) = (pool.lifetime().slots(), pool.segments());
        let in_use = slots.live() - pool.lifetime().moving();
        let resident_bytes = segments.resident_bytes();
        let tables = sightings.bytes() + pool.lifetime().bytes() + segments.bytes();
        let metadata_bytes = pool.catalog().bytes() + tables as u64;
        let vms = self.peers.sum();
        let services = self.peers.services().count();
        // A service that lost its connection counts by the one that it has now, if it has one. Neither its references count as
        // sharing, nor the pages that nobody else maps.
        let claimed = pool.lifetime().claimed();
        let claimed_pages = in_use - pool.lifetime().held_by_orphans_alone();
        let net = accounts::saved_net(vms, services, resident_bytes, metadata_bytes);
        StoreStats {
            pages_shared: in_use,
            pages_sharing: claimed.saturating_sub(claimed_pages),
            slots_limbo: slots.limbo(),
            slots_max: segments.allocator().max_slots().into(),
            resident_bytes,
            sightings: sightings.len() as u64,
            marks: pool.catalog().marks() as u64,
            metadata_bytes,
            cpu_ns: cpu_ns(),
            refused_full_total: counters.refused_full,
            malformed_total: self.peers.counters.malformed,
            published_total: counters.published,
            saved_net_bytes: net.cast_unsigned(),
            epoch: pool.epochs().current(),
            secure: pool.is_secure().into(),
        }
    }

    /// A VM's account, with what the store holds for it.
    pub(crate) fn vm(&self, id: MemberId, service: &Service) -> ServiceStats {
        let references = self.exchange.pool.lifetime().references(id);
        let held = references.map_or(0, References::bytes) as u64;
        ServiceStats {
            store_bytes: held + self.exchange.sightings.of(id) * 8,
            ..service.stats
        }
    }

    /// Broken connections whose processes may live: how many, and the references they hold.
    pub(crate) fn orphans(&self) -> (u64, u64) {
        self.peers.orphans().fold((0, 0), |(count, references), id| {
            (count + 1, references + self.exchange.pool.references(id))
        })
    }

    /// The answer to somebody who asks.
    pub(crate) fn answer(&self, request: StatsRequest) -> Vec<u8> {
        let mut stats = Stats {
            vms: u32::try_from(self.peers.vms().count()).unwrap_or(u32::MAX),
            next: 0,
            store: self.store(),
            name: Name::new(""),
            pid: 0,
            reason: 0,
            saved_net_bytes: 0,
            vm: ServiceStats::default(),
        };
        if let Some(vm) = self.peers.vms().find(|vm| u32::from(vm.id.0) >= request.from) {
            stats.next = u32::from(vm.id.0) + 1;
            (stats.name, stats.pid) = (Name::new(vm.name), vm.pid);
            match self.peers.phase(vm.id) {
                Some(Phase::Service(service)) => {
                    let count = self.peers.services().count();
                    let shares = accounts::Shares::of(&stats.store, self.peers.sum(), count);
                    stats.vm = self.vm(vm.id, service);
                    stats.saved_net_bytes = shares.saved_net(&stats.vm).cast_unsigned();
                }
                Some(Phase::Refused(refused)) => {
                    stats.reason = u64::from(refused.refusal.reason as u32);
                    stats.vm = refused.stats();
                }
                _ => {}
            }
        }
        encode(Kind::Stats, &[stats.as_bytes()])
    }
}

/// CPU time of this process, user and system.
fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}
