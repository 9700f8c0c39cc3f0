//! The scanning thread's work, pass by pass.
//!
//! ```text
//!   written  ------>  keyed  ------>  found  ------>  admitted  ------>  merged
//!   track::dirty      lookup::keys    lookup::find    merge::planner     merge::planner
//!   (scan::order)                     lookup::publish (merge::admission) (merge::merger)
//! ```
//!
//! Each stage takes what the one before has left and returns what it made of it; no stage calls another. The pass hands on,
//! and between any two pieces of work it *breathes*: it keeps the CPU budget, answers questions, and notices the wish to stop.

use crate::account::Account;
use crate::config::{Breaks, Config};
use crate::error::Error;
use crate::lookup::find::{Finder, FoundAgain};
use crate::lookup::keys::{KeyReader, Keyed};
use crate::lookup::request::MergeRequest;
use crate::lookup::tree_search::Searcher;
use crate::lookup::{candidates, publish};
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::merge::planner::{Context, Planner};
use crate::scan::control::Control;
use crate::scan::order::ScanOrder;
use crate::scan::pace::Pace;
use crate::store::session::{Doubt, Session};
use crate::sys::proc;
use crate::thp::duplicates::{self, Judgement};
use crate::thp::monitor::Monitor;
use crate::thp::{collapse, split, zeros};
use crate::track::dirty;
use crate::unmerge::address_space::AddressSpace;
use crate::unmerge::page_reserve::Reserve;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use vmm_dedup_protocol::index::News;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::MAX_BATCH;

/// Requests collected before they are merged; bounds the memory for them.
const MAX_FOUND: usize = 1 << 17;
/// Mappings that must remain for merging to be worth starting.
const MIN_VMAS: usize = 1024;
/// Passes between two counts of the process's mappings, with managed breaks.
const VMA_COUNT_PERIOD: u64 = 16;

/// Everything the scanning thread owns.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) config: Config,
    pub(crate) control: Arc<Control>,
    pub(crate) map: PageMap,
    pub(crate) space: AddressSpace,
    pub(crate) session: Session,
    pub(crate) account: Account,
    pub(super) monitor: Monitor,
    pub(super) finder: Finder,
    pub(super) planner: Planner,
    /// Pages with a twin that were not admitted yet.
    pub(super) found: Vec<MergeRequest>,
    pub(super) pace: Pace,
    /// The number of this pass.
    pub(super) number: u64,
    /// Faults of the process's other threads up to the last pass.
    faults: u64,
    /// Nothing of guest memory is replaced for now, see [`Self::check_direct_io`].
    pub(super) suspended: bool,
    pub(super) ended: bool,
}

impl Pass {
    /// Checks everything that can fail and prepares; touches no guest page. Runs in the caller's thread.
    pub(crate) fn new(
        config: Config,
        memory: Memory,
        store_path: PathBuf,
        search: Searcher,
        control: Arc<Control>,
    ) -> Result<Self, Error> {
        config.validate()?;
        proc::check_direct_io()?;
        let reserve = match config.breaks {
            Breaks::Kernel => None,
            Breaks::Managed {
                reserve_pages,
                floor_bytes,
            } => Some(Reserve::new(reserve_pages, floor_bytes)),
        };
        let (limit, used) = (proc::max_map_count()?, proc::vma_count()?);
        let left = limit.saturating_sub(used).saturating_sub(limit / 16);
        let vmas_max = config.max_vmas.unwrap_or(left).min(left);
        if left < MIN_VMAS {
            return Err(Error::TooFewVmas {
                limit,
                used,
                needed: MIN_VMAS,
            });
        }
        let memory = Arc::new(memory);
        let map = PageMap::new(memory.clone(), i64::try_from(vmas_max).unwrap_or(i64::MAX), used);
        let space = AddressSpace::new(&memory, &map, reserve)?;
        let monitor = Monitor::new(&config, &space.uffd, &memory);
        for region in memory.regions() {
            space.register(&region)?;
        }
        // Last: who has introduced himself counts for the store until this process ends.
        let session = Session::open(store_path, config.name.clone(), memory.pages())?;
        let mut pass = Self {
            planner: Planner::new(&config),
            pace: Pace::new(config.cpu_percent),
            finder: Finder::new(search),
            config,
            control,
            map,
            space,
            session,
            account: Account::default(),
            monitor,
            found: Vec::new(),
            number: 0,
            faults: 0,
            suspended: false,
            ended: false,
        };
        pass.fill_stats();
        Ok(pass)
    }

    /// To be called first in the thread that will run the passes.
    pub(crate) fn enter_thread(&mut self) {
        crate::sys::sched::enter_service_thread();
        self.pace = Pace::new(self.control.cpu_percent());
        self.account.enter_thread();
    }

    /// One pass. Errors of the store are survived: what was shared stays shared, and a new store is looked for.
    pub(crate) fn run(&mut self) {
        self.number += 1;
        self.account.stats.passes_total += 1;
        match self.try_run() {
            Ok(()) | Err(Error::Stopped) => {}
            Err(error @ Error::Pagemap(_)) => log::warn!("a pass ended early: {error}"),
            Err(error) => self.lose_store(&error),
        }
        self.account.stats.last_pass_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
        self.report();
    }

    fn try_run(&mut self) -> Result<(), Error> {
        self.prepare()?;
        if self.suspended {
            return self.stand_by();
        }
        if self.session.is_connected() {
            let mut order = ScanOrder::new(self.number);
            while let Some(chunks) = order.next(&self.map) {
                self.visit(chunks)?;
                self.breathe()?;
            }
            self.account.stats.full_scans_total += u64::from(order.is_full());
            self.space
                .find_copied(&mut self.map, &mut self.account, self.number)?;
            self.account.lap(|cpu| &mut cpu.track);
        }
        self.watch_use()?;
        if self.session.is_connected() {
            self.look_at_huge_pages()?;
            self.settle()?;
        }
        Ok(())
    }

    /// What others did since the last pass.
    fn prepare(&mut self) -> Result<(), Error> {
        self.note_breaks();
        let discards = self.space.discards.clone();
        self.space.note_discards(&mut discards.lock(), &mut self.map);
        self.space
            .breaker
            .set_vmas_left(self.map.vmas_max() - self.map.vmas());
        self.check_direct_io();
        self.session.find_store(self.map.memory().pages());
        self.session.take_pushes()?;
        self.finder.prepare(&self.session, self.number);
        // Every first write to a protected page, and every copy-on-write, is a fault of some other thread.
        let faults = proc::faults_of_others();
        if std::mem::replace(&mut self.faults, faults) != faults {
            let chunks = self.map.chunks_mut();
            chunks.for_each(|chunk| (chunk.pending, chunk.unchecked) = (true, true));
        }
        self.account.lap(|cpu| &mut cpu.track);
        Ok(())
    }

    /// Takes over what the fault thread did.
    pub(super) fn note_breaks(&mut self) {
        let broke = self.space.take_broken(&mut self.map, &mut self.account);
        let managed = self.space.breaker.managed();
        if managed && (broke || self.number.is_multiple_of(VMA_COUNT_PERIOD)) {
            // A page that the service broke lies in a mapping of its own, which the map cannot see.
            if let Ok(count) = proc::vma_count() {
                self.map.set_vmas(count);
            }
        }
    }

    /// Direct I/O that the kernel does not show as pinning must not meet anything that replaces memory. A VMM may open such a
    /// file at any time.
    fn check_direct_io(&mut self) {
        let refused = proc::check_direct_io().err();
        if let (Some(error), false) = (&refused, self.suspended) {
            log::warn!("merging is suspended: {error}");
        }
        self.suspended = refused.is_some();
    }

    /// Written > keyed > found, for some chunks.
    fn visit(&mut self, chunks: std::ops::Range<usize>) -> Result<(), Error> {
        let probes = self.monitor.probes();
        let (space, number) = (&mut self.space, self.number);
        let pages = dirty::visit(
            &mut self.map,
            &mut space.pagemap,
            &space.uffd,
            probes,
            number,
            chunks,
        )?;
        self.account.lap(|cpu| &mut cpu.track);
        let mut reader = KeyReader {
            memory: self.map.memory(),
            salt: self.session.salt(),
            account: &mut self.account,
        };
        let keyed = reader.read_all(&pages);
        self.find(keyed);
        self.account.lap(|cpu| &mut cpu.key);
        self.tell_store()?;
        self.account.lap(|cpu| &mut cpu.store);
        if self.found.len() >= MAX_FOUND {
            self.merge()?;
        }
        Ok(())
    }

    /// Keyed > found.
    fn find(&mut self, keyed: Keyed) {
        self.found.extend(keyed.zeros.into_iter().map(MergeRequest::zero));
        let found = self.finder.find(
            &mut self.map,
            &self.session,
            &mut self.account,
            self.number,
            &keyed.keys,
        );
        self.found.extend(found);
    }

    /// Tells the store what there is to tell, and publishes what it asks for.
    pub(super) fn tell_store(&mut self) -> Result<(), Error> {
        while self.session.is_connected() && !self.map.outbox.is_empty() {
            let pending = !self.found.is_empty();
            let wanted = self.session.flush(&mut self.map, pending)?;
            let huge_pages = !self.space.breaker.managed();
            let (map, session, account) = (&self.map, &mut self.session, &mut self.account);
            self.found
                .extend(publish::publish(map, session, account, huge_pages, &wanted)?);
        }
        Ok(())
    }

    /// Found > admitted > merged.
    fn merge(&mut self) -> Result<(), Error> {
        let found = std::mem::take(&mut self.found);
        let suspended = self.suspended;
        let (planner, mut with) = self.planning();
        planner.plan(&mut with, suspended, found)?;
        let mut result = Ok(());
        while result.is_ok() && {
            let (planner, mut with) = self.planning();
            planner.step(&mut with)
        } {
            result = self.breathe();
        }
        let wrong = self.planner.take_wrong_proposals();
        self.finder.search_mut().note_wrong(wrong);
        // An interrupted pass leaves the rest to the next one.
        self.found.extend(self.planner.end(&mut self.space));
        self.account.lap(|cpu| &mut cpu.merge);
        result?;
        self.tell_store()
    }

    fn planning(&mut self) -> (&mut Planner, Context<'_>) {
        let context = Context {
            map: &mut self.map,
            space: &mut self.space,
            session: &mut self.session,
            account: &mut self.account,
            monitor: &self.monitor,
            pass: self.number,
        };
        (&mut self.planner, context)
    }

    /// Samples the use of memory, and builds huge pages again of what is hot.
    fn watch_use(&mut self) -> Result<(), Error> {
        let Some(mut round) = self.monitor.begin_round(&mut self.map) else {
            return Ok(());
        };
        while let Some(batch) = round.next_batch() {
            let (map, space) = (&mut self.map, &mut self.space);
            self.monitor.sample(map, space, &mut self.account, &batch);
            self.account.lap(|cpu| &mut cpu.monitor);
            self.breathe()?;
        }
        self.monitor.end_round(&self.map, &mut self.account, &round);
        for at in 0..self.map.chunks().len() {
            if self.suspended || !self.monitor.wants_collapse(&mut self.map, at, round.due) {
                continue;
            }
            let (map, space) = (&mut self.map, &mut self.space);
            collapse::collapse(map, space, &mut self.account, self.number, at);
            self.account.lap(|cpu| &mut cpu.merge);
            self.show_progress();
            self.breathe()?;
        }
        Ok(())
    }

    /// Looks at the huge pages that are due: what repeats in them, and what is to be split or given up.
    fn look_at_huge_pages(&mut self) -> Result<(), Error> {
        for at in 0..self.map.chunks().len() {
            if self.map.chunk(at).huge && self.map.chunk_mut(at).look_due() {
                self.look_at_huge_page(at);
                self.account.lap(|cpu| &mut cpu.key);
                self.tell_store()?;
                self.account.lap(|cpu| &mut cpu.store);
                self.breathe()?;
            }
        }
        Ok(())
    }

    fn look_at_huge_page(&mut self, at: usize) {
        let (map, session, account) = (&mut self.map, &self.session, &mut self.account);
        let look = duplicates::look(map, session, account, &self.monitor, at);
        if look.all_zero() && !self.suspended && zeros::give_up(map, &mut self.space, account, at) {
            return;
        }
        let managed = self.space.breaker.managed();
        match look.judge(map, session, &self.monitor, managed, self.number) {
            Judgement::Stay => {}
            Judgement::Split => {
                let first = map.chunk_at(at).pages.start;
                split::split_if_huge(map, account, &self.monitor, first);
            }
            Judgement::Ask(keyed) => self.find(keyed),
        }
    }

    /// Works until there is nothing left to tell, hash, publish or merge.
    fn settle(&mut self) -> Result<(), Error> {
        self.take_quiesced();
        self.resync()?;
        loop {
            self.tell_store()?;
            self.take_news();
            self.account.lap(|cpu| &mut cpu.store);
            if self.finder.has_pages_to_hash() && self.found.len() < MAX_FOUND {
                let (map, session, account) = (&mut self.map, &self.session, &mut self.account);
                let found = self.finder.hash_some(map, session, account, self.number);
                self.found.extend(found);
                self.account.lap(|cpu| &mut cpu.hash);
                self.breathe()?;
            } else if !self.found.is_empty() {
                self.merge()?;
            } else if self.map.outbox.is_empty() {
                break;
            }
        }
        self.acknowledge()
    }

    /// At the end of a pass nothing is pending: lets the store reuse what was freed.
    pub(super) fn acknowledge(&mut self) -> Result<(), Error> {
        debug_assert!(self.found.is_empty() && self.map.outbox.is_empty());
        let number = self.number;
        self.map.chunks_mut().for_each(|chunk| chunk.end_pass(number));
        self.session.acknowledge()
    }

    /// What was deferred is to be merged once its chunk has quiesced.
    fn take_quiesced(&mut self) {
        let quiesced = self.planner.deferred.take_quiesced(&self.map, self.number);
        self.found.extend(quiesced.published);
        let missing = self.find_again(&quiesced.twins);
        for (page, key) in missing {
            self.map.sight(page, key, self.number);
        }
    }

    /// Candidates > found. Returns those whose keys are in no index.
    fn find_again(&mut self, candidates: &[(Page, Key)]) -> Vec<(Page, Key)> {
        let FoundAgain { requests, missing } = self.finder.find_again(
            &mut self.map,
            &self.session,
            &mut self.account,
            self.number,
            candidates,
        );
        self.found.extend(requests);
        missing
    }

    /// Looks whether what entered the index lately concerns a candidate.
    fn take_news(&mut self) {
        let Some(news) = self.session.news() else {
            return;
        };
        let candidates = candidates::in_news(&self.map, &news);
        let missing = self.find_again(&candidates);
        match news {
            News::Overrun => self.session.schedule_resync(self.number, Doubt::Missed),
            // What entered the index is no sighting for the store any more. If it has left already, it must become one again.
            News::Keys(_) => {
                for (page, key) in missing {
                    self.map.sight(page, key, self.number);
                }
            }
        }
    }

    /// A key that enters the index is no sighting any more, and if it leaves unseen by us (much entered at once, or its twin
    /// found no mapping), nobody would ever be asked for our page. So from time to time, if that may have happened, all that
    /// the index lacks is sighted anew. It is withdrawn first: a key that is sighted twice by one VM would be asked for.
    fn resync(&mut self) -> Result<(), Error> {
        if !self.session.begin_resync(self.number) {
            return Ok(());
        }
        let deferred: HashSet<Page> = self
            .planner
            .deferred
            .twins
            .iter()
            .map(|(page, _)| *page)
            .collect();
        let mut candidates = self.map.candidates_with(|_| true);
        candidates.retain(|(page, _)| !deferred.contains(page));
        for some in candidates.chunks(MAX_BATCH) {
            if let Err(error) = self.breathe() {
                self.session.schedule_resync(self.number, Doubt::Missed);
                return Err(error);
            }
            let missing = self.find_again(some);
            let keys = missing.iter().map(|(_, key)| key.raw());
            self.map.outbox.withdrawals.extend(keys);
            self.tell_store()?;
            for (page, key) in missing {
                self.map.sight(page, key, self.number);
            }
        }
        self.account.lap(|cpu| &mut cpu.store);
        Ok(())
    }

    /// Gives up a connection. What was mapped stays mapped: the mappings keep the old store's memory alive. It is
    /// keyed anew and moves to the next store's slots as twins are found there.
    pub(crate) fn lose_store(&mut self, error: &Error) {
        log::warn!("lost the store: {error}; guests go on, and merging resumes with the next store");
        self.session.lose_store();
        self.finder.forget_store();
        self.found.clear();
        self.planner.forget_store();
        self.map.orphan_all();
    }

    /// All chunks are to be visited.
    pub(super) fn requeue_all(&mut self) {
        let chunks = self.map.chunks_mut();
        chunks.for_each(|chunk: &mut ChunkState| chunk.pending = true);
    }
}
