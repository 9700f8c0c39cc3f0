//! The monitor of huge and small pages: which are used, and what follows from it.
//!
//! After SmartMD (Guo et al., USENIX ATC'17): split what is cold and repetitive, keep what is hot, build again what turned
//! hot.
//!
//! ```text
//!              repetition (looks at keys)        use (samples)
//!                        |                          |
//!   huge page ----> many twins and cold? --split--> small pages, shared
//!       ^                                           |
//!       `--------------- hot? <--collapse-----------'
//! ```
//!
//! - [`key_filter`], [`duplicates`]: how much of a huge page repeats, and which of its pages to ask the store about;
//! - [`access`], [`access_source`], [`agent_use`]: what is used, and what tells it;
//! - [`policy`], [`pressure`]: the thresholds, which follow the host's memory;
//! - [`collapse`]: gathering small pages in a huge one;
//! - this module: the monitor's rounds.
//!
//! Identical huge pages share one of the store ([`publish`]), which guests map as one ([`shared_huge`]).
//!
//! Pages that the kernel copied on write are first moved out of the mappings of store files ([`in_place`](mod@crate::merge::in_place)); where nothing tells
//! that they are not pinned, their range cannot be built again.
//!
//! [`key_filter`]: mod@crate::memory::key_filter
//! [`duplicates`]: mod@crate::thp::duplicates
//! [`access`]: mod@crate::track::access
//! [`access_source`]: mod@crate::track::access_source
//! [`agent_use`]: mod@crate::hints::agent_use
//! [`policy`]: mod@crate::thp::policy
//! [`pressure`]: mod@crate::thp::pressure
//! [`collapse`]: mod@crate::thp::collapse
//! [`publish`]: mod@crate::lookup::publish
//! [`shared_huge`]: mod@crate::thp::shared_huge

use crate::account::Account;
use crate::config::{Config, Policy, UseSource};
use crate::hints::agent_use::AgentUse;
use crate::hints::line::AgentLine;
use crate::memory::layout::Memory;
use crate::memory::page_map::PageMap;
use crate::memory::thp_state::{Asked, Frequency, HugeState, Use};
use crate::sys::late_log;
use crate::sys::page_size::CHUNK_PAGES;
use crate::sys::uffd::Uffd;
use crate::thp::policy::Thresholds;
use crate::thp::pressure::Pressure;
use crate::thp::shared_huge;
use crate::track::access::{Probes, Target};
use crate::track::access_source::{self, Chosen};
use crate::track::fault_sampling::BATCH;
use crate::unmerge::address_space::AddressSpace;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// CPU time that sampling may take: a hundredth of a core for 16 GiB of guest memory, or for less.
const SHARE: f64 = 0.01;
const SHARE_PAGES: f64 = (16u64 << 30 >> 12) as f64;
/// Sharing broken within an interval that counts as use.
const BREAKS_OF_USE: u8 = 8;
/// Samples after which a huge page that none of them found in use is taken for idle.
const SAMPLES_OF_IDLE: u8 = 2;

/// The monitor's state.
#[derive(Debug)]
pub(crate) struct Monitor {
    policy: Policy,
    interval: Duration,
    window: Duration,
    split_pages: usize,
    thresholds: Thresholds,
    /// The guest's agent, if it is to be asked first.
    agent: Option<AgentUse>,
    source: Option<Chosen>,
    /// Intervals begun.
    intervals: u64,
    /// When the next interval begins.
    next: Option<Instant>,
    /// CPU time of the monitor when the last interval began, nanoseconds.
    mark: u64,
    /// CPU time of others for the monitor so far, nanoseconds.
    helpers: u64,
    /// When what was found used in this interval for the first time is looked at again.
    confirm: Option<Instant>,
    /// What was split was found used for the first time in this round.
    first_use: bool,
}

/// A round of sampling.
#[derive(Debug)]
pub(crate) struct Round {
    began: Instant,
    /// An interval begins with it.
    pub(crate) due: bool,
    confirm: bool,
    /// Chunks to be sampled, in batches.
    chunks: Vec<usize>,
}

impl Round {
    /// The next chunks to be sampled.
    pub(crate) fn next_batch(&mut self) -> Option<Vec<usize>> {
        let rest = self.chunks.split_off(self.chunks.len().min(BATCH));
        let batch = std::mem::replace(&mut self.chunks, rest);
        (!batch.is_empty()).then_some(batch)
    }
}

impl Monitor {
    pub(crate) fn new(config: &Config, uffd: &Arc<Uffd>, memory: &Memory, line: &Arc<AgentLine>) -> Self {
        let policy = config.huge_policy;
        log::info!("huge pages: policy {policy}");
        let watches = policy.watches_access();
        let asks_agent = watches && config.use_source == UseSource::Agent;
        let interval = Duration::from_millis(config.sampling.interval_ms);
        Self {
            policy,
            interval,
            window: Duration::from_micros(config.sampling.window_us),
            split_pages: config.huge_split_pages,
            thresholds: Thresholds::new(Pressure::default(), config.huge_split_pages),
            agent: asks_agent.then(|| AgentUse::new(line.clone())),
            source: watches.then(|| access_source::choose(config.use_source, interval, uffd, memory)),
            intervals: 0,
            next: None,
            mark: 0,
            helpers: 0,
            confirm: None,
            first_use: false,
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether huge pages are built again of what is used.
    pub(crate) fn watches_use(&self) -> bool {
        self.policy.watches_access()
    }

    pub(crate) fn probes(&self) -> Probes {
        let needed = self
            .source
            .as_ref()
            .is_some_and(|source| source.monitor.needs_probes());
        Probes { needed }
    }

    /// Why sources that were asked first do not tell the use of memory.
    pub(crate) fn skipped_sources(&self) -> String {
        let silent = self.agent.as_ref().and_then(|agent| agent.speaks().err());
        let agent = silent.map(|why| access_source::not_told(UseSource::Agent, &why));
        let skipped = self.source.as_ref().map(Chosen::skipped);
        let all = [agent, skipped].into_iter().flatten();
        let all: Vec<String> = all.filter(|reason| !reason.is_empty()).collect();
        all.join("; ")
    }

    /// What tells the use of memory now.
    fn use_source(&self) -> Option<UseSource> {
        let agent = self.agent.as_ref().filter(|agent| agent.speaks().is_ok());
        let other = self.source.as_ref().map(|source| source.monitor.source());
        agent.map(|_| UseSource::Agent).or(other)
    }

    /// Looks whether the guest's agent speaks.
    fn look_at_agent(&mut self) {
        let Some(agent) = &mut self.agent else { return };
        if !agent.look() {
            return;
        }
        let silent = agent.speaks().err();
        if let (Some(why), Some(source)) = (silent, self.use_source()) {
            log::info!(
                "{}; {source} does",
                access_source::not_told(UseSource::Agent, &why)
            );
        } else {
            log::info!("{}", access_source::told(UseSource::Agent));
        }
    }

    /// How many subpages of a huge page must have a twin for it to be split; `None` if it is to stay.
    pub(crate) fn twins_wanted(&self, state: &HugeState) -> Option<u32> {
        self.thresholds.twins_wanted(self.policy, state)
    }

    /// Whether samples found a huge page in use.
    pub(crate) fn is_used(&self, state: &HugeState) -> bool {
        self.thresholds.is_used(self.policy, state)
    }

    /// Whether a huge page may be split whatever repeats in it: samples found it unused, or the policy asks for none; and the policy
    /// splits at all.
    pub(crate) fn lets_split_idle(&self, state: &HugeState) -> bool {
        let known = state.samples >= SAMPLES_OF_IDLE || !self.watches_use();
        let splits = |twins: u32| (twins as usize) < CHUNK_PAGES;
        known && !self.is_used(state) && self.twins_wanted(state).is_some_and(splits)
    }

    /// Begins a round, if one is due. Not every range waits for the next interval:
    ///
    /// - huge pages never sampled before are sampled at once, to be judged soon;
    /// - what was split and is being written is sampled at once, and what was found used for the first time once more after half
    ///   an interval, so that huge pages are back within two intervals. (Of the interval that was asked for: what sampling costs may
    ///   put off the next round for all by more.)
    pub(crate) fn begin_round(&mut self, map: &mut PageMap, uffd: &Arc<Uffd>) -> Option<Round> {
        let now = Instant::now();
        self.look_at_agent();
        let due = self.next.is_none_or(|next| next <= now);
        if due {
            self.thresholds = Thresholds::new(Pressure::now(), self.split_pages);
            self.sample_again(uffd);
        }
        if self.source.is_none() {
            self.next = Some(now + self.interval);
            return None;
        }
        let confirm = self.confirm.is_some_and(|at| at <= now);
        let count = map.chunks().len();
        let mut wanted = |at: &usize| {
            let huge = map.chunk(*at).huge;
            let state = map.chunk(*at).thp;
            let awake = state.breaks >= BREAKS_OF_USE || (confirm && state.frequency.value() > 0);
            if huge {
                state.samples == 0 || (due && map.sample_due(*at))
            } else {
                state.ours && (due || awake)
            }
        };
        let chunks = (0..count).filter(|at| wanted(at)).collect();
        Some(Round {
            began: now,
            due,
            confirm,
            chunks,
        })
    }

    /// Starts the sampling that could not start, if it is time for that.
    fn sample_again(&mut self, uffd: &Arc<Uffd>) {
        self.intervals += 1;
        let Some(source) = &mut self.source else { return };
        if source.may_sample_again(self.intervals) && source.sample_again(self.intervals, uffd) {
            // It is another one's helper, if it has any.
            self.helpers = source.monitor.helper_cpu_ns();
        }
    }

    /// Ends a round: from what it cost follows when the next one may be.
    pub(crate) fn end_round(&mut self, map: &PageMap, account: &mut Account, round: &Round) {
        if round.due || round.confirm {
            self.confirm = None;
        }
        if std::mem::take(&mut self.first_use) {
            // Who waits already waits no longer.
            self.confirm = self.confirm.or(Some(round.began + self.interval / 2));
        }
        if round.due {
            self.count_helpers(account);
            let spent = account.stats.cpu_ns.monitor;
            // With what was sampled out of turn since the last round.
            let cost = Duration::from_nanos(spent - std::mem::replace(&mut self.mark, spent));
            let interval = self.interval.max(affordable(map.memory(), cost));
            self.next = Some(round.began + interval);
        }
    }

    /// Samples the use of some chunks.
    pub(crate) fn sample(
        &mut self,
        map: &mut PageMap,
        space: &mut AddressSpace,
        account: &mut Account,
        batch: &[usize],
    ) {
        let (sampled, unsampled) = shared_huge::sort_out(map, space, account, self.probes(), batch);
        let told = self.told_by_agent(map, &sampled);
        let is_open = |(at, told): (&usize, &Option<Use>)| told.is_none().then_some(*at);
        let open: Vec<usize> = sampled.iter().zip(&told).filter_map(is_open).collect();
        let Some(found) = self.look_at(map, space, &open) else {
            return;
        };
        let mut found = found.into_iter();
        let used: Vec<Option<Use>> = told
            .into_iter()
            .map(|told| told.or_else(|| found.next().flatten()))
            .collect();
        account.stats.samples_total += sampled.len() as u64;
        // Of these it is known what is written.
        let unsampled = unsampled.iter().map(|at| (at, Some(Use::None)));
        for (at, used) in sampled.iter().zip(used).chain(unsampled) {
            let breaks = map.take_breaks(*at);
            if let Some(used) = used {
                let written = breaks >= BREAKS_OF_USE;
                self.note_use(map, *at, if written { Use::AT_ONCE } else { used });
                account.stats.samples_used_total += u64::from(used != Use::None);
            } else {
                // Not what it was: the next visit tells.
                map.requeue_chunk(*at);
            }
        }
    }

    /// The service itself has read the 2 MiB at this address, for that long.
    pub(crate) fn note_own_read(&mut self, start: usize, lasted: Duration) {
        if let Some(source) = &mut self.source {
            source.monitor.note_own_read(start, lasted);
        }
    }

    /// What the guest's agent tells of each chunk.
    fn told_by_agent(&self, map: &PageMap, chunks: &[usize]) -> Vec<Option<Use>> {
        let told = |at: &usize| {
            let agent = self.agent.as_ref()?;
            agent.use_of(map.memory(), &map.chunk_at(*at).pages)
        };
        chunks.iter().map(told).collect()
    }

    /// What the source finds of each chunk; `None` if it failed.
    fn look_at(
        &mut self,
        map: &mut PageMap,
        space: &mut AddressSpace,
        chunks: &[usize],
    ) -> Option<Vec<Option<Use>>> {
        if chunks.is_empty() {
            return Some(Vec::new());
        }
        // While memory is away nobody else frees any of it.
        let discards = space.discards.clone();
        let mut discards = discards.lock();
        space.note_discards(&mut discards, map);
        let target = |at: &usize| match map.chunk(*at).huge {
            true => Target::Huge(map.chunk_at(*at).start),
            false => Target::Split(map.chunk_at(*at).start),
        };
        let targets: Vec<Target> = chunks.iter().map(target).collect();
        match self.source.as_mut()?.monitor.sample(&targets, self.window) {
            Ok(used) => Some(used),
            Err(error) => {
                late_log::note(
                    "sampling the use of memory",
                    &error,
                    "it is tried again with the next sample",
                );
                None
            }
        }
    }

    fn note_use(&mut self, map: &mut PageMap, at: usize, used: Use) {
        let before = self.twins_wanted(&map.chunk(at).thp);
        let used_before = map.chunk(at).thp.frequency != Frequency::default();
        map.note_use(at, used);
        let chunk = map.chunk(at);
        self.first_use |= chunk.thp.ours && !used_before && used != Use::None;
        let asks = |twins| {
            let never_asked = chunk.thp.asked == Asked::Nothing;
            twins > 0 && (never_asked || chunk.thp.repetition() >= twins)
        };
        if chunk.huge && before.is_none() && self.twins_wanted(&chunk.thp).is_some_and(asks) {
            // Just got cold enough: looked at now, and split if nothing has changed.
            map.look_again(at);
        }
    }

    /// Adds the CPU time that others take for the monitor.
    fn count_helpers(&mut self, account: &mut Account) {
        let spent = self
            .source
            .as_ref()
            .map_or(0, |source| source.monitor.helper_cpu_ns());
        let more = spent.saturating_sub(std::mem::replace(&mut self.helpers, spent));
        account.stats.cpu_ns.monitor += more;
    }

    /// Whether a chunk of small pages is to become a huge page now. One whose last try failed waits for some intervals.
    pub(crate) fn wants_collapse(&self, map: &mut PageMap, at: usize, due: bool) -> bool {
        let state = &map.chunk(at).thp;
        state.ours && self.thresholds.rebuild(self.policy, state) && !map.rebuild_waits(at, due)
    }

    /// Fills in what the policy has to tell.
    pub(crate) fn fill_stats(&self, map: &PageMap, account: &mut Account) {
        let stats = &mut account.stats;
        stats.use_source = self.use_source().map_or(0, |source| source.number() as u64);
        let kept = |state: &HugeState| {
            state.samples > 0
                && state.repetition() as usize >= self.split_pages
                && self.twins_wanted(state).is_none()
        };
        (stats.huge_kept_hot, stats.pages_given_up, stats.huge_split) = (0, 0, 0);
        for chunk in map.chunks() {
            if chunk.huge && kept(&chunk.thp) {
                stats.huge_kept_hot += 1;
                stats.pages_given_up += u64::from(chunk.thp.repetition());
            }
            stats.huge_split += u64::from(chunk.thp.ours);
        }
    }
}

/// How long the next round must be away for one that costs that much.
#[allow(clippy::cast_precision_loss)] // a number of pages
fn affordable(memory: &Memory, cost: Duration) -> Duration {
    let share = SHARE * (memory.pages() as f64 / SHARE_PAGES).max(1.0);
    cost.div_f64(share)
}
