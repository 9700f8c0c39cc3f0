//! What the scanning thread owns, and what all of its work is made of. The order of the work is in [`stages`].
//!
//! [`stages`]: mod@crate::scan::stages

use crate::account::{Account, Stage};
use crate::config::{Breaks, Config};
use crate::error::Error;
use crate::hints::heard::Heard;
use crate::hints::line::AgentLine;
use crate::lookup::request::{Keyed, MergeRequest};
use crate::lookup::tree_search::Searcher;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::merge::context::Context;
use crate::merge::healer::Healer;
use crate::merge::verify_engine::VerifyEngine;
use crate::pack::{Packer, Packing};
use crate::scan::control::Control;
use crate::scan::merging::Merging;
use crate::scan::pace::Pace;
use crate::scan::twins::{Finding, Twins};
use crate::store::session::Session;
use crate::sys::direct_io::DirectIo;
use crate::sys::proc;
use crate::thp::monitor::Monitor;
use crate::unmerge::address_space::AddressSpace;
use crate::unmerge::page_reserve::Reserve;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Mappings that must remain for merging to be worth starting.
const MIN_VMAS: usize = 1024;
/// Passes between two counts of the process's mappings, with managed breaks.
const VMA_COUNT_PERIOD: u64 = 16;

/// Passes for which sharing must last to be worth what merging and breaking cost ([`worth`](mod@crate::memory::worth)).
const PAYS_AFTER_PASSES: u32 = 16;

/// Whether services that start share pages however often they were broken before.
#[cfg(feature = "inject")]
static ALWAYS_PAYS: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Lets services that start from now on share pages however often they were broken before: for tests in which much is to happen,
/// whether it pays or not.
#[cfg(feature = "inject")]
pub fn share_whatever_it_costs(whatever: bool) {
    ALWAYS_PAYS.store(whatever, std::sync::atomic::Ordering::Relaxed);
}

fn pays_after_passes() -> u32 {
    #[cfg(feature = "inject")]
    if ALWAYS_PAYS.load(std::sync::atomic::Ordering::Relaxed) {
        return 0;
    }
    PAYS_AFTER_PASSES
}

/// Everything the scanning thread owns.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) control: Arc<Control>,
    pub(crate) map: PageMap,
    pub(crate) space: AddressSpace,
    pub(crate) session: Session,
    pub(crate) account: Account,
    pub(super) monitor: Monitor,
    pub(super) twins: Twins,
    pub(super) merging: Merging,
    pub(super) pace: Pace,
    /// The number of this pass.
    pub(super) number: u64,
    /// Whether guest memory may be replaced at all.
    pub(crate) direct_io: DirectIo,
    pub(super) ended: bool,
    /// What the guest says.
    pub(super) heard: Heard,
    /// If pages are packed.
    pub(super) packing: Option<Packing>,
}

impl Pass {
    /// Checks everything that can fail and prepares; touches no guest page. Runs in the caller's thread.
    pub(crate) fn new(
        config: Config,
        memory: Memory,
        store_path: PathBuf,
        (search, verify_engine): (Searcher, VerifyEngine),
        (control, line): (Arc<Control>, Arc<AgentLine>),
    ) -> Result<Self, Error> {
        config.validate()?;
        let mut direct_io = DirectIo::new()?;
        direct_io.look()?;
        let reserve = match config.breaks {
            Breaks::Kernel { .. } => None,
            Breaks::Managed {
                reserve_pages,
                floor_bytes,
                ..
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
        let mut map = PageMap::new(memory.clone(), i64::try_from(vmas_max).unwrap_or(i64::MAX), used);
        map.set_pays_after(pays_after_passes());
        let mut space = AddressSpace::new(&memory, &map, reserve, config.pack.on)?;
        let (idle, touches) = (config.pack.idle_ms, config.pack.touches_per_second);
        let pack = |packer| Packing::new(packer, Duration::from_millis(idle), touches);
        let packing = space.packer.clone().map(pack);
        let monitor = Monitor::new(&config, &space.uffd, &memory, &line);
        let mut packing = packing.transpose()?;
        for region in memory.regions() {
            space.register(&region)?;
        }
        // Last: what fails before makes no VM known to the store.
        let session = Session::open(store_path.clone(), config.name.clone(), memory.pages())?;
        // The packer brings pages back that the store has.
        if session.is_secure() && packing.is_none() {
            if !cfg!(feature = "pack") {
                return Err(Error::CannotShareSecurely { path: store_path });
            }
            let packer = Arc::new(Packer::new(space.uffd.clone(), memory.clone())?);
            packing = Some(pack(packer.clone())?);
            space.packer = Some(packer);
        }
        Ok(Self {
            merging: Merging::new(&config, verify_engine, Healer::new(&config)?),
            pace: Pace::new(config.cpu_percent),
            twins: Twins::new(search),
            control,
            map,
            space,
            session,
            account: Account::default(),
            monitor,
            number: 0,
            direct_io,
            ended: false,
            heard: Heard::new(line),
            packing,
        })
    }

    /// To be called first in the thread that will run the passes.
    pub(crate) fn enter_thread(&mut self) {
        self.pace = Pace::new(self.control.cpu_percent());
        self.account.enter_thread();
        self.merging.healer.start();
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

    /// Keyed > found.
    pub(super) fn find(&mut self, keyed: Keyed) {
        let (twins, mut with) = self.finding();
        twins.find(&mut with, keyed);
    }

    /// Who finds twins, and what that needs.
    pub(super) fn finding(&mut self) -> (&mut Twins, Finding<'_>) {
        let with = Finding {
            map: &mut self.map,
            session: &mut self.session,
            account: &mut self.account,
            pass: self.number,
            managed: self.space.breaker.managed(),
        };
        (&mut self.twins, with)
    }

    /// Who replaces pages of store files where they are, and what that needs.
    pub(super) fn replacing(&mut self) -> (&mut Healer, Context<'_>) {
        let with = Context {
            map: &mut self.map,
            space: &mut self.space,
            session: &mut self.session,
            verify: &mut self.merging.merger.verify_engine,
            account: &mut self.account,
            direct_io: &mut self.direct_io,
            pass: self.number,
        };
        (&mut self.merging.healer, with)
    }

    /// Leaves out what was to be done with pages that are not worked on any more.
    pub(super) fn drop_work(&mut self, keep: impl Fn(Page) -> bool) {
        let found = self.twins.drop_work(&keep);
        let deferred = &mut self.merging.deferred;
        deferred.twins.retain(|(page, _)| keep(*page));
        let gone = |request: &mut MergeRequest| !keep(request.page);
        for request in found.into_iter().chain(deferred.published.extract_if(.., gone)) {
            self.map.give_up_published(request.publisher_ref());
        }
    }

    /// Tells the store what there is to tell, and publishes what it asks for.
    pub(super) fn tell_store(&mut self) -> Result<(), Error> {
        let (twins, mut with) = self.finding();
        twins.tell_store(&mut with)
    }

    /// The same once there is enough for a whole message. Then all is told: the store must not hear of a sighting before it
    /// hears of the withdrawal that came before it. `before`: what the CPU time until then was for, which is not booked yet.
    pub(super) fn tell_store_of_many(&mut self, before: Stage) -> Result<(), Error> {
        if self.map.outbox().fills_a_message() {
            self.account.lap(before);
            self.tell_store()?;
            self.account.lap(|cpu| &mut cpu.store);
        }
        Ok(())
    }

    /// Gives up a connection. What was mapped stays mapped: the mappings keep the old store's memory alive. It is
    /// keyed anew and moves to the next store's slots as twins are found there.
    pub(crate) fn lose_store(&mut self, error: &Error) {
        log::warn!("lost the store: {error}; guests go on, and merging resumes with the next store");
        self.session.lose_store();
        self.twins.forget_store();
        self.merging.forget_store();
        self.map.orphan_all();
    }

    /// Whether pages may be pinned without any file that shows it is from now on as the VMM said last.
    pub(crate) fn heed_pins(&mut self) {
        self.merging.healer.set_visible(self.control.pins_are_visible());
    }
}
