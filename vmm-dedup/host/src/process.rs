//! What the kernel tells of a process.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use vmm_dedup_protocol::peer;

/// The process that a store means by a number, as our PID namespace numbers it; `None` if it has ended, or we cannot see it. The
/// store may be in another namespace than its VM.
#[must_use]
pub fn number(of_store: u64) -> Option<u64> {
    if !peer::is_abroad(of_store) {
        return Some(of_store);
    }
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| is(*pid, of_store))
}

/// Whether a store means this process of our PID namespace by a number.
#[must_use]
pub fn is(pid: u64, of_store: u64) -> bool {
    if !peer::is_abroad(of_store) {
        return pid == of_store;
    }
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pidfd = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
    pidfd.and_then(|pidfd| peer::number_abroad(pidfd).ok().flatten()) == Some(of_store)
}

/// The fields of /proc/PID/stat that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The letter of its state.
    pub state: char,
    /// Clock ticks from boot to its start.
    pub start: u64,
    /// Its exit status, once it is a zombie and if we may know.
    pub exit: Option<i32>,
}

impl Stat {
    /// Of a process, if there is one of that number.
    #[must_use]
    pub fn of(pid: u64) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The program's name, in brackets, may contain anything; the fields after it are numbered from 3 (proc(5)).
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text
            .get(text.rfind(')')? + 1..)?
            .split_ascii_whitespace()
            .collect();
        let field = |n: usize| fields.get(n - 3);
        Some(Self {
            state: field(3)?.chars().next()?,
            start: field(22)?.parse().ok()?,
            exit: field(52).and_then(|f| f.parse().ok()),
        })
    }

    /// Whether it was stopped by a signal or a debugger: none of its threads runs.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// Whether it has ended and only its number is left.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_brackets_and_spaces_is_no_trouble() {
        let rest = (4..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = Stat::parse(&format!("17 (a) R (b) T {rest}")).unwrap();
        assert_eq!((stat.state, stat.start, stat.exit), ('T', 22, Some(52)));
        assert!(stat.is_stopped() && !stat.has_ended());
        assert!(Stat::parse("17 (a").is_none() && Stat::parse("17 (a) R 1").is_none());
    }

    #[test]
    fn a_process_is_found_by_what_names_it_in_all_namespaces() {
        let own = u64::from(std::process::id());
        assert_eq!(
            (number(own), is(own, own), is(own, own + 1)),
            (Some(own), true, false)
        );
        let pid = rustix::process::getpid();
        let abroad = peer::number_abroad(pidfd_open(pid, PidfdFlags::empty()).unwrap()).unwrap();
        let Some(abroad) = abroad else {
            crate::note!("SKIPPED: this kernel gives processes no such numbers");
            return;
        };
        assert!(peer::is_abroad(abroad));
        assert_eq!(
            (number(abroad), is(own, abroad), is(1, abroad)),
            (Some(own), true, own == 1)
        );
        assert_eq!(number(u64::MAX), None);
    }

    #[test]
    fn this_process_runs() {
        let stat = Stat::of(std::process::id().into()).unwrap();
        assert!(!stat.is_stopped() && !stat.has_ended());
        assert_eq!(Stat::of(u64::MAX), None);
    }
}
