//! The state of a store: the pages and what is told of them ([`Exchange`]), who is connected ([`Peers`]), and the
//! questions that wait for answers ([`Relay`]). A record or the end of a connection is handled here in one go, and what
//! it makes others need to know is sent before the answer.

use crate::config::Config;
use crate::error::Error;
use crate::ledger::accounts;
use crate::ledger::epochs::MemberId;
use crate::ledger::sightings::Sightings;
use crate::memory::pool::{Announcement, Pool};
use crate::requests::exchange::Exchange;
use crate::requests::keepers::Keepers;
use crate::requests::outbox::Outbox;
use crate::requests::peers::{Parting, Peers, Phase, RefusedVm, Service};
use crate::requests::relay::{Answer, Question, Relay};
use crate::requests::rights::Rights;
use crate::requests::statistics::Statistics;
use crate::requests::violation::Violation;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::clock;
use vmm_dedup_protocol::key::Salt;
use vmm_dedup_protocol::mapping::staging_memfd;
use vmm_dedup_protocol::message::{Batch, Hello, Kind, Message, Role, Welcome, aligned_buffer, encode};
use vmm_dedup_protocol::refusal::Refused;
use vmm_dedup_protocol::stats::ServiceStats;
use vmm_dedup_protocol::{PAGE_SIZE, STAGING_PAGES};
use zerocopy::IntoBytes;

/// Pages that are moved in one go, about: some milliseconds, for which everyone waits who waits for the store.
const MOVED_AT_ONCE: u32 = 1024;

/// The state, as all tasks share it. There is one thread, so the lock is never waited for.
pub(crate) type Shared = Arc<Mutex<State>>;

pub(crate) fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    /// Names this store process.
    incarnation: u64,
    pub(crate) exchange: Exchange,
    pub(crate) peers: Peers,
    rights: Rights,
    relay: Relay,
    keepers: Keepers,
    /// That there is less room than its VMs have memory was said.
    told_of_room: bool,
    /// Counters of all VMs there ever were.
    pub(crate) totals: ServiceStats,
    /// Receive buffer of all connections: records are handled one at a time.
    pub(crate) buffer: Vec<u64>,
    /// Milliseconds since the host booted.
    pub(crate) started_ms: u64,
}

impl State {
    pub(crate) fn new(config: Config) -> Result<Self, Error> {
        let mut random = [0u64; 4];
        let bytes = random.as_mut_bytes();
        let filled = rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty());
        if filled.map_err(|e| Error::Memory(e.into()))? != size_of::<[u64; 4]>() {
            return Err(Error::Memory(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let pool = Pool::new(&config, Salt(random[0]))?;
        Ok(Self {
            incarnation: random[1],
            exchange: Exchange::new(pool, Sightings::new([random[2], random[3]], config.sightings())),
            peers: Peers::new(config.max_connections, config.max_connections_per_process),
            rights: Rights::new(&config.join_users),
            relay: Relay::new(Duration::from_secs(config.answer_seconds.into())),
            keepers: Keepers::new(config.answer_seconds),
            config,
            told_of_room: false,
            totals: ServiceStats::default(),
            buffer: aligned_buffer(),
            started_ms: clock::since_boot_ms(),
        })
    }

    /// A process has connected.
    pub(crate) fn admit(&mut self, pid: u64, uid: u32, outbox: Arc<Outbox>) -> Result<MemberId, Violation> {
        self.rights.may_join(uid)?;
        self.peers.admit(pid, uid, outbox)
    }

    /// Handles one message. Returns the reply, if it has one.
    pub(crate) fn handle(
        &mut self,
        id: MemberId,
        message: &Message<'_>,
    ) -> Result<Option<Vec<u8>>, Violation> {
        self.peers.note_heard(id);
        let handled = match message {
            Message::Hello(hello) => self.hello(id, hello).map(|()| None),
            Message::Batch(batch) => self.batch(id, batch).map(Some),
            Message::Publish(pages) => self
                .peers
                .service_mut(id, "Publish")
                .and_then(|service| self.exchange.publish(id, service, pages))
                .map(Some),
            Message::Report(stats) => self.report(id, stats).map(|()| None),
            Message::StatsRequest(request) => match self.peers.phase(id) {
                None | Some(Phase::Greeting) => Err(Violation::Unexpected("StatsRequest before Hello")),
                Some(_) => Ok(Some(self.statistics().answer(*request))),
            },
            Message::Refused(refused) => self.refused(id, refused).map(|()| None),
            Message::Set(set) => self.relay.ask(&self.peers, &self.rights, id, Question::Set(*set)),
            Message::Explain(explain) => {
                self.relay
                    .ask(&self.peers, &self.rights, id, Question::Explain(*explain))
            }
            Message::Done(serial) => self.answer(id, &Answer::Done(*serial)),
            Message::Explained(explained) => self.answer(id, &Answer::Explained(explained)),
            Message::NotDone(not_done) => self.answer(id, &Answer::NotDone(not_done)),
            Message::Goodbye => self.goodbye(id).map(|()| None),
            Message::TakeOver(membership) => self.peers.take_over(id, *membership).map(|()| None),
            Message::Released(number) => self.released(id, *number).map(|()| None),
            Message::Welcome(_) => Err(Violation::Unexpected("Welcome")),
            Message::BatchReply(_) => Err(Violation::Unexpected("BatchReply")),
            Message::Published(_) => Err(Violation::Unexpected("Published")),
            Message::Stats(_) => Err(Violation::Unexpected("Stats")),
            Message::Segment(_) => Err(Violation::Unexpected("Segment")),
            Message::SegmentRetired(_) => Err(Violation::Unexpected("SegmentRetired")),
            Message::Evacuated(_) => Err(Violation::Unexpected("Evacuated")),
            Message::Index(_) => Err(Violation::Unexpected("Index")),
            Message::Error(_) => Err(Violation::Unexpected("Error")),
        };
        self.send_announcements();
        handled
    }

    /// A peer introduces itself.
    fn hello(&mut self, id: MemberId, hello: &Hello) -> Result<(), Violation> {
        let role = hello.role()?;
        let greeting = self.peers.greeting(id);
        let (pid, outbox) = greeting.ok_or(Violation::Unexpected("second Hello"))?;
        match role {
            Role::Observer => {
                outbox.push(self.welcome_without_index(), Vec::new());
                self.peers.set_phase(id, Phase::Observer);
            }
            Role::Service => {
                let service = self.welcome_service(id, hello, pid, &outbox)?;
                self.peers.set_phase(id, Phase::Service(Box::new(service)));
                self.warn_of_too_little_room();
            }
        }
        Ok(())
    }

    /// When a store that shares securely refuses pages its VMs can tell what others have: a page that is there already takes no room. It
    /// refuses some when three quarters are in use ([`crate::ledger::shares`]), and what is dead is in use until it has gone.
    fn warn_of_too_little_room(&mut self) {
        let pages: u64 = self.peers.services().map(|(_, _, service)| service.pages).sum();
        let slots = self.exchange.pool.max_slots();
        if self.config.secure
            && pages > u64::from(slots / 2)
            && !std::mem::replace(&mut self.told_of_room, true)
        {
            log::warn!(
                "VMs with {} MiB share securely with room for {} MiB: with less than twice as much as they have, they may be refused pages, \
                 and can tell by that what others have (raise --max-mib)",
                pages >> 8,
                slots >> 8
            );
        }
    }

    /// The greeting for who has no use for the trust domain's secret.
    fn welcome_without_index(&self) -> Vec<u8> {
        let welcome = Welcome {
            salt: 0,
            incarnation: self.incarnation,
            membership: 0,
            index_bytes: 0,
            secure: self.config.secure.into(),
        };
        encode(Kind::Welcome, &[welcome.as_bytes()])
    }

    /// Gives a service the index, its staging buffer and the segments. It is a member from here on.
    fn welcome_service(
        &mut self,
        id: MemberId,
        hello: &Hello,
        pid: u64,
        outbox: &Outbox,
    ) -> Result<Service, Violation> {
        let (pages, max) = (hello.pages, self.config.max_vm_pages);
        if pages == 0 || pages > max {
            return Err(Violation::Pages { pages, max });
        }
        let user = self.peers.user(id).ok_or(Violation::Unexpected("Hello"))?;
        if let Some(seconds) = self.keepers.barred(user) {
            return Err(Violation::Barred { uid: user, seconds });
        }
        let resources = |e| Violation::Resources(Error::Memory(e));
        let (staging, _) = staging_memfd(STAGING_PAGES * PAGE_SIZE).map_err(resources)?;
        let staging = Arc::new(staging);
        let pool = &mut self.exchange.pool;
        let (index, index_bytes) = pool.catalog().file();
        let welcome = Welcome {
            salt: pool.salt().0,
            incarnation: self.incarnation,
            membership: self.peers.begin_membership(id),
            index_bytes,
            secure: self.config.secure.into(),
        };
        outbox.push(
            encode(Kind::Welcome, &[welcome.as_bytes()]),
            vec![index, staging.clone()],
        );
        for (number, segment) in pool.segments().files() {
            outbox.push_greeting(encode(Kind::Segment, &[number.as_bytes()]), vec![segment]);
        }
        pool.join(id, user);
        let announced = hello.name();
        let name = self.peers.unique_name(&announced, pid);
        log::info!("VM {name} (process {pid}) has joined with {pages} pages");
        let before = self.peers.reported_before(pid, &name);
        Ok(Service {
            has_reported: before.is_some(),
            stats: before.unwrap_or_default(),
            name,
            announced,
            pages,
            staging,
            series: 0,
            leaving: false,
        })
    }

    /// A VM that is not deduplicated introduces itself.
    fn refused(&mut self, id: MemberId, refused: &Refused) -> Result<(), Violation> {
        let greeting = self.peers.greeting(id);
        let (pid, outbox) = greeting.ok_or(Violation::Unexpected("Refused after a greeting"))?;
        outbox.push(self.welcome_without_index(), Vec::new());
        let announced = refused.name.text();
        let name = self.peers.unique_name(&announced, pid);
        log::info!("VM {name} (process {pid}) is refused: {}", refused.refusal);
        let vm = RefusedVm {
            name,
            announced,
            pages: refused.pages,
            refusal: refused.refusal.clone(),
        };
        self.peers.set_phase(id, Phase::Refused(Box::new(vm)));
        Ok(())
    }

    fn batch(&mut self, id: MemberId, batch: &Batch<'_>) -> Result<Vec<u8>, Violation> {
        let pages = self.peers.service_mut(id, "Batch")?.pages;
        let done = self.exchange.batch(id, pages, batch);
        self.exchange.pool.reclaim();
        done
    }

    /// A service's account.
    fn report(&mut self, id: MemberId, stats: &ServiceStats) -> Result<(), Violation> {
        let max = self.config.max_vm_pages;
        let service = self.peers.service_mut(id, "Report")?;
        // Memory may have been added to the VM. (When some goes, what it referenced goes a little later.)
        service.pages = service.pages.max(stats.pages.min(max));
        // What a service did before it knew this store was not done here: it counts on over stores that come and go.
        let before = match service.has_reported || stats.passes_total <= 1 {
            true => service.stats,
            false => *stats,
        };
        accounts::accumulate(&mut self.totals, &before, stats);
        (service.stats, service.has_reported) = (*stats, true);
        Ok(())
    }

    fn answer(&mut self, id: MemberId, answer: &Answer<'_>) -> Result<Option<Vec<u8>>, Violation> {
        self.relay.answer(&self.peers, id, answer).map(|()| None)
    }

    /// A service maps nothing any more.
    fn goodbye(&mut self, id: MemberId) -> Result<(), Violation> {
        self.peers.service_mut(id, "Goodbye")?.leaving = true;
        Ok(())
    }

    /// A service knows a retired segment no more.
    fn released(&mut self, id: MemberId, number: u32) -> Result<(), Violation> {
        self.peers.service_mut(id, "Released")?;
        let can_be = self.exchange.pool.released(id, number);
        can_be.then_some(()).ok_or(Violation::Unexpected(
            "Released (of a retired segment, without references)",
        ))
    }

    /// A connection ends: nothing is sent to the peer any more, and nothing that it sends is read.
    pub(crate) fn hang_up(&mut self, id: MemberId) {
        self.peers.drop_outbox(id);
        self.exchange.pool.lose(id);
        self.send_announcements();
    }

    /// The socket is gone, or the peer has said goodbye: forgets what it sighted, some at a time. Returns whether there is more to
    /// do; `step` counts the calls.
    pub(crate) fn forget_some(&mut self, id: MemberId, step: usize) -> bool {
        self.exchange.forget_some(id, step)
    }

    /// What it sighted is forgotten.
    pub(crate) fn disconnect(&mut self, id: MemberId) -> Parting {
        self.relay.forget(&self.peers, id);
        self.exchange.disconnect(id);
        // A service that becomes an orphan keeps its name.
        let free = match self.peers.phase(id) {
            Some(Phase::Refused(vm)) => Some(vm.name.clone()),
            _ => None,
        };
        let parting = self.peers.disconnect(id);
        if let Some(name) = free {
            self.peers.pass_on(&name);
        }
        parting
    }

    /// The peer's connection broke, and its process may live: what it references no longer counts as sharing, some at a time.
    /// Returns whether there is more to do.
    pub(crate) fn orphan(&mut self, id: MemberId) -> bool {
        self.exchange.pool.orphan_some(id)
    }

    /// The peer's process has ended, or maps nothing: drops its references, some at a time. Returns whether there is
    /// more to do.
    pub(crate) fn depart(&mut self, id: MemberId) -> bool {
        let more = self.exchange.pool.leave_some(id);
        self.send_announcements();
        if !more && let Some(name) = self.peers.remove(id) {
            self.peers.pass_on(&name);
        }
        more
    }

    /// Moves some pages, if there are pages to be moved. Returns whether there are more.
    pub(crate) fn evacuate(&mut self) -> bool {
        let more = self.exchange.pool.evacuate(MOVED_AT_ONCE);
        self.send_announcements();
        more
    }

    /// What goes with time; to be called once a second. Lets empty segments go, answers for VMs that do not, and makes huge pages of what is shared as such.
    pub(crate) fn tick(&mut self, now: Instant) {
        self.exchange.pool.retire_idle();
        self.keepers.cut_off(&self.peers, &self.exchange.pool, now);
        self.exchange.expire_pending();
        self.exchange.use_room();
        self.send_announcements();
        self.relay.expire(&self.peers, now);
        self.peers.look_for_room();
        self.exchange.pool.collapse_shared(now);
    }

    /// What there is to tell in numbers.
    pub(crate) fn statistics(&self) -> Statistics<'_> {
        Statistics {
            exchange: &self.exchange,
            peers: &self.peers,
        }
    }

    /// Tells all services of new files and of those that are gone.
    fn send_announcements(&mut self) {
        for announcement in self.exchange.pool.take_announcements() {
            let (record, file) = match announcement {
                Announcement::Segment(number, file) => {
                    (encode(Kind::Segment, &[number.as_bytes()]), Some(file))
                }
                Announcement::SegmentRetired(number) => {
                    (encode(Kind::SegmentRetired, &[number.as_bytes()]), None)
                }
                Announcement::Evacuated(number) => (encode(Kind::Evacuated, &[number.as_bytes()]), None),
                Announcement::Index(bytes, file) => (encode(Kind::Index, &[bytes.as_bytes()]), Some(file)),
            };
            self.peers.broadcast(&record, file.as_ref());
        }
    }
}
