//! The scanning thread's work, pass by pass.
//!
//! ```text
//!   written  ------>  keyed  ------>  found  ------>  admitted  ------>  merged
//!   track::dirty      lookup::keys    lookup::find    merge::planner     merge::planner
//!   (scan::order)                     lookup::publish (merge::admission) (merge::merger)
//! ```
//!
//! Each stage takes what the one before has left and returns what it made of it; no stage calls another. The pass hands on,
//! and between any two pieces of work it yields and polls: it keeps the CPU budget, answers questions, and notices the wish to stop.

use crate::account::Account;
use crate::config::{Breaks, Config};
use crate::error::Error;
use crate::lookup::copies;
use crate::lookup::find::Finder;
use crate::lookup::keys::{KeyReader, Keyed};
use crate::lookup::publish;
use crate::lookup::request::MergeRequest;
use crate::lookup::tree_search::Searcher;
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::Memory;
use crate::memory::page_map::PageMap;
use crate::merge::healer::Healer;
use crate::merge::planner::{Context, Planner};
use crate::merge::verify_engine::VerifyEngine;
use crate::scan::control::Control;
use crate::scan::order::ScanOrder;
use crate::scan::pace::Pace;
use crate::store::session::Session;
use crate::sys::direct_io::DirectIo;
use crate::sys::proc;
use crate::thp::monitor::Monitor;
use crate::track::dirty;
use crate::unmerge::address_space::AddressSpace;
use crate::unmerge::page_reserve::Reserve;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use vmm_dedup_protocol::message::MAX_BATCH;

/// Requests collected before they are merged; bounds the memory for them.
pub(super) const MAX_FOUND: usize = 1 << 17;
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
    /// Whether guest memory may be replaced at all.
    pub(crate) direct_io: DirectIo,
    pub(super) ended: bool,
}

impl Pass {
    /// Checks everything that can fail and prepares; touches no guest page. Runs in the caller's thread.
    pub(crate) fn new(
        config: Config,
        memory: Memory,
        store_path: PathBuf,
        (search, verify_engine): (Searcher, VerifyEngine),
        control: Arc<Control>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let mut direct_io = DirectIo::new()?;
        direct_io.look()?;
        let reserve = match config.breaks {
            Breaks::Kernel { .. } => None,
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
            planner: Planner::new(&config, verify_engine, Healer::new(&config, &direct_io)),
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
            direct_io,
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
            // That the page tables could not be looked at has been noted; the next pass tries again.
            Ok(()) | Err(Error::Stopped | Error::Pagemap(_)) => {}
            Err(error) => self.lose_store(&error),
        }
        self.account.stats.last_pass_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
        self.report();
    }

    fn try_run(&mut self) -> Result<(), Error> {
        self.prepare()?;
        if self.direct_io.look().is_err() {
            return self.stand_by();
        }
        if self.session.is_connected() {
            let mut order = ScanOrder::new(self.number);
            while let Some(chunks) = order.next(&self.map) {
                self.visit(chunks)?;
                self.yield_and_poll()?;
            }
            self.account.stats.full_scans_total += u64::from(order.is_full());
            self.space
                .find_copied(&mut self.map, &mut self.account, self.number)?;
            self.account.lap(|cpu| &mut cpu.track);
            self.look_at_copies()?;
        }
        self.watch_use()?;
        if self.session.is_connected() && self.direct_io.glance() {
            self.look_at_huge_pages()?;
            self.settle()?;
        }
        Ok(())
    }

    /// What others did since the last pass.
    fn prepare(&mut self) -> Result<(), Error> {
        self.heed_pins();
        self.note_breaks();
        let discards = self.space.discards.clone();
        self.space.note_discards(&mut discards.lock(), &mut self.map);
        self.track_what_was_lost();
        if self.map.asks_for_vmas_again(self.number) {
            // What was refused meanwhile is to be found again.
            self.session.overrun_news();
        }
        self.space
            .breaker
            .set_vmas_left(self.map.vmas_max() - self.map.vmas());
        self.session.find_store(&mut self.map);
        self.session.take_pushes()?;
        self.finder.prepare(&self.session, self.number);
        self.planner.verify_engine().prepare(self.number);
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
        self.tell_store_of_many()?;
        if self.found.len() >= MAX_FOUND {
            self.merge()?;
        }
        Ok(())
    }

    /// Keyed > found, for pages that the kernel copied.
    fn look_at_copies(&mut self) -> Result<(), Error> {
        let mut prospect = None;
        for at in 0..self.map.chunks().len() {
            if !self.map.chunk_mut(at).copies_due() {
                continue;
            }
            let prospect = *prospect.get_or_insert_with(|| {
                let (managed, mappings) = (self.space.breaker.managed(), self.map.mappings());
                self.planner.healer.prospect(managed, mappings, self.number)
            });
            let (map, pagemap) = (&mut self.map, &mut self.space.pagemap);
            let keyed = copies::look(
                map,
                pagemap,
                &self.session,
                &mut self.account,
                self.number,
                at,
                prospect,
            )?;
            self.find(keyed);
            self.account.lap(|cpu| &mut cpu.key);
            self.tell_store_of_many()?;
            self.yield_and_poll()?;
            if self.found.len() >= MAX_FOUND {
                self.merge()?;
            }
        }
        Ok(())
    }

    /// Keyed > found.
    pub(super) fn find(&mut self, keyed: Keyed) {
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
        while !self.map.outbox.is_empty() && self.session.is_connected() {
            self.send_message()?;
        }
        Ok(())
    }

    /// The same once there is enough for a whole message. Then all is told: the store must not hear of a sighting before it
    /// hears of the withdrawal that came before it.
    pub(super) fn tell_store_of_many(&mut self) -> Result<(), Error> {
        let outbox = &self.map.outbox;
        let most = outbox.sightings.len().max(outbox.withdrawals.len());
        if most.max(outbox.refs.len()) >= MAX_BATCH {
            self.tell_store()?;
        }
        self.account.lap(|cpu| &mut cpu.store);
        Ok(())
    }

    fn send_message(&mut self) -> Result<(), Error> {
        let pending = !self.found.is_empty();
        let wanted = self.session.flush(&mut self.map, pending)?;
        let huge_pages = !self.space.breaker.managed();
        let (map, session, account) = (&self.map, &mut self.session, &mut self.account);
        self.found
            .extend(publish::publish(map, session, account, huge_pages, &wanted)?);
        Ok(())
    }

    /// Found > admitted > merged.
    pub(super) fn merge(&mut self) -> Result<(), Error> {
        let found = std::mem::take(&mut self.found);
        let suspended = !self.direct_io.glance();
        let (planner, mut with) = self.planning();
        planner.plan(&mut with, suspended, found)?;
        let mut result = Ok(());
        // What is left once merging is suspended comes back, and is refused by the next plan.
        while result.is_ok() && self.direct_io.glance_again() && {
            let (planner, mut with) = self.planning();
            planner.step(&mut with)
        } {
            result = self.yield_and_poll();
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

    /// Whether pages may be pinned without any file that shows it is from now on as the VMM said last; the operator has to
    /// accept it as well.
    pub(crate) fn heed_pins(&mut self) {
        let accepted = matches!(
            self.config.breaks,
            Breaks::Kernel {
                heal_without_fork: true,
                ..
            }
        );
        self.planner
            .healer
            .set_visible(accepted && self.control.pins_are_visible());
    }

    /// All chunks are to be visited.
    pub(super) fn requeue_all(&mut self) {
        let chunks = self.map.chunks_mut();
        chunks.for_each(|chunk: &mut ChunkState| chunk.pending = true);
    }
}
