//! Memory that is short, as the host tells it: its swap, and the limits of the cgroups that this process is in.

use std::fs;
use std::path::Path;

/// Of all swap the share that is left at which it counts as full: the kernel keeps some of it for each CPU.
const LEFT: u64 = 16;
/// Where the second version of cgroups may be.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// All swap of the host. Source: Linux, Documentation/filesystems/proc.rst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Swap {
    pub(crate) kib: u64,
    pub(crate) used_kib: u64,
}

impl Swap {
    /// `None` if /proc does not say.
    pub(crate) fn of_host() -> Option<Self> {
        let text = fs::read_to_string("/proc/swaps").ok()?;
        Some(Self::of(&text))
    }

    fn of(text: &str) -> Self {
        let devices = text.lines().skip(1).filter_map(|line| {
            // Type, size, use and priority stand behind the name.
            let mut fields = line.split_ascii_whitespace().rev().skip(1);
            let used_kib = fields.next()?.parse::<u64>().ok()?;
            Some((fields.next()?.parse::<u64>().ok()?, used_kib))
        });
        devices.fold(Self::default(), |sum, (kib, used_kib)| Self {
            kib: sum.kib + kib,
            used_kib: sum.used_kib + used_kib,
        })
    }

    /// Whether there is any.
    pub(crate) fn exists(self) -> bool {
        self.kib > 0
    }

    /// Whether there is some, and hardly any is left.
    pub(crate) fn is_full(self) -> bool {
        self.exists() && self.kib.saturating_sub(self.used_kib) < self.kib / LEFT
    }
}

/// How often this process's cgroup, or one around it, was above its memory.high; 0 without the second version of cgroups.
/// Source: Linux, Documentation/admin-guide/cgroup-v2.rst.
pub(crate) fn memory_high_met() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(own) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return 0;
    };
    let met = |root: &str| -> u64 {
        let (root, own) = (Path::new(root), Path::new(root).join(own));
        let around = own.ancestors().take_while(|group| group.starts_with(root));
        let events = around.filter_map(|group| fs::read_to_string(group.join("memory.events.local")).ok());
        events.map(|events| high_of(&events)).sum()
    };
    CGROUPS.into_iter().map(met).sum()
}

/// The line of memory.events that counts them.
fn high_of(events: &str) -> u64 {
    let line = events.lines().find_map(|line| line.strip_prefix("high "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";

    #[test]
    fn all_devices_count() {
        let text = format!(
            "{HEAD}/dev/zram0  partition\t4092\t\t4000\t\t-2\n/a\\040file\\040(deleted) file\t1000\t0\t-3\n"
        );
        let swap = Swap::of(&text);
        assert_eq!((swap.kib, swap.used_kib), (5092, 4000));
        assert!(swap.exists() && !swap.is_full());
        assert_eq!(Swap::of(HEAD), Swap::default());
    }

    #[test]
    fn swap_is_full_when_hardly_any_is_left() {
        let swap = |used_kib| Swap { kib: 1600, used_kib };
        assert!(!swap(1500).is_full() && swap(1501).is_full() && swap(1600).is_full());
        assert!(!Swap::default().exists() && !Swap::default().is_full());
    }

    #[test]
    fn times_that_the_limit_was_met_are_read() {
        assert_eq!(high_of("low 0\nhigh 17\nmax 3\noom 0\n"), 17);
        assert_eq!(high_of(""), 0);
    }
}
