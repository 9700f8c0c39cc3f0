//! The scanning thread's state and the order of its work. A pass: what broke, what was written ([`crate::track::dirty`]),
//! keys, twins and publications ([`crate::lookup::candidates`]), merging ([`crate::merge::planner`]), the report.

use crate::config::Config;
use crate::error::Error;
use crate::lookup::tree_search::Searcher;
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_state::{State, Table};
use crate::merge::merger::Merger;
use crate::merge::request::Item;
use crate::scan::control::Control;
use crate::scan::cpu_budget::Pacer;
use crate::store::connection::Store;
use crate::sys::pagemap::Pagemap;
use crate::sys::proc;
use crate::sys::uffd::{Mode, Uffd};
use crate::thp::monitor::Mixed;
use crate::unmerge::cow::Breaker;
use crate::unmerge::discard::Discards;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use vmm_dedup_protocol::key::{Key, Salt};
use vmm_dedup_protocol::message::RefDelta;
use vmm_dedup_protocol::stats::ServiceStats;

/// What is to be told to the store.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) sightings: Vec<u64>,
    /// Pages of the sightings.
    pub(crate) pages: Vec<Page>,
    pub(crate) withdrawals: Vec<u64>,
    /// Line keys of pages that differ from the only slot with that key.
    pub(crate) ambiguous: Vec<u64>,
    pub(crate) refs: Vec<RefDelta>,
}

impl Outbox {
    pub(crate) fn is_empty(&self) -> bool {
        let keys = [&self.sightings, &self.withdrawals, &self.ambiguous];
        keys.iter().all(|keys| keys.is_empty()) && self.refs.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Everything the scanning thread owns.
#[derive(Debug)]
pub(crate) struct Scanner {
    pub(crate) config: Config,
    pub(crate) memory: Arc<Memory>,
    pub(crate) table: Table,
    pub(crate) chunks: Vec<ChunkState>,
    pub(crate) tracker: Arc<Uffd>,
    pub(crate) pagemap: Pagemap,
    pub(crate) breaker: Arc<Breaker>,
    pub(crate) merger: Merger,
    pub(crate) discards: Arc<Discards>,
    pub(crate) mixed: Mixed,
    pub(crate) searcher: Searcher,
    pub(crate) store: Option<Store>,
    pub(crate) store_path: PathBuf,
    pub(crate) outbox: Outbox,
    /// Pages whose whole content is to be hashed.
    pub(crate) to_hash: Vec<Page>,
    /// Ranges with written pages.
    pub(crate) to_protect: Vec<std::ops::Range<usize>>,
    /// Pages that stood still and have no key yet.
    pub(crate) to_key: Vec<Page>,
    /// Of the store, or of the last one there was.
    pub(crate) salt: Salt,
    /// Pages with a twin, not merged yet.
    pub(crate) merges: Vec<Item>,
    /// Published pages whose chunks are not ripe for merging, see [`crate::merge::bridged_runs`].
    pub(crate) held: Vec<Item>,
    /// Candidates of such chunks whose keys the index had.
    pub(crate) held_twins: Vec<(Page, Key)>,
    /// Items that one merge window takes at most; adapts to the stop target.
    pub(crate) window: usize,
    pub(crate) stats: ServiceStats,
    pub(crate) vmas_max: i64,
    pub(crate) vmas: i64,
    vmas_at_start: usize,
    /// Index epoch read when nothing looked up was pending, to be reported with the next batch.
    pub(crate) epoch: u64,
    /// The last one reported.
    pub(crate) acknowledged: u64,
    /// Position in the index's news.
    pub(crate) news: u64,
    /// The store may have forgotten sightings of ours: the pass in which they are repeated, see [`Self::sight_anew`].
    pub(crate) sight_anew_at: Option<u64>,
    faults: u64,
    pub(crate) passes: u64,
    /// Nothing is merged for now, see [`Self::check_direct_io`].
    pub(crate) suspended: bool,
    pub(crate) ended: bool,
    pub(crate) cpu_mark: u64,
    pacer: Pacer,
    /// When questions were answered last, and an unfinished piece of work was reported.
    answered: Instant,
    reported: Instant,
    pub(crate) control: Arc<Control>,
}

/// Passes between two looks for direct I/O that merging could lose.
const DIRECT_IO_CHECK: u64 = 16;

/// Least time between two looks for questions while there is work.
const ANSWER_PERIOD: Duration = Duration::from_millis(10);

/// Time between two reports while memory is brought back.
const REPORT_PERIOD: Duration = Duration::from_millis(250);

/// Mappings that must remain for merging to be worth starting.
const MIN_VMAS: usize = 1024;

impl Scanner {
    /// Checks everything that can fail and prepares; touches no guest page. Runs in the caller's thread.
    pub(crate) fn new(
        config: Config,
        memory: Memory,
        store_path: PathBuf,
        searcher: Searcher,
        control: Arc<Control>,
    ) -> Result<Self, Error> {
        config.validate()?;
        proc::check_direct_io()?;
        let pagemap = Pagemap::open()?;
        let tracker = Arc::new(Uffd::tracker()?);
        let memory = Arc::new(memory);
        let reserve = match config.breaks {
            crate::Breaks::Kernel => None,
            crate::Breaks::Managed {
                reserve_pages,
                floor_bytes,
            } => Some(crate::unmerge::page_reserve::Reserve::new(
                reserve_pages,
                floor_bytes,
            )),
        };
        let breaker = Arc::new(Breaker::new(tracker.clone(), memory.clone(), reserve)?);
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
        let merger = Merger::new(tracker.clone())?;
        let mixed = Mixed::new(&config, &tracker, &memory);
        for region in memory.regions() {
            tracker
                .register(region.start, region.len(), Mode::Wp)
                .map_err(|source| Error::Register {
                    address: region.start,
                    source,
                })?;
        }
        // Last: who has introduced himself counts for the store until this process ends.
        let store = Store::connect(&store_path, &config.name, memory.pages())?;
        let table = Table::new(memory.end());
        let mut scanner = Self {
            discards: Arc::new(Discards::new(memory.clone(), table.in_file())),
            table,
            chunks: vec![
                ChunkState {
                    pending: true,
                    ..ChunkState::default()
                };
                memory.chunks().len()
            ],
            outbox: Outbox::default(),
            to_hash: Vec::new(),
            to_key: Vec::new(),
            to_protect: Vec::new(),
            salt: store.salt(),
            merges: Vec::new(),
            held: Vec::new(),
            held_twins: Vec::new(),
            window: 16,
            stats: ServiceStats::default(),
            vmas_max: i64::try_from(vmas_max).unwrap_or(i64::MAX),
            vmas: 0,
            vmas_at_start: used,
            epoch: store.index().epoch(),
            acknowledged: store.index().epoch(),
            news: store.index().news_position(),
            sight_anew_at: None,
            faults: 0,
            passes: 0,
            suspended: false,
            ended: false,
            cpu_mark: 0,
            pacer: Pacer::new(config.cpu_percent),
            answered: Instant::now(),
            reported: Instant::now(),
            store: Some(store),
            config,
            memory,
            tracker,
            pagemap,
            breaker,
            merger,
            mixed,
            searcher,
            store_path,
            control,
        };
        scanner.fill_stats();
        Ok(scanner)
    }

    /// To be called first in the thread that will run the passes.
    pub(crate) fn enter_thread(&mut self) {
        crate::sys::sched::enter_service_thread();
        self.pacer = Pacer::new(self.control.cpu_percent());
        self.cpu_mark = proc::thread_cpu_ns();
    }

    /// One pass. Errors of the store are survived: what was shared stays shared, and a new store is looked for.
    pub(crate) fn pass(&mut self) {
        self.passes += 1;
        self.stats.passes_total += 1;
        match self.try_pass() {
            Ok(()) | Err(Error::Stopped) => {}
            Err(error @ Error::Pagemap(_)) => log::warn!("a pass ended early: {error}"),
            Err(error) => self.lose_store(&error),
        }
        self.stats.last_pass_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
        self.report();
    }

    /// Instead of a pass while nothing is to be merged: holds back nobody, and says that it is alive.
    pub(crate) fn rest(&mut self) {
        if let Err(error) = self.try_rest() {
            self.lose_store(&error);
        }
        self.report();
    }

    fn try_rest(&mut self) -> Result<(), Error> {
        self.note_breaks();
        self.find_store()?;
        self.drop_merges();
        while !self.outbox.is_empty() && self.store.is_some() {
            self.flush()?;
            // What was just asked to be published.
            self.drop_merges();
        }
        self.acknowledge()
    }

    /// Lets go of what was found and not merged yet. Once there are passes again it is found anew.
    fn drop_merges(&mut self) {
        let mut items = std::mem::take(&mut self.merges);
        items.append(&mut self.held);
        for item in items {
            self.pass_over(&item);
            let chunk = self.memory.chunk_of(item.page);
            self.chunks[chunk].pending = true;
            // More than any position: all candidates are looked up.
            self.news = u64::MAX;
        }
    }

    /// Brings everything back to anonymous memory, and says so to whoever asked.
    pub(crate) fn unmerge_on_request(&mut self) -> Result<(), Error> {
        self.note_breaks();
        self.drop_merges();
        let done = self.unmerge();
        // All of it may be merged again, once that is wanted.
        self.chunks.iter_mut().for_each(|c| c.pending = true);
        self.report();
        let told = self.answer_unmerged(&done);
        if let Err(error) = told {
            self.lose_store(&error);
        }
        done
    }

    /// To be called between the steps of giving memory back, which can take long.
    pub(crate) fn show_progress(&mut self) {
        if self.reported.elapsed() >= REPORT_PERIOD {
            self.report();
            self.try_answer();
        }
    }

    /// Answers questions; a store that cannot be answered is lost.
    pub(crate) fn try_answer(&mut self) {
        if let Err(error) = self.answer() {
            self.lose_store(&error);
        }
    }

    fn report(&mut self) {
        self.fill_stats();
        self.control.publish(&self.stats);
        self.reported = Instant::now();
        if let Some(store) = &mut self.store
            && let Err(error) = store.report(&self.stats)
        {
            self.lose_store(&error);
        }
        self.lap(|cpu| &mut cpu.store);
    }

    fn try_pass(&mut self) -> Result<(), Error> {
        self.note_breaks();
        let discards = self.discards.clone();
        self.note_discards(&mut discards.lock());
        self.breaker.set_vmas_left(self.vmas_max - self.vmas);
        if self.passes.is_multiple_of(DIRECT_IO_CHECK) {
            self.check_direct_io();
        }
        self.find_store()?;
        if let Some(store) = &mut self.store {
            store.take_pushes()?;
        }
        self.prepare_search();
        let faults = proc::faults_of_others();
        if faults != self.faults {
            self.chunks
                .iter_mut()
                .for_each(|c| (c.pending, c.unchecked) = (true, true));
        }
        self.faults = faults;
        self.lap(|cpu| &mut cpu.track);
        self.track()?;
        self.monitor()?;
        self.look_at_huge()?;
        self.settle()
    }

    /// Takes over what the fault thread did.
    pub(crate) fn note_breaks(&mut self) {
        let broke = self.take_breaks();
        if self.breaker.managed() && (broke || self.passes.is_multiple_of(16)) {
            // A page that we broke lies in a mapping of its own, which the account below cannot see.
            if let Ok(count) = proc::vma_count() {
                self.vmas = i64::try_from(count.saturating_sub(self.vmas_at_start)).unwrap_or(i64::MAX);
            }
        }
    }

    /// The same without counting mappings, which takes milliseconds if there are many; whether there was anything.
    pub(crate) fn take_breaks(&mut self) -> bool {
        let mut touched = std::collections::BTreeSet::new();
        for page in self.breaker.take_broken() {
            if !self.memory.has(page) {
                continue;
            }
            match self.table.get(page) {
                State::Private(_) => continue,
                State::Shared(slot) => self.release(slot),
                State::Candidate { key, .. } => self.outbox.withdrawals.push(key.raw()),
                _ => {}
            }
            self.table.set(page, State::Untracked);
            self.stats.breaks_managed_total += 1;
            let chunk = self.memory.chunk_of(page);
            self.note_break(chunk);
            touched.insert(chunk);
        }
        let broke = !touched.is_empty();
        for chunk in touched {
            self.chunks[chunk].pending = true;
            self.update_fragments(&self.memory.chunks()[chunk].pages.clone());
        }
        broke
    }

    /// Direct I/O that the kernel does not show as pinning must not meet merging. Looked for at the start and from time
    /// to time: a VMM may open such a file later.
    fn check_direct_io(&mut self) {
        let refused = proc::check_direct_io().err();
        if let (Some(error), false) = (&refused, self.suspended) {
            log::warn!("merging is suspended: {error}");
        }
        self.suspended = refused.is_some();
    }

    /// Connects again after a store was lost.
    fn find_store(&mut self) -> Result<(), Error> {
        if self.store.is_some() {
            return Ok(());
        }
        match Store::connect(&self.store_path, &self.config.name, self.memory.pages()) {
            Ok(store) => {
                log::info!("connected to the store at {}", self.store_path.display());
                (self.epoch, self.acknowledged) = (store.index().epoch(), store.index().epoch());
                (self.news, self.salt) = (store.index().news_position(), store.salt());
                self.store = Some(store);
            }
            Err(error) => log::debug!("{error}"),
        }
        Ok(())
    }

    /// Gives up a connection. What was mapped stays mapped: the mappings keep the old store's memory alive. It is
    /// keyed anew and moves to the next store's slots as twins are found there.
    pub(crate) fn lose_store(&mut self, error: &Error) {
        log::warn!("lost the store: {error}; guests go on, and merging resumes with the next store");
        self.store = None;
        self.searcher.forget_store();
        self.outbox.clear();
        self.to_hash.clear();
        self.merges.clear();
        self.held.clear();
        self.held_twins.clear();
        for page in (0..).take(self.memory.end()) {
            match self.table.get(page) {
                State::Shared(_) | State::Candidate { foreign: true, .. } => {
                    self.table.set(page, State::Foreign);
                }
                State::Candidate { foreign: false, .. } => {
                    self.table.set(page, State::Armed);
                }
                State::Seen { .. } => {
                    self.table.set(page, State::Untracked);
                }
                _ => {}
            }
        }
        for chunk in &mut self.chunks {
            (chunk.pending, chunk.patience, chunk.rest) = (true, 0, 0);
            chunk.forget_twins();
        }
    }

    /// The end: with `unmerge`, everything goes back to anonymous memory first.
    pub(crate) fn finish(&mut self, unmerge: bool) -> Result<(), Error> {
        self.note_breaks();
        // References of pages that were published and will not be merged any more.
        let mut items = std::mem::take(&mut self.merges);
        items.append(&mut self.held);
        items.iter().for_each(|item| self.disown(item));
        // What cannot be told to the store any more ends with this process.
        let result = match if unmerge { self.unmerge() } else { self.flush() } {
            Err(error @ Error::NotUnmerged(_)) => Err(error),
            _ => Ok(()),
        };
        // Closing the descriptors ends all registrations and wakes whoever waits; the kernel copies from then on.
        self.breaker.stop();
        self.ended = true;
        self.fill_stats();
        if let Some(mut store) = self.store.take() {
            let _ = store.report(&self.stats);
            // Pages that the kernel copied lie in mappings of slots which they do not show, see `State::Private`: the slots
            // may be reused, as those under a run's exceptions.
            if result.is_ok() && self.stats.pages_mapped == 0 {
                store.say_goodbye();
            }
        }
        result
    }

    /// Between two pieces of work: sleeps if the CPU budget is used up, and notices the wish to stop or pause.
    pub(crate) fn breathe(&mut self) -> Result<(), Error> {
        let helpers = self.breaker.stats().0.cpu_ns + self.searcher.helper_cpu_ns();
        self.pacer.charge_others(helpers);
        self.pacer.set_percent(self.control.cpu_percent());
        if self.answered.elapsed() >= ANSWER_PERIOD || self.has_questions() {
            self.answer_now()?;
        }
        let mut debt = self.pacer.debt();
        if debt > Duration::from_millis(1) {
            self.fill_stats();
            self.control.publish(&self.stats);
        }
        while debt > Duration::from_millis(1) && !self.control.interrupted() {
            self.control.sleep(debt, self.store.as_ref().map(Store::socket));
            self.answer_now()?;
            self.pacer.set_percent(self.control.cpu_percent());
            debt = self.pacer.debt();
        }
        if self.control.interrupted() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    fn answer_now(&mut self) -> Result<(), Error> {
        self.answered = Instant::now();
        self.answer()
    }
}
