//! Our side: a service in each guest's process, and a store in a process of its own.

use super::fleet::Fleet;
use super::measured::{Ours, Store, store_is_settled};
use super::orders::{Done, Looked, Order, Passed};
use super::side::{Seen, Settled, Side};
use crate::host;
use crate::service::Breaker;
use std::time::{Duration, Instant};
use vmm_dedup::Config;
use vmm_dedup_host::store::OwnStore;
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::message::StoreStats;

/// Passes without a change after which sharing has settled: a service looks for what the kernel copied in every 16th pass.
const SETTLED_PASSES: u32 = 17;
/// Passes after which a measurement that still changes is given up.
const MOST_PASSES: u32 = 10_000;

/// Our engine.
pub(super) struct Dedup {
    store: OwnStore,
    breaks: Breaker,
    /// How long the store's size is waited for.
    patience: Duration,
    /// What the last passes told.
    passed: Vec<Passed>,
}

impl Dedup {
    pub(super) fn new(breaks: Breaker, patience: Duration) -> Result<Self, Failure> {
        Ok(Self {
            store: OwnStore::start("churn", None)?,
            breaks,
            patience,
            passed: Vec::new(),
        })
    }

    /// A pass of every service; whether anything changed.
    fn pass(&mut self, fleet: &mut Fleet<'_>) -> Result<bool, Failure> {
        let passed = fleet.all(&Order::Pass)?;
        let changed = passed != self.passed;
        self.passed = passed;
        Ok(changed)
    }

    /// Waits until the store's size is in keeping with its use, while services pass as often as they do by default: its
    /// account, how long that took, and the CPU time at the last change.
    fn wait_for_store(
        &mut self,
        fleet: &mut Fleet<'_>,
        start: Instant,
    ) -> Result<(StoreStats, Option<f64>, Option<u64>), Failure> {
        let period = Duration::from_millis(Config::default().pass_period_ms);
        let (mut before, mut worked) = (None, None);
        loop {
            let (stats, _) = account::of_store(self.store.socket())?;
            let sizes = (stats.resident_bytes, stats.pages_shared);
            if before.replace(sizes).is_some_and(|before| before != sizes) {
                worked = Some(self.cpu_ns(fleet)?);
            }
            let waited = start.elapsed();
            if store_is_settled(&stats) {
                return Ok((stats, Some(waited.as_secs_f64()), worked));
            }
            if waited >= self.patience {
                return Ok((stats, None, worked));
            }
            std::thread::sleep(period.min(self.patience - waited));
            if self.pass(fleet)? {
                worked = Some(self.cpu_ns(fleet)?);
            }
        }
    }
}

impl Side for Dedup {
    fn begin(&mut self, fleet: &mut Fleet<'_>) -> Result<(), Failure> {
        let serve = Order::Serve {
            store: self.store.socket().to_owned(),
            breaks: self.breaks,
        };
        fleet.all::<Done>(&serve).map(drop)
    }

    fn cpu_ns(&self, fleet: &Fleet<'_>) -> Result<u64, Failure> {
        Ok(fleet.services_cpu_ns()? + host::cpu_ns(self.store.pid(), "")?)
    }

    fn work_beside(&mut self, fleet: &mut Fleet<'_>, work: bool) -> Result<(), Failure> {
        fleet.all::<Done>(&Order::PassAllTheTime(work)).map(drop)
    }

    fn settle(&mut self, fleet: &mut Fleet<'_>) -> Result<Settled, Failure> {
        let start = Instant::now();
        let (mut last, mut quiet) = (None, 0);
        for _ in 0..MOST_PASSES {
            if self.pass(fleet)? || last.is_none() {
                last = Some(Settled {
                    cpu_ns: self.cpu_ns(fleet)?,
                    after: start.elapsed(),
                });
                quiet = 0;
            } else {
                quiet += 1;
            }
            match last {
                Some(last) if quiet == SETTLED_PASSES => return Ok(last),
                _ => {}
            }
        }
        Err(Failure::new(format!(
            "the engine did not settle within {MOST_PASSES} passes"
        )))
    }

    fn look(&mut self, fleet: &mut Fleet<'_>) -> Result<Seen, Failure> {
        let (stats, settled_s, cpu_ns) = self.wait_for_store(fleet, Instant::now())?;
        let looked: Vec<Looked> = fleet.all(&Order::Look)?;
        let sum = |figure: fn(&Looked) -> u64| looked.iter().map(figure).sum::<u64>();
        let (mapped, vmas) = (sum(|l| l.mapped), sum(|l| l.vmas));
        Ok(Seen {
            saved_pages: (mapped + sum(|l| l.zero)).saturating_sub(stats.pages_shared),
            cpu_ns,
            ours: Some(Ours {
                mapped_pages: mapped,
                broken_pages: sum(|l| l.broken),
                claimed_bytes: account::saved_net(&stats),
                vmas,
                vmas_per_merged_page: vmas as f64 / mapped.max(1) as f64,
                store: Store::of(&stats, settled_s),
            }),
        })
    }

    fn last(&mut self, fleet: &mut Fleet<'_>) -> Result<Option<Store>, Failure> {
        let start = Instant::now();
        // The kernel tells the store that they have ended.
        while account::of_store(self.store.socket())?.1.len() > 1 && start.elapsed() < self.patience {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.settle(fleet)?;
        let (stats, settled_s, _) = self.wait_for_store(fleet, start)?;
        Ok(Some(Store::of(&stats, settled_s)))
    }
}
