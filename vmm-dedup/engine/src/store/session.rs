//! A service's membership with the store: the connection as long as there is one, what is told to it and when, and what is
//! remembered of it until the next.
//!
//! # The service's half of the rule of slots
//!
//! A slot that has left the index is free, and its number may name another page, only when every service that is connected has acknowledged a
//! later epoch of the index (see `vmm_dedup_protocol::index`). The epoch that goes with a message was read when nothing that had been looked up in the
//! index was pending, and every reference taken before that is in this message or an earlier one. [`Session::flush`] is told
//! whether something is pending.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::store::connection::{Membership, Store};
use crate::sys::proc;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::NEWS_RING;
use vmm_dedup_protocol::index::{IndexReader, News};
use vmm_dedup_protocol::key::{Key, Salt};
use vmm_dedup_protocol::message::Ask;
use vmm_dedup_protocol::stats::ServiceStats;

/// Least passes from one time that all candidates are sighted anew to the next.
const RESYNC_PERIOD: u64 = 32;
/// The same while there are no mappings left for what is found, which can be so for ever.
const RESYNC_PERIOD_FULL: u64 = 1024;

/// Least time between two looks at the process's mappings, and how many times longer it must be than the CPU time of the last one.
const LOOK_PERIOD: Duration = Duration::from_secs(2);
const LOOK_SHARE: u32 = 100;

/// From a connection to another store on, pages of the one that is gone have so long to find twins; and the time from one try to
/// leave it to the next.
const VACATE_AFTER: Duration = Duration::from_secs(20);
const VACATE_PERIOD: Duration = Duration::from_secs(10);

/// What others gave up waits for a long pass no longer than this, about.
const KEEPING_UP: Duration = Duration::from_secs(3);

/// Between two looks at a store that does it the other way.
const OTHER_WAY_PERIOD: Duration = Duration::from_secs(60);

/// Why the store may have forgotten sightings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResyncCause {
    /// Something was missed, or not merged.
    Missed,
    /// There are no mappings left for what is found.
    NoMappings,
}

/// When the process's mappings may be looked at again.
#[derive(Debug, Default)]
struct MappingsLook {
    not_before: Option<Instant>,
}

impl MappingsLook {
    /// The files that the process maps, if the time has come.
    fn files(&mut self) -> Option<Vec<(Range<usize>, u64)>> {
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        let start = proc::thread_cpu_ns();
        let files = proc::mapped_files();
        let took = Duration::from_nanos(proc::thread_cpu_ns() - start);
        self.not_before = Some(Instant::now() + LOOK_PERIOD.max(took * LOOK_SHARE));
        files.inspect_err(|e| log::debug!("{e}")).ok()
    }
}

/// What the store wants of pages that were sighted.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    pub(crate) publish: Vec<Page>,
    /// Their keys are in the index.
    pub(crate) look_up: Vec<(Page, Key)>,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Session {
    store: Option<Store>,
    path: PathBuf,
    name: String,
    /// Whether nothing of the store may be mapped into the guest: as the first store says, for good.
    secure: bool,
    /// When a store that does it the other way was found where this one was.
    other_way: Option<Instant>,
    /// Of the store, or of the last one there was.
    salt: Salt,
    /// Index epoch read when nothing looked up was pending, to be reported with the next message.
    epoch: u64,
    /// The last one reported.
    acknowledged: u64,
    /// When an epoch was read last, or tried to be.
    read_at: Instant,
    /// Position in the index's news.
    news: u64,
    /// The store may have forgotten sightings of ours: the pass in which they are repeated.
    resync_at: Option<u64>,
    mappings_look: MappingsLook,
    /// Where segments that went are still mapped.
    kept: Vec<Range<usize>>,
    /// When what is still mapped of stores that are gone is to be left.
    vacate_at: Option<Instant>,
    /// Memberships with connections that broke, of which this process may map slots.
    broken: Vec<Membership>,
}

impl Session {
    /// Connects and introduces a VM of so many pages.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) fn open(path: PathBuf, name: String, pages: usize) -> Result<Self, Error> {
        let mut session = Self {
            store: None,
            path,
            name,
            secure: false,
            other_way: None,
            salt: Salt(0),
            epoch: 0,
            acknowledged: 0,
            read_at: Instant::now(),
            news: 0,
            resync_at: None,
            mappings_look: MappingsLook::default(),
            kept: Vec::new(),
            vacate_at: None,
            broken: Vec::new(),
        };
        let store = Store::connect(&session.path, &session.name, pages)?;
        session.secure = store.is_secure();
        session.join(store);
        Ok(session)
    }

    fn connect(&mut self, pages: usize) -> Result<(), Error> {
        let store = Store::connect(&self.path, &self.name, pages)?;
        if store.is_secure() != self.secure {
            let error = Error::OtherWay {
                path: self.path.clone(),
                secure: store.is_secure(),
            };
            if self.other_way.replace(Instant::now()).is_none() {
                log::warn!("{error}");
            }
            return Err(error);
        }
        self.other_way = None;
        self.join(store);
        Ok(())
    }

    fn join(&mut self, store: Store) {
        (self.epoch, self.acknowledged) = (store.index().epoch(), store.index().epoch());
        self.read_at = Instant::now();
        (self.news, self.salt) = (store.index().news_position(), store.salt());
        // The others ended with their stores.
        let incarnation = store.membership().incarnation;
        self.broken.retain(|earlier| earlier.incarnation == incarnation);
        self.store = Some(store);
    }

    /// Connects again if the store was lost and there is one now; whether it did. The store is told nothing that was meant for another.
    pub(crate) fn find_store(&mut self, map: &mut PageMap) -> bool {
        let tries_later = self
            .other_way
            .is_some_and(|since| since.elapsed() < OTHER_WAY_PERIOD);
        if self.store.is_some() || tries_later {
            return false;
        }
        map.forget_outbox();
        match self.connect(map.memory().pages()) {
            Ok(()) => {
                self.vacate_at = Some(Instant::now() + VACATE_AFTER);
                log::info!("connected to the store at {}", self.path.display());
            }
            Err(error) => log::debug!("{error}"),
        }
        self.store.is_some()
    }

    /// Gives up the connection.
    pub(crate) fn lose_store(&mut self) {
        if let Some(store) = self.store.take().filter(|store| !store.maps_nothing()) {
            self.broken.push(store.membership());
        }
    }

    /// No page maps a slot any more that was found over a connection that broke: if it was to this store, the store stops waiting.
    pub(crate) fn take_over(&mut self) -> Result<(), Error> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        for earlier in &self.broken {
            store.take_over(*earlier)?;
        }
        self.broken.clear();
        Ok(())
    }

    /// The end, at which nothing is mapped any more. Where the connection was lost before that could be said, another one is made to
    /// say it: else what was referenced over the old one would count until this process ends.
    pub(crate) fn end_broken(&mut self, pages: usize) {
        if self.store.is_some() || self.broken.is_empty() {
            return;
        }
        if let Err(error) = self.connect(pages).and_then(|()| self.take_over()) {
            log::info!(
                "the store is not told that the VM has given everything back, and counts it until the process ends: {error}"
            );
        }
    }

    /// Takes the connection, for the end.
    pub(crate) fn take_store(&mut self) -> Option<Store> {
        self.store.take()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.store.is_some()
    }

    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    pub(crate) fn store_mut(&mut self) -> Option<&mut Store> {
        self.store.as_mut()
    }

    pub(crate) fn index(&self) -> Option<&IndexReader> {
        self.store.as_ref().map(Store::index)
    }

    /// Whether nothing of the store may be mapped into the guest, and no page is looked up: see [`secure`](mod@crate::scan::secure).
    pub(crate) fn is_secure(&self) -> bool {
        self.secure
    }

    /// Whether this process may still have slots of connections that broke.
    pub(crate) fn has_broken(&self) -> bool {
        !self.broken.is_empty()
    }

    pub(crate) fn salt(&self) -> Salt {
        self.salt
    }

    /// Sends the service's account.
    pub(crate) fn report(&mut self, stats: &ServiceStats) -> Result<(), Error> {
        self.store.as_mut().map_or(Ok(()), |store| store.report(stats))
    }

    /// Takes in what the store pushed, without waiting.
    pub(crate) fn take_pushes(&mut self) -> Result<(), Error> {
        self.store.as_mut().map_or(Ok(()), Store::take_pushes)
    }

    /// Tells the store what the outbox holds, as much as one message takes; returns what it wants. To be called until
    /// the outbox is empty. `pending`: something that was looked up in the index was not merged yet.
    pub(crate) fn flush(&mut self, map: &mut PageMap, pending: bool) -> Result<Asked, Error> {
        let Some(store) = &mut self.store else {
            return Ok(Asked::default());
        };
        let told = map.next_message();
        let more_refs = map.outbox().has_refs();
        let epoch = if more_refs { self.acknowledged } else { self.epoch };
        let keys: Vec<u64> = told.sightings.iter().map(|sighting| sighting.key.raw()).collect();
        let asks = store.batch(epoch, &keys, &told.withdrawals, &told.ambiguous, &told.refs)?;
        self.acknowledged = epoch;
        if !pending && !more_refs {
            (self.epoch, self.read_at) = (store.index().epoch(), Instant::now());
        }
        let mut asked = Asked::default();
        for (at, ask) in asks.into_iter().map(Ask::parse) {
            match (told.sightings.get(at), ask) {
                (Some(sighting), Ask::Publish) => asked.publish.push(sighting.page),
                (Some(sighting), Ask::LookUp) => asked.look_up.push((sighting.page, sighting.key)),
                (None, _) => {}
            }
        }
        Ok(asked)
    }

    /// Whether others have waited for a while for this service to acknowledge what left the index. If so it is asked again only after
    /// another while.
    pub(crate) fn is_waited_for(&mut self) -> bool {
        let waits = self
            .index()
            .is_some_and(|index| index.epoch() > self.acknowledged && self.read_at.elapsed() >= KEEPING_UP);
        if waits {
            self.read_at = Instant::now();
        }
        waits
    }

    /// Nothing is pending, and the outbox is empty: lets the store free what has left the index.
    pub(crate) fn acknowledge(&mut self) -> Result<(), Error> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        store.age_staging();
        (self.epoch, self.read_at) = (store.index().epoch(), Instant::now());
        if self.epoch > self.acknowledged {
            store.batch(self.epoch, &[], &[], &[], &[])?;
            self.acknowledged = self.epoch;
        }
        Ok(())
    }

    /// Gives up segments that went and that this process maps nowhere any more: at once what was never mapped, and the others once
    /// in a while. Nothing that was looked up is pending, and all was told. Where it maps the others is kept for
    /// [`Self::take_kept`].
    pub(crate) fn release_unmapped(&mut self) -> Result<(), Error> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        let retired = store.retired().iter();
        let never_mapped: Vec<u32> = retired
            .filter(|segment| !segment.was_mapped)
            .map(|segment| segment.number)
            .collect();
        never_mapped
            .into_iter()
            .try_for_each(|number| store.release(number))?;
        // To look takes the longer the more is mapped.
        if store.retired().is_empty() {
            return Ok(());
        }
        let Some(mapped) = self.mappings_look.files() else {
            return Ok(());
        };
        let (mut gone, mut still) = (Vec::new(), Vec::new());
        for segment in store.retired() {
            let Ok(stat) = rustix::fs::fstat(&segment.file) else {
                continue;
            };
            let places = mapped.iter().filter(|(_, inode)| *inode == stat.st_ino);
            let before = still.len();
            still.extend(places.map(|(range, _)| range.clone()));
            if still.len() == before {
                gone.push(segment.number);
            }
        }
        self.kept = still;
        gone.into_iter().try_for_each(|number| store.release(number))
    }

    /// Where segments that went were still mapped when that was last looked at, once.
    pub(crate) fn take_kept(&mut self) -> Vec<Range<usize>> {
        std::mem::take(&mut self.kept)
    }

    /// Whether it is time to leave what is still mapped of stores that are gone.
    pub(crate) fn vacates_old_stores(&self) -> bool {
        self.store.is_some() && self.vacate_at.is_some_and(|at| at <= Instant::now())
    }

    /// All of these was left, or it is tried again later.
    pub(crate) fn note_vacated(&mut self, done: bool) {
        self.vacate_at = (!done).then(|| Instant::now() + VACATE_PERIOD);
    }

    /// What entered the index since the last call; `None` if nothing did.
    pub(crate) fn news(&mut self) -> Option<News> {
        let index = self.store.as_ref()?.index();
        let position = index.news_position();
        if position == self.news {
            return None;
        }
        let news = index.news_since(self.news);
        self.news = position;
        Some(news)
    }

    /// Whether some of it can not be told any more.
    pub(crate) fn missed_news(&self) -> bool {
        let since = |index: &IndexReader| index.news_position().checked_sub(self.news);
        self.index()
            .is_some_and(|index| since(index).is_none_or(|count| count >= NEWS_RING as u64))
    }

    /// All candidates are looked up again as if everything were new.
    pub(crate) fn overrun_news(&mut self) {
        self.news = u64::MAX; // more than any position
    }

    /// The store may have forgotten sightings: they are repeated in a later pass.
    pub(crate) fn schedule_resync(&mut self, pass: u64, cause: ResyncCause) {
        let period = match cause {
            ResyncCause::Missed => RESYNC_PERIOD,
            ResyncCause::NoMappings => RESYNC_PERIOD_FULL,
        };
        let at = (pass + 1).next_multiple_of(period);
        self.resync_at = Some(self.resync_at.map_or(at, |before| before.min(at)));
    }

    /// Whether sightings are to be repeated in this pass. Then they count as repeated.
    pub(crate) fn begin_resync(&mut self, pass: u64) -> bool {
        self.resync_at.take_if(|at| *at <= pass).is_some()
    }
}
