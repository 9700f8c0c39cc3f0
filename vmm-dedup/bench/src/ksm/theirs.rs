//! The kernel's side.

use super::measured::Measured;
use crate::content::Area;
use crate::host::{self, seconds};
use crate::kernel::{self, Ksmd, RUN, SCAN, SHARING, STOP, UNMERGE, get, set};
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;

/// Scans without a change after which KSM has converged.
const SETTLED_SCANS: u64 = 2;
/// Scans over which the idle and the dirty pass are averaged.
const SCANS: u64 = 4;
const POLL: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(600);

/// Lets ksmd scan the area at full pace. The caller's process restores the settings.
pub(super) fn measure(area: &mut Area) -> Result<Measured, Failure> {
    let ksmd = Ksmd::find()?;
    let cpu = || ksmd.cpu_ns();
    kernel::prepare_for_full_pace()?;
    let before = host::available()?;
    area.let_ksm_merge()?;
    let (start, cpu_start) = (Instant::now(), cpu()?);
    set(RUN, SCAN)?;
    let mut last = (0, Instant::now(), cpu_start, get(kernel::SCANS)?);
    loop {
        std::thread::sleep(POLL);
        let (now, sharing, scans) = (cpu()?, get(SHARING)?, get(kernel::SCANS)?);
        if sharing != last.0 {
            last = (sharing, Instant::now(), now, scans);
        } else if scans >= last.3 + SETTLED_SCANS && sharing > 0 {
            break;
        }
        if start.elapsed() > PATIENCE {
            return Err(Failure::new("KSM did not converge within ten minutes"));
        }
    }
    let idle = per_scan(&cpu, || {})?;
    set(RUN, STOP)?;
    let freed = host::available()?.cast_signed() - before.cast_signed();
    set(RUN, SCAN)?;
    let mut round = 0;
    let dirty = per_scan(&cpu, || {
        round += 1;
        area.dirty(round);
    })?;
    set(RUN, UNMERGE)?;
    Ok(Measured {
        cpu_s: seconds(last.2 - cpu_start),
        wall_s: (last.1 - start).as_secs_f64(),
        saved_pages: last.0,
        idle_pass_cpu_s: idle,
        dirty_pass_cpu_s: dirty,
        freed_bytes: freed,
        ..Measured::default()
    })
}

/// CPU seconds of a full scan, with `between` before each.
fn per_scan(cpu: &impl Fn() -> Result<u64, Failure>, mut between: impl FnMut()) -> Result<f64, Failure> {
    let wait_for = |scans: u64| -> Result<(), Failure> {
        let start = Instant::now();
        while get(kernel::SCANS)? < scans {
            if start.elapsed() > PATIENCE {
                return Err(Failure::new("KSM did not end a scan within ten minutes"));
            }
            std::thread::sleep(POLL / 10);
        }
        Ok(())
    };
    let first = get(kernel::SCANS)? + 1;
    wait_for(first)?;
    let start = cpu()?;
    for scan in 1..=SCANS {
        between();
        wait_for(first + scan)?;
    }
    Ok(seconds(cpu()? - start) / SCANS as f64)
}
