//! What the host says: memory, CPU time of tasks; and settings that must be put back.

use std::fs;
use std::path::Path;
use vmm_dedup_host::{Failure, memory};

/// Bytes available: MemAvailable, and the free pages in per-CPU lists, which the kernel leaves out. (After a burst of
/// frees those lists hold hundreds of MiB for a while.)
pub(crate) fn available() -> Result<u64, Failure> {
    // Deferred work on LRU lists and counters first; best effort.
    for path in ["/proc/sys/vm/compact_memory", "/proc/sys/vm/stat_refresh"] {
        let _ = fs::write(path, "1");
    }
    let plain = memory::available()?;
    let zones = read("/proc/zoneinfo")?;
    let counts = zones.lines().filter_map(|l| l.trim().strip_prefix("count:"));
    let cached: u64 = counts.filter_map(|n| n.trim().parse::<u64>().ok()).sum();
    Ok(plain + cached * 4096)
}

/// CPU nanoseconds of those threads of a process whose name starts with `prefix`.
pub(crate) fn cpu_ns(pid: u32, prefix: &str) -> Result<u64, Failure> {
    let mut sum = 0;
    let tasks = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&tasks).map_err(|e| Failure::new(format!("cannot read {tasks}: {e}")))?;
    for task in entries.flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.starts_with(prefix) {
            sum += schedstat(&task.path()).unwrap_or(0);
        }
    }
    Ok(sum)
}

fn schedstat(task: &Path) -> Option<u64> {
    fs::read_to_string(task.join("schedstat"))
        .ok()?
        .split_ascii_whitespace()
        .next()?
        .parse()
        .ok()
}

/// Process id of a kernel thread.
pub(crate) fn kernel_thread(name: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|p| p.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter()
        .find(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == name))
}

/// Fails unless this process may change kernel settings.
pub(crate) fn need_root() -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::missing("KSM's settings need root: run this with sudo"))
}

/// Fails unless that much memory, and some to spare, is available.
pub(crate) fn need_memory(bytes: u64) -> Result<(), Failure> {
    let (needed, available) = (bytes + bytes / 4 + (256 << 20), available()?);
    if available >= needed {
        return Ok(());
    }
    let mib = |b: u64| b >> 20;
    Err(Failure::new(format!(
        "{} MiB are available, {} needed: choose a smaller --mib",
        mib(available),
        mib(needed)
    )))
}

/// The clock of this machine's first processor, MHz.
pub(crate) fn mhz() -> Result<f64, Failure> {
    let processors = read("/proc/cpuinfo")?;
    let clock = processors.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "cpu MHz").then(|| value.trim().parse().ok())?
    });
    clock.ok_or_else(|| Failure::new("/proc/cpuinfo tells no clock"))
}

/// Mappings of this process.
pub(crate) fn vmas() -> Result<usize, Failure> {
    Ok(read("/proc/self/maps")?.lines().count())
}

/// A time in seconds.
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

pub(crate) fn read(path: &str) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|e| Failure::new(format!("cannot read {path}: {e}")))
}

/// Whether shared memory of those who ask for it comes in folios of 64 KiB: what we recommend for the store's host, set for
/// the time of a measurement.
#[derive(Debug)]
pub(crate) struct SharedMemory(Option<String>);

const SHARED_FOLIOS: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled";

impl SharedMemory {
    /// Where the kernel has no such setting nothing changes.
    pub(crate) fn recommend() -> Self {
        let Some(old) = fs::read_to_string(SHARED_FOLIOS).ok().as_deref().and_then(chosen) else {
            return Self(None);
        };
        Self(fs::write(SHARED_FOLIOS, "advise").is_ok().then_some(old))
    }

    /// Whether the setting is in effect.
    pub(crate) fn is_recommended(&self) -> bool {
        self.0.is_some()
    }
}

/// The value in brackets of a setting that lists all values.
fn chosen(setting: &str) -> Option<String> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Some(old) = &self.0 {
            let _ = fs::write(SHARED_FOLIOS, old);
        }
    }
}

/// vm.max_map_count, raised for the time of a measurement with more mappings than the default allows.
#[derive(Debug)]
pub(crate) struct MapCount(String);

const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";

impl MapCount {
    pub(crate) fn raise() -> Result<Self, Failure> {
        let old = read(MAX_MAP_COUNT)?;
        fs::write(MAX_MAP_COUNT, "4000000")
            .map_err(|e| Failure::new(format!("cannot set {MAX_MAP_COUNT}: {e}")))?;
        Ok(Self(old))
    }
}

impl Drop for MapCount {
    fn drop(&mut self) {
        let _ = fs::write(MAX_MAP_COUNT, self.0.trim());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_value_is_found() {
        let setting = "always inherit within_size advise [never]\n";
        assert_eq!(chosen(setting).as_deref(), Some("never"));
        assert_eq!(chosen("[always] never").as_deref(), Some("always"));
        assert_eq!(chosen("nothing"), None);
    }
}
