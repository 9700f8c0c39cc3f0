//! A cgroup of the test's own, whose memory is short.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the memory controller may be, whether in its second version, and what reclaims there at once. (The hard limit of
/// the first version is no use: who meets it is killed.)
const PLACES: [(&str, bool, &str); 3] = [
    ("/sys/fs/cgroup", true, "memory.reclaim"),
    ("/sys/fs/cgroup/unified", true, "memory.reclaim"),
    ("/sys/fs/cgroup/memory", false, "memory.force_empty"),
];

/// A group that is removed when it is dropped, and which this process has left by then.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
    home: PathBuf,
    /// Whether there is memory.high.
    high: bool,
    reclaim: &'static str,
}

impl MemoryGroup {
    /// Makes a group. Memory counts for it that is allocated while the process is in it.
    ///
    /// # Errors
    /// Why there can be none.
    pub fn new() -> Result<Self, String> {
        let mut reasons = Vec::new();
        for (root, second, reclaim) in PLACES {
            match Self::below(Path::new(root), second, reclaim) {
                Ok(group) => return Ok(group),
                Err(reason) => reasons.push(format!("{root}: {reason}")),
            }
        }
        Err(reasons.join("; "))
    }

    fn below(root: &Path, second: bool, reclaim: &'static str) -> Result<Self, String> {
        let home = root.join(home(second)?.trim_start_matches('/'));
        let path = root.join(format!("vmm-dedup-test-{}", std::process::id()));
        if second {
            let there = fs::read_to_string(root.join("cgroup.controllers")).map_err(|e| e.to_string())?;
            if !there.split_whitespace().any(|name| name == "memory") {
                return Err("no memory controller".into());
            }
            let control = root.join("cgroup.subtree_control");
            fs::write(&control, "+memory").map_err(|e| format!("{}: {e}", control.display()))?;
        }
        fs::create_dir(&path).map_err(|e| e.to_string())?;
        let group = Self {
            path,
            home,
            high: second,
            reclaim,
        };
        let settable = group.path.join(reclaim).exists() && group.home.join("cgroup.procs").exists();
        settable.then_some(group).ok_or_else(|| "no such setting".into())
    }

    /// Does something in the group.
    ///
    /// # Panics
    /// If the process cannot enter or leave the group.
    pub fn within<T>(&self, what: impl FnOnce() -> T) -> T {
        enter(&self.path).expect("the group can be entered");
        let done = what();
        enter(&self.home).expect("the group can be left");
        done
    }

    /// Lets the kernel reclaim what is above so many bytes, all the time (memory.high); where it cannot do that, reclaims what
    /// can be, once.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn press(&self, bytes: u64) -> io::Result<()> {
        if self.high {
            return fs::write(self.path.join("memory.high"), bytes.to_string());
        }
        self.reclaim();
        Ok(())
    }

    /// Whether the limit is memory.high, which the kernel keeps all the time.
    #[must_use]
    pub fn has_high(&self) -> bool {
        self.high
    }

    /// Bytes that count for the group.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn used(&self) -> io::Result<u64> {
        let current = fs::read_to_string(self.path.join("memory.current"));
        let text = current.or_else(|_| fs::read_to_string(self.path.join("memory.usage_in_bytes")))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// Reclaims what can be.
    pub fn reclaim(&self) {
        // It says so if that was less than was wanted.
        let _ = fs::write(self.path.join(self.reclaim), "1G");
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let removed = enter(&self.home).and_then(|()| fs::remove_dir(&self.path));
        if let Err(error) = removed {
            eprintln!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Moves this process.
fn enter(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

/// The group that this process is in.
fn home(unified: bool) -> Result<String, String> {
    let text = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
    let of_memory = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let found = match unified {
            true => controllers.is_empty(),
            false => controllers.split(',').any(|name| name == "memory"),
        };
        found.then(|| path.to_owned())
    };
    text.lines()
        .find_map(of_memory)
        .ok_or_else(|| "not mounted".into())
}
