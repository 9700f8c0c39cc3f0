//! The kernel's side.
#![allow(unsafe_code)] // madvise

use super::measured::Measured;
use crate::content::Area;
use crate::host::{self, seconds};
use std::fs;
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;

const DIR: &str = "/sys/kernel/mm/ksm";
/// Scans without a change after which KSM has converged.
const SETTLED_SCANS: u64 = 2;
/// Scans over which the idle and the dirty pass are averaged.
const SCANS: u64 = 4;
const POLL: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(600);

/// There is one KSM: who holds this keeps other comparisons away.
#[derive(Debug)]
pub(super) struct Lock {
    _folder: fs::File,
}

/// Fails if another comparison is running.
pub(super) fn lock() -> Result<Lock, Failure> {
    use rustix::fs::{FlockOperation, flock};
    let folder = fs::File::open(DIR).map_err(|e| Failure::new(format!("cannot open {DIR}: {e}")))?;
    flock(&folder, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::missing("another comparison with KSM is running on this host: wait for its end")
    })?;
    Ok(Lock { _folder: folder })
}

/// KSM's settings, put back when dropped.
#[derive(Debug)]
pub(super) struct Settings(Vec<(&'static str, String)>);

impl Settings {
    pub(super) fn save() -> Result<Self, Failure> {
        let names = ["pages_to_scan", "sleep_millisecs", "run"];
        let saved = names
            .into_iter()
            .map(|name| Ok((name, host::read(&format!("{DIR}/{name}"))?)));
        Ok(Self(saved.collect::<Result<_, Failure>>()?))
    }
}

/// Fails unless the kernel has KSM.
pub(super) fn need_ksm() -> Result<(), Failure> {
    if fs::exists(DIR).unwrap_or(false) {
        return Ok(());
    }
    Err(Failure::missing(
        "this kernel has no KSM (/sys/kernel/mm/ksm is missing): there is nothing to compare with",
    ))
}

/// Fails if somebody on this host uses KSM: a measurement unmerges all of its pages.
pub(super) fn need_unused() -> Result<(), Failure> {
    let sharing = get("pages_sharing")?;
    if get("run")? != 1 || sharing == 0 {
        return Ok(());
    }
    Err(Failure::missing(format!(
        "KSM is in use: {sharing} pages of this host would be unmerged; use another host, or --force"
    )))
}

impl Drop for Settings {
    fn drop(&mut self) {
        let _ = set("run", "2");
        for (name, value) in &self.0 {
            let _ = set(name, value.trim());
        }
    }
}

fn set(name: &str, value: &str) -> Result<(), Failure> {
    let path = format!("{DIR}/{name}");
    fs::write(&path, value).map_err(|e| Failure::new(format!("cannot set {path}: {e}")))
}

fn get(name: &str) -> Result<u64, Failure> {
    let path = format!("{DIR}/{name}");
    host::read(&path)?
        .trim()
        .parse()
        .map_err(|_| Failure::new(format!("{path} holds no number")))
}

/// Lets ksmd scan the area at full pace. The caller's process restores the settings.
pub(super) fn measure(area: &mut Area) -> Result<Measured, Failure> {
    let ksmd = host::kernel_thread("ksmd").ok_or_else(|| Failure::new("there is no ksmd"))?;
    let cpu = || host::cpu_ns(ksmd, "ksmd");
    set("run", "2")?;
    set("sleep_millisecs", "0")?;
    set("pages_to_scan", "100000")?;
    let before = host::available()?;
    // SAFETY: the area's own mapping.
    if unsafe { libc::madvise(area.address() as *mut _, area.len(), libc::MADV_MERGEABLE) } < 0 {
        return Err(Failure::new("madvise(MADV_MERGEABLE) failed"));
    }
    let (start, cpu_start) = (Instant::now(), cpu()?);
    set("run", "1")?;
    let mut last = (0, Instant::now(), cpu_start, get("full_scans")?);
    loop {
        std::thread::sleep(POLL);
        let (now, sharing, scans) = (cpu()?, get("pages_sharing")?, get("full_scans")?);
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
    set("run", "0")?;
    let freed = host::available()?.cast_signed() - before.cast_signed();
    set("run", "1")?;
    let mut round = 0;
    let dirty = per_scan(&cpu, || {
        round += 1;
        area.dirty(round);
    })?;
    set("run", "2")?;
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
        while get("full_scans")? < scans {
            if start.elapsed() > PATIENCE {
                return Err(Failure::new("KSM did not end a scan within ten minutes"));
            }
            std::thread::sleep(POLL / 10);
        }
        Ok(())
    };
    let first = get("full_scans")? + 1;
    wait_for(first)?;
    let start = cpu()?;
    for scan in 1..=SCANS {
        between();
        wait_for(first + scan)?;
    }
    Ok(seconds(cpu()? - start) / SCANS as f64)
}
