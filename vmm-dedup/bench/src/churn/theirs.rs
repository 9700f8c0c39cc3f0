//! The kernel's side: KSM at full pace.

use super::fleet::Fleet;
use super::measured::Store;
use super::orders::{Done, Order};
use super::side::{Seen, Settled, Side};
use crate::kernel::{self, Ksmd, RUN, SCAN, SCANS, SHARING, STOP, get, set};
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;

/// Scans without a change after which KSM has settled: it merges a page that it finds unchanged in the next scan.
const SETTLED_SCANS: u64 = 3;
/// The same with `smart_scan`, which leaves out a page that did not merge for up to eight scans: until all have been looked at
/// twice.
const SETTLED_SMART_SCANS: u64 = 18;
/// A change of so small a part of what is shared is none.
const SMALL_CHANGE: f64 = 0.001;
const POLL: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(600);

/// KSM.
pub(super) struct Theirs {
    ksmd: Ksmd,
    settled_scans: u64,
}

impl Theirs {
    pub(super) fn new() -> Result<Self, Failure> {
        kernel::prepare_for_full_pace()?;
        // Kernels before 6.7 have no such setting.
        let smart = get("smart_scan").is_ok_and(|smart| smart == 1);
        Ok(Self {
            ksmd: Ksmd::find()?,
            settled_scans: if smart { SETTLED_SMART_SCANS } else { SETTLED_SCANS },
        })
    }
}

impl Side for Theirs {
    fn begin(&mut self, fleet: &mut Fleet<'_>) -> Result<(), Failure> {
        fleet.all::<Done>(&Order::LetKsmMerge).map(drop)
    }

    fn cpu_ns(&self, _: &Fleet<'_>) -> Result<u64, Failure> {
        self.ksmd.cpu_ns()
    }

    fn work_beside(&mut self, _: &mut Fleet<'_>, work: bool) -> Result<(), Failure> {
        // After the writes it goes on.
        if work { set(RUN, SCAN) } else { Ok(()) }
    }

    fn settle(&mut self, fleet: &mut Fleet<'_>) -> Result<Settled, Failure> {
        let start = Instant::now();
        let settled = |this: &Self| {
            Ok::<_, Failure>(Settled {
                cpu_ns: this.cpu_ns(fleet)?,
                after: start.elapsed(),
            })
        };
        let (mut last, mut shared, mut scan) = (settled(self)?, get(SHARING)?, get(SCANS)?);
        loop {
            std::thread::sleep(POLL);
            let (now, sharing, scans) = (settled(self)?, get(SHARING)?, get(SCANS)?);
            if sharing.abs_diff(shared) as f64 > shared as f64 * SMALL_CHANGE {
                (last, shared, scan) = (now, sharing, scans);
            } else if scans >= scan + self.settled_scans && sharing > 0 {
                return Ok(last);
            }
            if start.elapsed() > PATIENCE {
                return Err(Failure::new("KSM did not settle within ten minutes"));
            }
        }
    }

    fn look(&mut self, _: &mut Fleet<'_>) -> Result<Seen, Failure> {
        set(RUN, STOP)?;
        Ok(Seen {
            saved_pages: get(SHARING)?,
            cpu_ns: None,
            ours: None,
        })
    }

    fn last(&mut self, _: &mut Fleet<'_>) -> Result<Option<Store>, Failure> {
        Ok(None)
    }
}
