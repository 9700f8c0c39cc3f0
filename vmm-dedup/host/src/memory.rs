//! The host's memory, and what a process may have of it.

use crate::failure::Failure;
use std::fs;
use std::path::Path;

const MEMINFO: &str = "/proc/meminfo";

/// Bytes that programs can have without swapping: the kernel's MemAvailable.
///
/// # Errors
/// A [`Failure`] if /proc does not tell.
pub fn available() -> Result<u64, Failure> {
    let text =
        fs::read_to_string(MEMINFO).map_err(|e| Failure::new(format!("cannot read {MEMINFO}: {e}")))?;
    parse(&text).ok_or_else(|| Failure::new(format!("{MEMINFO} has no MemAvailable")))
}

/// Bytes that this process's control group, and those that it is in, let it have (`memory.max`); `None` without a limit.
#[must_use]
pub fn limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_in(&groups, Path::new("/sys/fs/cgroup"))
}

fn limit_in(groups: &str, root: &Path) -> Option<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = root.join(own);
    let groups = own.ancestors().take_while(|group| group.starts_with(root));
    let limits = groups.filter_map(|group| {
        let limit = fs::read_to_string(group.join("memory.max")).ok()?;
        limit.trim().parse().ok()
    });
    limits.min()
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_all_groups_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let limit = |group: &str, limit: &str| {
            let group = folder.path().join(group);
            fs::create_dir_all(&group).expect("a folder");
            fs::write(group.join("memory.max"), limit).expect("a file");
        };
        limit("system.slice/store.service", "max\n");
        let of = |groups: &str| limit_in(groups, folder.path());
        let groups = "4:memory:/x\n0::/system.slice/store.service\n";
        assert_eq!(of(groups), None);
        limit("system.slice", "5000\n");
        assert_eq!(of(groups), Some(5000));
        limit("system.slice/store.service", "4096\n");
        assert_eq!(of(groups), Some(4096));
        assert_eq!((of("0::/\n"), of("4:memory:/x\n")), (None, None));
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:        8000 kB\nMemAvailable:    4711 kB\nBuffers: 1 kB\n";
        assert_eq!(parse(text), Some(4711 * 1024));
        assert_eq!(parse("MemTotal:        8000 kB\n"), None);
        assert_eq!(parse("MemAvailable:    18446744073709551615 kB\n"), None);
    }
}
