//! Processes that outlive the command that started them, and are later found again without mistaking another for them.

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

/// How often a process is looked at that is to end.
const LOOK: Duration = Duration::from_millis(10);

/// A process for good: a number is used again, but not with the same start in the same boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) pid: i32,
    /// Clock ticks from boot to its start.
    start: u64,
    /// The kernel's id of the boot.
    boot: String,
}

/// What has become of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Running,
    /// Stopped by a signal.
    Stopped,
    /// With its exit status, if anybody still knows it.
    Ended(Option<ExitStatus>),
}

/// The fields of /proc/PID/stat that matter.
struct Stat {
    state: char,
    start: u64,
    exit: Option<i32>,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
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
}

fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// Starts a program in a session of its own, so that neither ^C nor the end of a terminal reaches it.
pub(super) fn spawn(command: &mut Command) -> io::Result<(Child, Process)> {
    let boot = boot()?;
    let leave_session = || rustix::process::setsid().map(drop).map_err(io::Error::from);
    #[allow(unsafe_code)] // the only way to a session of its own
    // SAFETY: the closure runs between fork and exec; it makes one system call, and neither allocates nor locks.
    let command = unsafe { command.pre_exec(leave_session) };
    let mut child = command.spawn()?;
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    // Not waited for yet, so /proc has it even if it has ended.
    match Stat::of(pid) {
        Some(Stat { start, .. }) => Ok((child, Process { pid, start, boot })),
        None => {
            let _ = child.kill();
            let _ = child.wait();
            Err(io::Error::other("/proc does not show it: mount /proc"))
        }
    }
}

impl Process {
    /// How it is.
    pub(super) fn life(&self) -> Life {
        match Stat::of(self.pid) {
            Some(stat) if stat.start == self.start && self.is_of_this_boot() => match stat.state {
                'Z' | 'X' => Life::Ended(stat.exit.map(ExitStatus::from_raw)),
                'T' | 't' => Life::Stopped,
                _ => Life::Running,
            },
            _ => Life::Ended(None),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.life(), Life::Ended(_))
    }

    fn is_of_this_boot(&self) -> bool {
        boot().is_ok_and(|boot| boot == self.boot)
    }

    /// A descriptor of this process and no other; `None` if it has ended.
    fn open(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(None);
        };
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            // Looked at after opening: if the number has been given to another process, its start tells.
            Ok(fd) => Ok(self.is_alive().then_some(fd)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Sends a signal; nothing happens if it has ended.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let Some(fd) = self.open()? else { return Ok(()) };
        match rustix::process::pidfd_send_signal(&fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether it ends within a time.
    pub(super) async fn ends_within(&self, limit: Duration) -> bool {
        let ended = async {
            while self.is_alive() {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(limit, ended).await.is_ok()
    }

    /// Ends it: SIGTERM, then SIGKILL, each with a time limit.
    pub(super) async fn end(&self, limit: Duration) -> io::Result<()> {
        for signal in [Signal::TERM, Signal::KILL] {
            self.signal(signal)?;
            // A stopped process takes SIGTERM only when it goes on.
            self.signal(Signal::CONT)?;
            if self.ends_within(limit).await {
                return Ok(());
            }
        }
        Err(io::Error::other("it does not end, not even killed"))
    }
}

/// An exit status as a person reads it.
pub(super) fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> (Child, Process) {
        spawn(Command::new("sleep").arg("1000")).unwrap()
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    }

    #[test]
    fn a_program_name_with_brackets_and_spaces_is_no_trouble() {
        let rest = (4..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = Stat::parse(&format!("17 (a) R (b) T {rest}")).unwrap();
        assert_eq!((stat.state, stat.start, stat.exit), ('T', 22, Some(52)));
        assert!(Stat::parse("17 (a").is_none() && Stat::parse("17 (a) R 1").is_none());
    }

    #[test]
    fn a_process_is_seen_running_stopped_and_killed() {
        let (mut child, process) = sleeper();
        assert_eq!(process.life(), Life::Running);
        process.signal(Signal::STOP).unwrap();
        while process.life() != Life::Stopped {
            std::thread::sleep(Duration::from_millis(1));
        }
        process.signal(Signal::KILL).unwrap();
        assert!(runtime().block_on(process.ends_within(Duration::from_secs(60))));
        // Not waited for: the status can still be read.
        assert_eq!(process.life(), Life::Ended(Some(ExitStatus::from_raw(9))));
        child.wait().unwrap();
        assert_eq!(process.life(), Life::Ended(None));
    }

    #[test]
    fn it_leads_a_session_of_its_own() {
        let (mut child, process) = sleeper();
        let session = rustix::process::getsid(Pid::from_raw(process.pid)).unwrap();
        assert_eq!(session.as_raw_pid(), process.pid);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn another_process_with_the_same_number_is_left_alone() {
        let (mut child, process) = sleeper();
        for other in [
            Process {
                start: process.start + 1,
                ..process.clone()
            },
            Process {
                boot: "another".into(),
                ..process.clone()
            },
        ] {
            assert_eq!(other.life(), Life::Ended(None));
            other.signal(Signal::KILL).unwrap();
            assert!(runtime().block_on(other.ends_within(Duration::ZERO)));
        }
        assert!(!runtime().block_on(process.ends_within(Duration::from_millis(50))));
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
