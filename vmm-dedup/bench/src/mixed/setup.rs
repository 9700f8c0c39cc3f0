//! What one measurement works with.

use super::subject::Subject;
use crate::host;
use crate::service::{Breaker, Served};
use std::path::Path;
use std::time::{Duration, Instant};
use vmm_dedup::{Config, ServiceStats, UseSource};
use vmm_dedup_host::{Failure, account};

/// Intervals that a policy has at most to settle: what is written all the time is merged and broken again for ever.
const MAX_INTERVALS: u32 = 45;
/// Intervals that a policy has at least: it may need some to see what is used.
const MIN_INTERVALS: u32 = 10;
/// Intervals without merging after which it has settled: unchanged huge pages are looked at ever less often.
const QUIET_INTERVALS: u32 = 8;

/// What a measurement works with.
pub(super) struct Setup<'a> {
    /// `None`: no dedup.
    pub(super) subject: Option<Subject>,
    pub(super) use_source: UseSource,
    pub(super) breaks: Breaker,
    pub(super) store: Option<&'a Path>,
    pub(super) store_pid: u32,
    pub(super) seconds: Duration,
    pub(super) interval_ms: u64,
    /// Rounds of churn.
    pub(super) churn: u32,
}

impl Setup<'_> {
    pub(super) fn config(&self, name: &str, subject: Subject) -> Config {
        let defaults = Config::default();
        Config {
            name: name.into(),
            pass_period_ms: (self.interval_ms / 4).max(10),
            // Costs are measured; what a budget would put off is not to be.
            cpu_percent: 100,
            huge_policy: subject.policy,
            use_source: self.use_source,
            sampling: vmm_dedup::Sampling {
                interval_ms: self.interval_ms,
                window_us: subject.window_us.unwrap_or(defaults.sampling.window_us),
            },
            breaks: self.breaks.breaks(),
            ..defaults
        }
    }

    /// Waits for [`MIN_INTERVALS`], then until nothing has been merged for [`QUIET_INTERVALS`], at most [`MAX_INTERVALS`].
    /// Without dedup nothing has to settle.
    pub(super) fn settle(&self, services: &[Served]) {
        if services.is_empty() {
            return;
        }
        let (start, interval) = (Instant::now(), Duration::from_millis(self.interval_ms));
        std::thread::sleep(interval * MIN_INTERVALS);
        let mut last = (0, Instant::now());
        while start.elapsed() < interval * MAX_INTERVALS {
            let sum = services.iter().map(Served::stats).fold(0, |sum, s| {
                sum + s.merges_total + s.zero_merges_total + s.huge_rebuilt_total + s.huge_splits_total
            });
            if sum != last.0 {
                last = (sum, Instant::now());
            } else if last.1.elapsed() > interval * QUIET_INTERVALS {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Pages saved: mapped, beyond the first of each content, and zero.
    pub(super) fn saved_pages(&self, services: &[Served]) -> Result<u64, Failure> {
        let Some(store) = self.store else { return Ok(0) };
        let mapped: u64 = services
            .iter()
            .map(Served::stats)
            .map(|s| s.pages_mapped + s.pages_zero)
            .sum();
        Ok(mapped.saturating_sub(account::of_store(store)?.0.pages_shared))
    }

    /// CPU time so far: `(monitors, all else of dedup with the store)`, seconds.
    pub(super) fn cpu(&self, services: &[Served]) -> Result<(f64, f64), Failure> {
        let stats: Vec<ServiceStats> = services.iter().map(Served::stats).collect();
        let monitor: u64 = stats.iter().map(|s| s.cpu_ns.monitor).sum();
        let threads: u64 = stats.iter().map(|s| s.cpu_ns.total()).sum();
        let store = self.store.map_or(Ok(0), |_| host::cpu_ns(self.store_pid, ""))?;
        let seconds = host::seconds;
        Ok((seconds(monitor), seconds(threads - monitor + store)))
    }
}
