//! userfaultfd, which dedup needs.

use std::fs::{File, read_to_string};
use std::io;

/// What lets a thread have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// /dev/userfaultfd can be opened.
    Device,
    /// CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd.
    Call,
}

/// Whether the calling thread can have a userfaultfd that sees faults of KVM.
///
/// # Errors
/// Why /dev/userfaultfd cannot be opened, where nothing else helps.
pub fn usable() -> io::Result<Way> {
    let read = |path| read_to_string(path).unwrap_or_default();
    match File::open("/dev/userfaultfd") {
        Ok(_) => Ok(Way::Device),
        Err(_) if may_trace(&read("/proc/thread-self/status")) => Ok(Way::Call),
        Err(_) if read("/proc/sys/vm/unprivileged_userfaultfd").trim() == "1" => Ok(Way::Call),
        Err(e) => Err(e),
    }
}

/// CAP_SYS_PTRACE is capability 19.
fn may_trace(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << 19 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_to_trace_is_found_in_its_mask() {
        assert!(may_trace("Name:\tx\nCapEff:\t0000000000080000\n"));
        assert!(!may_trace("CapEff:\t0000000000000001\n") && !may_trace(""));
    }
}
