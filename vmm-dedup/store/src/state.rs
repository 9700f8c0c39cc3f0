//! The state of a store, and how connections come and go. What batches and publications do is in `exchange`.

use crate::accounts;
use crate::catalog::Catalog;
use crate::config::Config;
use crate::epochs::MemberId;
use crate::error::{Error, Violation};
use crate::huge::Waiting;
use crate::lifetime::Lifetime;
use crate::outbox::Outbox;
use crate::questions::Questions;
use crate::segments::Segments;
use crate::sightings::Sightings;
use crate::vms::RefusedVm;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use vmm_dedup_protocol::key::{Key, Salt};
use vmm_dedup_protocol::mapping::{Mapping, staging_memfd};
use vmm_dedup_protocol::message::{Hello, Kind, Role, Stats, StatsRequest, StoreStats, Welcome, encode};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::stats::ServiceStats;
use vmm_dedup_protocol::{PAGE_SIZE, STAGING_PAGES};
use zerocopy::IntoBytes;

/// A VM's service.
#[derive(Debug)]
pub(crate) struct Service {
    /// Its name, made unique among the connected ones.
    pub(crate) name: String,
    pub(crate) announced: String,
    pub(crate) pages: u64,
    pub(crate) staging: Arc<Mapping>,
    /// Its entries in the table of sightings.
    pub(crate) sightings: u64,
    /// Pages it was asked to publish in the last reply.
    pub(crate) asked: Vec<Key>,
    /// Series that were made for it.
    pub(crate) series: u64,
    /// It has said goodbye.
    pub(crate) leaving: bool,
    pub(crate) stats: ServiceStats,
}

#[derive(Debug)]
pub(crate) enum Phase {
    Greeting,
    Observer,
    Service(Box<Service>),
    Refused(Box<RefusedVm>),
    /// The socket is gone, the process may live: see `lifetime`.
    Orphan {
        name: String,
        stats: Box<ServiceStats>,
    },
}

/// What a connection's end leaves to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// Nothing.
    Done,
    /// [`State::depart`], at once.
    Depart,
    /// [`State::depart`], once the peer's process has ended.
    AwaitEnd,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) pid: u32,
    /// `None` once the socket is gone.
    pub(crate) outbox: Option<Arc<Outbox>>,
    pub(crate) phase: Phase,
}

/// Counters of the store itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) connections: u64,
    pub(crate) malformed: u64,
    pub(crate) overflows: u64,
    pub(crate) published: u64,
    pub(crate) huge_pages: u64,
    pub(crate) unverified: u64,
    pub(crate) refused_full: u64,
    pub(crate) sightings: u64,
    pub(crate) withdrawals: u64,
    pub(crate) batches: u64,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) salt: Salt,
    pub(crate) incarnation: u64,
    pub(crate) catalog: Catalog,
    pub(crate) segments: Segments,
    pub(crate) sightings: Sightings,
    pub(crate) lifetime: Lifetime,
    pub(crate) connections: BTreeMap<MemberId, Connection>,
    /// Whole-page keys whose publication was asked of somebody, and when.
    pub(crate) asked: HashMap<Key, (MemberId, Instant)>,
    pub(crate) questions: Questions,
    pub(crate) counters: Counters,
    /// Huge pages that are to become such.
    pub(crate) waiting: Waiting,
    /// Counters of all VMs there ever were.
    pub(crate) totals: ServiceStats,
    /// Receive buffer of all connections: records are handled one at a time.
    pub(crate) buffer: Vec<u64>,
    pub(crate) started: std::time::SystemTime,
    /// The kernel refused a new segment when it was last asked: that was said once.
    pub(crate) short_of_memory: bool,
}

impl State {
    pub(crate) fn new(config: Config) -> Result<Self, Error> {
        let mut random = [0u64; 4];
        let bytes = random.as_mut_bytes();
        let filled = rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty());
        if filled.map_err(|e| Error::Memory(e.into()))? != size_of::<[u64; 4]>() {
            return Err(Error::Memory(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let catalog = Catalog::new()?;
        Ok(Self {
            salt: Salt(random[0]),
            incarnation: random[1],
            segments: Segments::new(config.max_slots(), config.quarantine_seconds),
            sightings: Sightings::new([random[2], random[3]]),
            lifetime: Lifetime::new(catalog.reader().epoch()),
            catalog,
            config,
            connections: BTreeMap::new(),
            asked: HashMap::new(),
            questions: Questions::default(),
            counters: Counters::default(),
            waiting: Waiting::default(),
            totals: ServiceStats::default(),
            buffer: vmm_dedup_protocol::message::aligned_buffer(),
            started: std::time::SystemTime::now(),
            short_of_memory: false,
        })
    }

    /// A peer has connected.
    pub(crate) fn admit(&mut self, pid: u32, outbox: Arc<Outbox>) -> Result<MemberId, Violation> {
        if self.connections.len() >= self.config.max_connections {
            return Err(Violation::Full(self.connections.len()));
        }
        let count = self.connections.values().filter(|c| c.pid == pid).count();
        if count >= self.config.max_connections_per_process {
            return Err(Violation::TooManyConnections { pid, count });
        }
        let free = (1..=u16::MAX)
            .map(MemberId)
            .find(|id| !self.connections.contains_key(id));
        let id = free.ok_or(Violation::Full(self.connections.len()))?;
        self.connections.insert(
            id,
            Connection {
                pid,
                outbox: Some(outbox),
                phase: Phase::Greeting,
            },
        );
        self.counters.connections += 1;
        Ok(id)
    }

    /// Whether a peer has said goodbye: nothing that it sends is read any more.
    pub(crate) fn is_leaving(&self, id: MemberId) -> bool {
        let phase = self.connections.get(&id).map(|c| &c.phase);
        matches!(phase, Some(Phase::Service(service)) if service.leaving)
    }

    /// Whether a peer is connected and has not introduced itself.
    pub(crate) fn is_greeting(&self, id: MemberId) -> bool {
        self.connections
            .get(&id)
            .is_some_and(|c| matches!(c.phase, Phase::Greeting))
    }

    /// A peer introduces itself.
    pub(crate) fn hello(&mut self, id: MemberId, hello: &Hello) -> Result<(), Violation> {
        let role = hello.role()?;
        let connection = &self.connections[&id];
        if !matches!(connection.phase, Phase::Greeting) {
            return Err(Violation::Unexpected("second Hello"));
        }
        let (Some(outbox), pid) = (connection.outbox.clone(), connection.pid) else {
            return Err(Violation::Unexpected("Hello"));
        };
        let mut welcome = Welcome {
            salt: self.salt.0,
            incarnation: self.incarnation,
            index_bytes: 0,
        };
        let phase = match role {
            Role::Observer => {
                // An observer has no use for the trust domain's secret.
                welcome.salt = 0;
                outbox.push(encode(Kind::Welcome, &[welcome.as_bytes()]), Vec::new());
                Phase::Observer
            }
            Role::Service => {
                let (pages, max) = (hello.pages, self.config.max_vm_pages);
                if pages == 0 || pages > max {
                    return Err(Violation::Pages { pages, max });
                }
                let resources = |e| Violation::Resources(Error::Memory(e));
                let (file, staging) = staging_memfd(STAGING_PAGES * PAGE_SIZE).map_err(resources)?;
                let (index, index_bytes) = self.catalog.file();
                welcome.index_bytes = index_bytes;
                outbox.push(
                    encode(Kind::Welcome, &[welcome.as_bytes()]),
                    vec![index, Arc::new(file)],
                );
                for (number, segment) in self.segments.files() {
                    outbox.push(encode(Kind::Segment, &[number.as_bytes()]), vec![segment]);
                }
                self.lifetime.join(id);
                let announced = hello.name();
                let name = self.unique_name(&announced, pid);
                log::info!("VM {name} (process {pid}) has joined with {pages} pages");
                // A service that comes again goes on counting where it was.
                let before = self.connections.values().find_map(|c| match &c.phase {
                    Phase::Orphan { name: old, stats } if c.pid == pid && *old == name => Some(**stats),
                    _ => None,
                });
                Phase::Service(Box::new(Service {
                    name,
                    announced,
                    pages,
                    staging: Arc::new(staging),
                    sightings: 0,
                    asked: Vec::new(),
                    series: 0,
                    leaving: false,
                    stats: before.unwrap_or_default(),
                }))
            }
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.phase = phase;
        }
        Ok(())
    }

    /// A service's account.
    pub(crate) fn report(&mut self, id: MemberId, stats: &ServiceStats) -> Result<(), Violation> {
        let max = self.config.max_vm_pages;
        let Some(Connection {
            phase: Phase::Service(service),
            ..
        }) = self.connections.get_mut(&id)
        else {
            return Err(Violation::Unexpected("Report"));
        };
        // Memory may have been added to the VM. (When some goes, what it referenced goes a little later.)
        service.pages = service.pages.max(stats.pages.min(max));
        accounts::accumulate(&mut self.totals, &service.stats, stats);
        service.stats = *stats;
        Ok(())
    }

    /// The socket is gone, or the peer has said goodbye.
    pub(crate) fn disconnect(&mut self, id: MemberId) -> Parting {
        self.forget_asked(id);
        self.forget_questions(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return Parting::Done;
        };
        let Phase::Service(service) = &connection.phase else {
            self.connections.remove(&id);
            return Parting::Done;
        };
        let parting = if service.leaving {
            Parting::Depart
        } else {
            Parting::AwaitEnd
        };
        let (name, stats) = (service.name.clone(), Box::new(service.stats));
        connection.phase = Phase::Orphan { name, stats };
        connection.outbox = None;
        self.sightings.sweep(id);
        parting
    }

    /// The peer's process has ended, or maps nothing: drops its references, some at a time. Returns whether there is
    /// more to do.
    pub(crate) fn depart(&mut self, id: MemberId) -> bool {
        let (catalog, segments) = (&mut self.catalog, &self.segments);
        let (salt, ordered) = (self.salt, self.config.ordered);
        let more = self.lifetime.leave_some(id, |slot| {
            catalog.remove(segments.line_key(slot, salt), slot);
            if ordered {
                catalog.unorder(slot, |other| segments.compare(slot, other));
            }
        });
        self.settle();
        if !more
            && let Some(Connection {
                phase: Phase::Orphan { name, .. },
                pid,
                ..
            }) = self.connections.remove(&id)
        {
            log::info!("VM {name} (process {pid}) has left, its references are dropped");
        }
        more
    }

    /// After slots left the index: advances the epoch and frees what nobody can map any more.
    pub(crate) fn settle(&mut self) {
        if let Some(epoch) = self.lifetime.advance() {
            let published = self.catalog.advance_epoch();
            debug_assert_eq!(epoch, published);
        }
        let mut retired = Vec::new();
        let segments = &mut self.segments;
        let now = Instant::now();
        self.lifetime
            .reclaim(|slot| retired.extend(segments.cool(slot, now)));
        for number in retired {
            self.broadcast(&encode(Kind::SegmentRetired, &[number.as_bytes()]), None);
        }
    }

    /// Makes room in the index, and tells everyone if that took a new file.
    pub(crate) fn reserve(&mut self, entries: usize) -> Result<(), Violation> {
        if self.catalog.has_room(entries) {
            return Ok(());
        }
        if self.catalog.reserve(entries).map_err(Violation::Resources)? {
            let (file, bytes) = self.catalog.file();
            self.broadcast(&encode(Kind::Index, &[bytes.as_bytes()]), Some(&file));
        }
        Ok(())
    }

    /// Sends a record to all services.
    pub(crate) fn broadcast(&self, record: &[u8], fd: Option<&Arc<OwnedFd>>) {
        for connection in self.connections.values() {
            if let (Phase::Service(_), Some(outbox)) = (&connection.phase, &connection.outbox) {
                outbox.push(record.to_vec(), fd.cloned().into_iter().collect());
            }
        }
    }

    /// The connected VMs, in a fixed order.
    pub(crate) fn services(&self) -> impl Iterator<Item = (MemberId, u32, &Service)> {
        self.connections
            .iter()
            .filter_map(|(id, connection)| match &connection.phase {
                Phase::Service(service) => Some((*id, connection.pid, &**service)),
                _ => None,
            })
    }

    /// Broken connections whose processes may live: how many, and the references they hold.
    pub(crate) fn orphans(&self) -> (u64, u64) {
        let orphans = self
            .connections
            .iter()
            .filter(|(_, c)| matches!(c.phase, Phase::Orphan { .. }));
        let references = |id: &MemberId| self.lifetime.references(*id).map_or(0, |r| r.total());
        orphans.fold((0, 0), |(count, refs), (id, _)| {
            (count + 1, refs + references(id))
        })
    }

    /// A VM's account, with what the store holds for it.
    pub(crate) fn vm_stats(&self, id: MemberId, service: &Service) -> ServiceStats {
        let held = self
            .lifetime
            .references(id)
            .map_or(0, crate::references::References::bytes) as u64;
        ServiceStats {
            store_bytes: held + service.sightings * 8,
            ..service.stats
        }
    }

    pub(crate) fn store_stats(&self) -> StoreStats {
        let slots = self.lifetime.slots();
        let resident_bytes = self.segments.resident_bytes();
        let tables = self.sightings.bytes() + self.lifetime.bytes() + self.segments.bytes();
        let metadata_bytes = self.catalog.bytes() + tables as u64;
        let vms = accounts::sum(self.services().map(|(_, _, s)| &s.stats));
        let page = PAGE_SIZE as i128;
        let spared = (i128::from(vms.pages_mapped) + i128::from(vms.pages_zero)) * page;
        let overhead = [resident_bytes, metadata_bytes, vms.metadata_bytes, vms.vma_bytes];
        let net = accounts::clamp(spared - overhead.into_iter().map(i128::from).sum::<i128>());
        StoreStats {
            pages_shared: slots.live(),
            pages_sharing: self.lifetime.claimed().saturating_sub(slots.live()),
            slots_limbo: slots.limbo(),
            slots_max: self.segments.max_slots().into(),
            resident_bytes,
            sightings: self.sightings.len() as u64,
            marks: self.catalog.marks() as u64,
            metadata_bytes,
            cpu_ns: cpu_ns(),
            refused_full_total: self.counters.refused_full,
            malformed_total: self.counters.malformed,
            published_total: self.counters.published,
            saved_net_bytes: net.cast_unsigned(),
            epoch: self.lifetime.epochs().current(),
        }
    }

    /// The answer to somebody who asks.
    pub(crate) fn stats(&self, request: StatsRequest) -> Vec<u8> {
        let mut stats = Stats {
            vms: u32::try_from(self.vms().count()).unwrap_or(u32::MAX),
            next: 0,
            store: self.store_stats(),
            name: Name::new(""),
            pid: 0,
            reason: 0,
            saved_net_bytes: 0,
            vm: ServiceStats::default(),
        };
        if let Some(vm) = self.vms().find(|vm| u32::from(vm.id.0) >= request.from) {
            stats.next = u32::from(vm.id.0) + 1;
            (stats.name, stats.pid) = (Name::new(vm.name), vm.pid.into());
            match &self.connections[&vm.id].phase {
                Phase::Service(service) => {
                    let vms = accounts::sum(self.services().map(|(_, _, s)| &s.stats));
                    let shares = accounts::Shares::of(&stats.store, &vms, self.services().count());
                    stats.vm = self.vm_stats(vm.id, service);
                    stats.saved_net_bytes = shares.saved_net(&stats.vm).cast_unsigned();
                }
                Phase::Refused(refused) => {
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
pub(crate) fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}
