//! KSM, the kernel's own dedup, with which some benches compare: its settings, its figures, and who may use it.

use crate::host;
use std::fs;
use vmm_dedup_host::Failure;

const DIR: &str = "/sys/kernel/mm/ksm";
/// Names of settings and figures.
pub(crate) const RUN: &str = "run";
pub(crate) const SHARING: &str = "pages_sharing";
pub(crate) const SCANS: &str = "full_scans";
const SLEEP: &str = "sleep_millisecs";
const BATCH: &str = "pages_to_scan";

/// What [`RUN`] may be.
pub(crate) const STOP: &str = "0";
pub(crate) const SCAN: &str = "1";
pub(crate) const UNMERGE: &str = "2";

/// The host as a comparison needs it: nobody else uses KSM, a process may have many mappings, and the store's memory comes in
/// large folios. All settings are put back when this is dropped.
#[derive(Debug)]
pub(crate) struct Comparison {
    // Dropped in this order: the lock is the last to go.
    _settings: Settings,
    _limit: host::MapCount,
    shared: host::SharedMemory,
    _lock: Lock,
}

impl Comparison {
    /// Fails where there is no KSM, without the right to set it, while another comparison is running, and if KSM is in use
    /// (which `force` ignores).
    pub(crate) fn begin(force: bool) -> Result<Self, Failure> {
        host::need_root()?;
        need_ksm()?;
        let lock = lock()?;
        if !force {
            need_unused()?;
        }
        Ok(Self {
            _settings: Settings::save()?,
            _limit: host::MapCount::raise()?,
            shared: host::SharedMemory::recommend(),
            _lock: lock,
        })
    }

    /// Whether the store's memory comes in large folios, as we recommend it.
    pub(crate) fn has_large_folios(&self) -> bool {
        self.shared.is_recommended()
    }
}

/// There is one KSM: who holds this keeps other comparisons away.
#[derive(Debug)]
struct Lock {
    _folder: fs::File,
}

/// Fails if another comparison is running.
fn lock() -> Result<Lock, Failure> {
    use rustix::fs::{FlockOperation, flock};
    let folder = fs::File::open(DIR).map_err(|e| Failure::new(format!("cannot open {DIR}: {e}")))?;
    flock(&folder, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::missing("another comparison with KSM is running on this host: wait for its end")
    })?;
    Ok(Lock { _folder: folder })
}

/// KSM's settings, put back when dropped.
#[derive(Debug)]
struct Settings(Vec<(&'static str, String)>);

impl Settings {
    fn save() -> Result<Self, Failure> {
        let saved = [BATCH, SLEEP, RUN]
            .into_iter()
            .map(|name| Ok((name, host::read(&format!("{DIR}/{name}"))?)));
        Ok(Self(saved.collect::<Result<_, Failure>>()?))
    }
}

/// Fails unless the kernel has KSM.
fn need_ksm() -> Result<(), Failure> {
    if fs::exists(DIR).unwrap_or(false) {
        return Ok(());
    }
    Err(Failure::missing(
        "this kernel has no KSM (/sys/kernel/mm/ksm is missing): there is nothing to compare with",
    ))
}

/// Fails if somebody on this host uses KSM: a measurement unmerges all of its pages.
fn need_unused() -> Result<(), Failure> {
    let sharing = get(SHARING)?;
    if get(RUN)? != 1 || sharing == 0 {
        return Ok(());
    }
    Err(Failure::missing(format!(
        "KSM is in use: {sharing} pages of this host would be unmerged; use another host, or --force"
    )))
}

impl Drop for Settings {
    fn drop(&mut self) {
        let _ = set(RUN, UNMERGE);
        for (name, value) in &self.0 {
            let _ = set(name, value.trim());
        }
    }
}

/// Changes a setting.
pub(crate) fn set(name: &str, value: &str) -> Result<(), Failure> {
    let path = format!("{DIR}/{name}");
    fs::write(&path, value).map_err(|e| Failure::new(format!("cannot set {path}: {e}")))
}

/// Reads a setting or a figure.
pub(crate) fn get(name: &str) -> Result<u64, Failure> {
    let path = format!("{DIR}/{name}");
    host::read(&path)?
        .trim()
        .parse()
        .map_err(|_| Failure::new(format!("{path} holds no number")))
}

/// Unmerges everything, and lets KSM scan at full pace from when it is told to run.
pub(crate) fn prepare_for_full_pace() -> Result<(), Failure> {
    set(RUN, UNMERGE)?;
    set(SLEEP, "0")?;
    set(BATCH, "100000")
}

/// KSM's thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ksmd(u32);

impl Ksmd {
    pub(crate) fn find() -> Result<Self, Failure> {
        let pid = host::kernel_thread("ksmd").ok_or_else(|| Failure::new("there is no ksmd"))?;
        Ok(Self(pid))
    }

    /// Its CPU time so far, nanoseconds.
    pub(crate) fn cpu_ns(self) -> Result<u64, Failure> {
        host::cpu_ns(self.0, "ksmd")
    }
}
