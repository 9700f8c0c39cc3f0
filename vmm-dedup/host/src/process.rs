//! What the kernel tells of a process.

use std::fs;

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
    fn this_process_runs() {
        let stat = Stat::of(std::process::id().into()).unwrap();
        assert!(!stat.is_stopped() && !stat.has_ended());
        assert_eq!(Stat::of(u64::MAX), None);
    }
}
