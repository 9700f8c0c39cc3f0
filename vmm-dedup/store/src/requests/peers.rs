//! Who is connected, and in which role.

use crate::ledger::accounts;
use crate::ledger::epochs::MemberId;
use crate::ledger::sightings::PASSED_OVER;
use crate::requests::outbox::Outbox;
use crate::requests::unread::{Share, Unread};
use crate::requests::violation::Violation;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Notify;
use vmm_dedup_protocol::refusal::Refusal;
use vmm_dedup_protocol::stats::ServiceStats;

/// A VM's service.
#[derive(Debug)]
pub(crate) struct Service {
    /// Its name, made unique among the connected ones.
    pub(crate) name: String,
    /// The name that it gave itself.
    pub(crate) announced: String,
    pub(crate) pages: u64,
    pub(crate) staging: Arc<OwnedFd>,
    /// Series that were made for it.
    pub(crate) series: u64,
    /// It has said goodbye.
    pub(crate) leaving: bool,
    /// What it has reported last; zeros until it has.
    pub(crate) stats: ServiceStats,
    pub(crate) has_reported: bool,
}

/// A VM that is not deduplicated.
#[derive(Debug)]
pub(crate) struct RefusedVm {
    /// Its name, made unique among the connected ones.
    pub(crate) name: String,
    pub(crate) announced: String,
    pub(crate) pages: u64,
    pub(crate) refusal: Refusal,
}

/// This part of all places is not for any one user.
const KEPT_FOR_OTHERS: usize = 8;

/// A number of [`vmm_dedup_protocol::stats::STATES`].
pub(crate) const STATE_REFUSED: u64 = 4;

impl RefusedVm {
    /// What there is to tell in numbers.
    pub(crate) fn stats(&self) -> ServiceStats {
        ServiceStats {
            pages: self.pages,
            state: STATE_REFUSED,
            ..ServiceStats::default()
        }
    }
}

/// What a peer is.
#[derive(Debug)]
pub(crate) enum Phase {
    /// It has not introduced itself yet.
    Greeting,
    Observer,
    Service(Box<Service>),
    Refused(Box<RefusedVm>),
    /// The socket is gone, the process may live: see [`crate::ledger::lifetime`].
    Orphan {
        name: String,
        /// What it had reported, if it ever had.
        stats: Option<Box<ServiceStats>>,
    },
}

/// What a connection's end leaves to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// Nothing.
    Done,
    /// Its references are dropped at once.
    Depart,
    /// Its references are dropped once its process has ended.
    AwaitEnd,
}

/// The other end of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) pid: u64,
    pub(crate) uid: u32,
    /// `None` once the socket is gone.
    pub(crate) outbox: Option<Arc<Outbox>>,
    pub(crate) phase: Phase,
    /// Names the membership of a service among all that there ever were, from 1 on; nobody else is a member.
    membership: Option<u64>,
    /// Told when the membership ends although its process lives: see [`Peers::take_over`].
    over: Arc<Notify>,
    /// Told when the connection is to end.
    cut: Arc<Notify>,
    /// When it last said something.
    heard: Instant,
}

/// Counters of connections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeerCounters {
    pub(crate) connections: u64,
    pub(crate) malformed: u64,
    pub(crate) overflows: u64,
}

/// All peers, orphans included.
#[derive(Debug)]
pub(crate) struct Peers {
    pub(super) peers: BTreeMap<MemberId, Peer>,
    max: usize,
    max_of_process: usize,
    pub(crate) counters: PeerCounters,
    /// Memberships that there ever were.
    memberships: u64,
    unread: Arc<Unread>,
    /// The sum of what services report, until one of them changes: whoever asks for one VM after the other asks for it each time.
    sum: OnceCell<Box<ServiceStats>>,
}

impl Peers {
    /// For at most `max` peers, and `max_of_process` of one process.
    pub(crate) fn new(max: usize, max_of_process: usize) -> Self {
        Self {
            peers: BTreeMap::new(),
            max,
            max_of_process,
            counters: PeerCounters::default(),
            memberships: 0,
            unread: Arc::new(Unread::of_this_process()),
            sum: OnceCell::new(),
        }
    }

    /// A process has connected.
    pub(crate) fn admit(&mut self, pid: u64, uid: u32, outbox: Arc<Outbox>) -> Result<MemberId, Violation> {
        let full = Violation::Full(self.peers.len());
        if self.peers.len() >= self.max {
            return Err(full);
        }
        let count = self.peers.values().filter(|peer| peer.pid == pid).count();
        if count >= self.max_of_process {
            return Err(Violation::TooManyConnections { pid, count });
        }
        // Whatever a user does, others find a place.
        let count = self.peers.values().filter(|peer| peer.uid == uid).count();
        if count >= self.max - self.max / KEPT_FOR_OTHERS {
            return Err(Violation::TooManyOfUser { uid, count });
        }
        let mut numbers = (1..PASSED_OVER.0).map(MemberId);
        let id = numbers.find(|id| !self.peers.contains_key(id)).ok_or(full)?;
        let peer = Peer {
            pid,
            uid,
            outbox: Some(outbox),
            phase: Phase::Greeting,
            membership: None,
            over: Arc::default(),
            cut: Arc::default(),
            heard: Instant::now(),
        };
        self.peers.insert(id, peer);
        self.counters.connections += 1;
        Ok(id)
    }

    /// What a connection of a user has not read: nothing yet.
    pub(crate) fn unread(&self, uid: u32) -> Share {
        self.unread.share(uid)
    }

    /// Those who wait until others have read look whether these have. To be called once a second.
    pub(crate) fn look_for_room(&self) {
        self.unread.look_again();
    }

    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }

    pub(crate) fn phase(&self, id: MemberId) -> Option<&Phase> {
        self.peers.get(&id).map(|peer| &peer.phase)
    }

    /// The user that a peer runs as.
    pub(crate) fn user(&self, id: MemberId) -> Option<u32> {
        self.peers.get(&id).map(|peer| peer.uid)
    }

    pub(crate) fn outbox(&self, id: MemberId) -> Option<&Arc<Outbox>> {
        self.peers.get(&id).and_then(|peer| peer.outbox.as_ref())
    }

    /// Nothing is sent to this peer any more.
    pub(crate) fn drop_outbox(&mut self, id: MemberId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.outbox = None;
        }
    }

    /// The process and the outbox of a peer that has not introduced itself.
    pub(crate) fn greeting(&self, id: MemberId) -> Option<(u64, Arc<Outbox>)> {
        let peer = self.peers.get(&id)?;
        let outbox = peer.outbox.clone()?;
        matches!(peer.phase, Phase::Greeting).then_some((peer.pid, outbox))
    }

    /// A service becomes a member: the name of its membership.
    pub(crate) fn begin_membership(&mut self, id: MemberId) -> u64 {
        self.memberships += 1;
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.membership = Some(self.memberships);
        }
        self.memberships
    }

    /// A peer's process maps nothing any more that it found over an earlier membership of its own: that one ends as by a goodbye. It
    /// may have ended already.
    pub(crate) fn take_over(&mut self, id: MemberId, membership: u64) -> Result<(), Violation> {
        self.service_mut(id, "TakeOver")?;
        let pid = self.peers[&id].pid;
        let mut peers = self.peers.iter_mut();
        let Some((earlier, peer)) = peers.find(|(_, peer)| peer.membership == Some(membership)) else {
            return Ok(());
        };
        if *earlier == id || peer.pid != pid {
            return Err(Violation::Unexpected(
                "TakeOver (of an earlier membership of the same process)",
            ));
        }
        // Its socket may not have been seen to end.
        if let Phase::Service(service) = &mut peer.phase {
            service.leaving = true;
        }
        peer.over.notify_one();
        Ok(())
    }

    /// What is told when a peer's membership ends although its process lives.
    pub(crate) fn over(&self, id: MemberId) -> Arc<Notify> {
        self.peers
            .get(&id)
            .map(|peer| peer.over.clone())
            .unwrap_or_default()
    }

    /// A peer has said something.
    pub(crate) fn note_heard(&mut self, id: MemberId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.heard = Instant::now();
        }
    }

    /// Cuts off the services that `is_meant`, by when they last said something. They may come again.
    pub(crate) fn cut_off(&self, is_meant: impl Fn(MemberId, Instant) -> bool) {
        for (id, peer) in &self.peers {
            if matches!(peer.phase, Phase::Service(_)) && is_meant(*id, peer.heard) {
                peer.cut.notify_one();
            }
        }
    }

    /// What is told when the connection of a peer is to end.
    pub(crate) fn cut(&self, id: MemberId) -> Arc<Notify> {
        self.peers
            .get(&id)
            .map(|peer| peer.cut.clone())
            .unwrap_or_default()
    }

    /// A peer has introduced itself.
    pub(crate) fn set_phase(&mut self, id: MemberId, phase: Phase) {
        self.sum.take();
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.phase = phase;
        }
    }

    /// Whether a peer has said goodbye: nothing that it sends is read any more.
    pub(crate) fn is_leaving(&self, id: MemberId) -> bool {
        matches!(self.phase(id), Some(Phase::Service(service)) if service.leaving)
    }

    /// The service that a peer is; `message`: what only services send.
    pub(crate) fn service_mut(
        &mut self,
        id: MemberId,
        message: &'static str,
    ) -> Result<&mut Service, Violation> {
        self.sum.take();
        match self.peers.get_mut(&id).map(|peer| &mut peer.phase) {
            Some(Phase::Service(service)) => Ok(service),
            _ => Err(Violation::Unexpected(message)),
        }
    }

    /// The socket is gone, or the peer has said goodbye. A service becomes an orphan.
    pub(crate) fn disconnect(&mut self, id: MemberId) -> Parting {
        self.sum.take();
        let Some(peer) = self.peers.get_mut(&id) else {
            return Parting::Done;
        };
        let Phase::Service(service) = &peer.phase else {
            self.peers.remove(&id);
            return Parting::Done;
        };
        let parting = if service.leaving {
            Parting::Depart
        } else {
            Parting::AwaitEnd
        };
        let stats = service.has_reported.then(|| Box::new(service.stats));
        let name = service.name.clone();
        peer.phase = Phase::Orphan { name, stats };
        peer.outbox = None;
        parting
    }

    /// An orphan's references are dropped: the name that it had.
    pub(crate) fn remove(&mut self, id: MemberId) -> Option<String> {
        let Peer {
            phase: Phase::Orphan { name, .. },
            pid,
            ..
        } = self.peers.remove(&id)?
        else {
            return None;
        };
        log::info!("VM {name} (process {pid}) has left, its references are dropped");
        Some(name)
    }

    /// Sends a record to all services.
    pub(crate) fn broadcast(&self, record: &[u8], fd: Option<&Arc<OwnedFd>>) {
        for peer in self.peers.values() {
            if let (Phase::Service(_), Some(outbox)) = (&peer.phase, &peer.outbox) {
                outbox.push(record.to_vec(), fd.cloned().into_iter().collect());
            }
        }
    }

    /// The VMs that have a service, in a fixed order.
    pub(crate) fn services(&self) -> impl Iterator<Item = (MemberId, u64, &Service)> {
        self.peers.iter().filter_map(|(id, peer)| match &peer.phase {
            Phase::Service(service) => Some((*id, peer.pid, &**service)),
            _ => None,
        })
    }

    /// The sum of what all services report.
    pub(crate) fn sum(&self) -> &ServiceStats {
        let sum = || accounts::sum(self.services().map(|(_, _, service)| &service.stats));
        self.sum.get_or_init(|| Box::new(sum()))
    }

    /// Broken connections whose processes may live.
    pub(crate) fn orphans(&self) -> impl Iterator<Item = MemberId> {
        let orphans = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.phase, Phase::Orphan { .. }));
        orphans.map(|(id, _)| *id)
    }

    /// What a service of this process and name had reported before its connection broke. A service that comes again goes
    /// on counting where it was.
    pub(crate) fn reported_before(&self, pid: u64, name: &str) -> Option<ServiceStats> {
        self.peers.values().find_map(|peer| match &peer.phase {
            Phase::Orphan {
                name: old,
                stats: Some(stats),
            } if peer.pid == pid && old == name => Some(**stats),
            _ => None,
        })
    }
}
