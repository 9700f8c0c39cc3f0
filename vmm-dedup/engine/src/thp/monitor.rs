//! Huge and small pages side by side: split what is cold and repetitive, keep what is hot, build again what turned hot.
//! After SmartMD (Guo et al., USENIX ATC'17).
//!
//! ```text
//!              repetition (looks at keys)        use (samples)
//!                        |                          |
//!   huge page ----> many twins and cold? --split--> small pages, shared
//!       ^                                           |
//!       `--------------- hot? <--rebuild------------'
//! ```
//!
//! - [`key_filter`](mod@crate::memory::key_filter), [`duplicates`](mod@crate::thp::duplicates): how much of a huge page repeats, and the search for twins;
//! - [`access`](mod@crate::track::access): what is used, and [`access_source`](mod@crate::track::access_source): what tells it;
//! - [`policy`](mod@crate::thp::policy), [`pressure`](mod@crate::thp::pressure): the thresholds, which follow the host's memory;
//! - [`collapse`](mod@crate::thp::collapse): gathering small pages in a huge one;
//! - this module: the monitor's rounds.
//!
//! Identical huge pages share one of the store ([`crate::lookup::publish`]), which guests map as one.
//!
//! Known hole: a range with a page that the kernel copied on write cannot be rebuilt, so ranges that are written often need
//! managed breaks.

use crate::config::Config;
use crate::error::Error;
use crate::memory::chunk_state::ChunkState;
use crate::memory::layout::{Memory, Page};
use crate::memory::thp_state::Asked;
use crate::scan::pass::Scanner;
use crate::sys::uffd::Uffd;
use crate::thp::collapse::Refusal;
use crate::thp::policy::{Policy, Thresholds};
use crate::thp::pressure::Pressure;
use crate::track::access::{PROBES, Target, Use};
use crate::track::access_source::{self, Chosen};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// CPU time that sampling may take: a hundredth of a core for 16 GiB of guest memory, or for less.
const SHARE: f64 = 0.01;
const SHARE_PAGES: f64 = (16u64 << 30 >> 12) as f64;
/// Sharing broken within an interval that counts as use.
const BREAKS_OF_USE: u8 = 8;
/// Intervals to wait after a rebuild that failed; memory and pins do not come and go at once.
const REBUILD_PAUSE: u8 = 4;

/// The monitor's state.
#[derive(Debug)]
pub(crate) struct Mixed {
    policy: Policy,
    interval: Duration,
    window: Duration,
    split_pages: usize,
    pub(crate) thresholds: Thresholds,
    source: Option<Chosen>,
    /// When the next interval begins.
    next: Option<Instant>,
    /// CPU time of the monitor when the last interval began, nanoseconds.
    mark: u64,
    /// CPU time of others for the monitor so far, nanoseconds.
    helpers: u64,
    /// When what was found used in this interval for the first time is looked at again.
    confirm: Option<Instant>,
}

impl Mixed {
    pub(crate) fn new(config: &Config, tracker: &Arc<Uffd>, memory: &Memory) -> Self {
        let policy = config.huge_policy;
        log::info!("huge pages: policy {policy}");
        let watches = policy.watches_access();
        Self {
            policy,
            interval: Duration::from_millis(config.monitor_interval_ms),
            window: Duration::from_micros(config.monitor_window_us),
            split_pages: config.huge_split_pages,
            thresholds: Thresholds::new(Pressure::default(), config.huge_split_pages),
            source: watches.then(|| access_source::choose(config.use_source, tracker, memory)),
            next: None,
            mark: 0,
            helpers: 0,
            confirm: None,
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    pub(crate) fn needs_probes(&self) -> bool {
        let needs = |source: &Chosen| source.monitor.needs_probes();
        self.source.as_ref().is_some_and(needs)
    }

    /// Why sources that were asked first do not tell the use of memory.
    pub(crate) fn skipped_sources(&self) -> &str {
        self.source.as_ref().map_or("", |source| &source.skipped)
    }
}

impl Scanner {
    /// A round of the monitor, if one is due: samples use, then builds again what is hot. Not every range waits for that:
    ///
    /// - huge pages never sampled before are sampled at once, to be judged soon;
    /// - what was split and has just been used for the first time is sampled again in the middle of the interval, and what
    ///   is being written at once, so that huge pages are back within two intervals.
    pub(crate) fn monitor(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        let due = self.mixed.next.is_none_or(|next| next <= now);
        if due {
            self.mixed.thresholds = Thresholds::new(Pressure::now(), self.mixed.split_pages);
        }
        if self.mixed.source.is_none() {
            self.mixed.next = Some(now + self.mixed.interval);
            return Ok(());
        }
        let confirm = self.mixed.confirm.is_some_and(|at| at <= now);
        let wanted = |chunk: &mut ChunkState| {
            let state = &mut chunk.mixed;
            let awake = state.breaks >= BREAKS_OF_USE || (confirm && state.frequency.value() > 0);
            if chunk.huge {
                state.samples == 0 || (due && state.sample_due())
            } else {
                state.ours && (due || awake)
            }
        };
        let chunks = self.chunks.iter_mut().enumerate();
        let chunks: Vec<usize> = chunks
            .filter_map(|(at, chunk)| wanted(chunk).then_some(at))
            .collect();
        for batch in chunks.chunks(crate::track::fault_sampling::BATCH) {
            self.sample(batch);
            self.lap(|cpu| &mut cpu.monitor);
            self.breathe()?;
        }
        if due {
            self.count_helpers();
            let spent = self.stats.cpu_ns.monitor;
            // With what was sampled out of turn since the last round.
            let cost = Duration::from_nanos(spent - std::mem::replace(&mut self.mixed.mark, spent));
            let interval = self.mixed.interval.max(self.affordable(cost));
            self.mixed.next = Some(now + interval);
            self.mixed.confirm = Some(now + interval / 2);
        } else if confirm {
            self.mixed.confirm = None;
        }
        self.rebuild_hot(due)
    }

    /// How long the next round must be away for one that costs that much.
    #[allow(clippy::cast_precision_loss)] // a number of pages
    fn affordable(&self, cost: Duration) -> Duration {
        let share = SHARE * (self.memory.pages() as f64 / SHARE_PAGES).max(1.0);
        cost.div_f64(share)
    }

    fn sample(&mut self, batch: &[usize]) {
        let (sampled, unsampled) = self.sort_out(batch);
        // While memory is away nobody else frees any of it.
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards);
        let chunks = self.memory.chunks();
        let target = |at: &usize| match self.chunks[*at].huge {
            true => Target::Huge(chunks[*at].start),
            false => Target::Split(chunks[*at].start),
        };
        let targets: Vec<Target> = sampled.iter().map(target).collect();
        let Some(source) = &mut self.mixed.source else {
            return;
        };
        let used = match source.monitor.sample(&targets, self.mixed.window) {
            Ok(used) => used,
            Err(error) => return log::warn!("use of memory cannot be sampled: {error}"),
        };
        self.stats.samples_total += sampled.len() as u64;
        // Of these it is known what is written.
        let unsampled = unsampled.iter().map(|at| (at, Some(Use::None)));
        for (at, used) in sampled.iter().zip(used).chain(unsampled) {
            let chunk = &mut self.chunks[*at];
            let breaks = std::mem::take(&mut chunk.mixed.breaks);
            if let Some(used) = used {
                let written = breaks >= BREAKS_OF_USE;
                let wanted = |state: &crate::memory::thp_state::HugeState| {
                    self.mixed.thresholds.twins_wanted(self.mixed.policy, state)
                };
                let before = wanted(&chunk.mixed);
                chunk.mixed.note_use(if written { Use::AT_ONCE } else { used });
                let asks = |twins| {
                    let never_asked = chunk.mixed.asked == Asked::Nothing;
                    twins > 0 && (never_asked || chunk.mixed.repetition() >= twins)
                };
                if chunk.huge && before.is_none() && wanted(&chunk.mixed).is_some_and(asks) {
                    // Just got cold enough: looked at now, and split if nothing has changed.
                    chunk.look_again();
                }
                self.stats.samples_used_total += u64::from(used != Use::None);
            } else {
                // Not what it was: the next visit tells.
                chunk.pending = true;
            }
        }
    }

    /// Adds the CPU time that others take for the monitor.
    fn count_helpers(&mut self) {
        let spent = self
            .mixed
            .source
            .as_ref()
            .map_or(0, |source| source.monitor.helper_cpu_ns());
        let more = spent.saturating_sub(std::mem::replace(&mut self.mixed.helpers, spent));
        self.stats.cpu_ns.monitor += more;
    }

    fn rebuild_hot(&mut self, due: bool) -> Result<(), Error> {
        for at in 0..self.chunks.len() {
            let state = &mut self.chunks[at].mixed;
            if !state.ours || !self.mixed.thresholds.rebuild(self.mixed.policy, state) {
                continue;
            }
            if state.wait > 0 {
                state.wait -= u8::from(due);
                continue;
            }
            if let Err(reason) = self.rebuild(at) {
                log::debug!("the {at}th 2 MiB stay small: {reason:?}");
                let counter = match reason {
                    Refusal::Pinned => &mut self.stats.rebuild_pinned_total,
                    Refusal::Memory => &mut self.stats.rebuild_memory_total,
                    Refusal::Other => &mut self.stats.rebuild_other_total,
                };
                *counter += 1;
                self.chunks[at].mixed.wait = REBUILD_PAUSE;
                self.chunks[at].pending = true;
            }
            self.merger.clean_up();
            self.lap(|cpu| &mut cpu.merge);
            self.show_progress();
            self.breathe()?;
        }
        Ok(())
    }

    /// Whether a page is kept private for sampling.
    pub(crate) fn is_probe(&self, chunk: usize, page: Page) -> bool {
        let state = &self.chunks[chunk];
        let subpage = page - self.memory.chunks()[chunk].pages.start;
        self.mixed.needs_probes() && (state.huge || state.mixed.ours) && PROBES.contains(&subpage)
    }

    /// Notes that sharing was broken in a chunk.
    pub(crate) fn note_break(&mut self, chunk: usize) {
        let state = &mut self.chunks[chunk].mixed;
        state.breaks = state.breaks.saturating_add(1);
        state.broken = state.broken.saturating_add(1);
    }

    /// Fills in what the policy has to tell.
    pub(crate) fn fill_mixed_stats(&mut self) {
        let number = |source: &Chosen| source.monitor.source().number() as u64;
        self.stats.use_source = self.mixed.source.as_ref().map_or(0, number);
        let huge = self.chunks.iter().filter(|c| c.huge);
        let kept = |state: &crate::memory::thp_state::HugeState| {
            state.samples > 0
                && state.repetition() as usize >= self.mixed.split_pages
                && self
                    .mixed
                    .thresholds
                    .twins_wanted(self.mixed.policy, state)
                    .is_none()
        };
        let kept = huge.filter(|c| kept(&c.mixed));
        let (count, pages) = kept.fold((0, 0), |(n, sum), c| {
            (n + 1, sum + u64::from(c.mixed.repetition()))
        });
        self.stats.huge_kept_hot = count;
        self.stats.pages_given_up = pages;
        self.stats.huge_split = self.chunks.iter().filter(|c| c.mixed.ours).fold(0, |n, _| n + 1);
    }
}
