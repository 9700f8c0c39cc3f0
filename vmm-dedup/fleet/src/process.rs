//! Processes that outlive the command that started them, and are later found again without mistaking another for them.

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;
use vmm_dedup_host::Failure;
use vmm_dedup_host::process::{self, Stat};

/// How often a process is looked at that is to end.
const LOOK: Duration = Duration::from_millis(10);

/// A process for good: a number is used again, but not with the same start in the same boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// Clock ticks from boot to its start.
    start: u64,
    /// The kernel's id of the boot.
    boot: String,
}

/// What has become of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Running,
    /// Stopped by a signal.
    Stopped,
    /// With its exit status, if anybody still knows it.
    Ended(Option<ExitStatus>),
}

fn stat(pid: i32) -> Option<Stat> {
    Stat::of(u64::try_from(pid).ok()?)
}

fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// Starts a program in a session of its own, so that neither ^C nor the end of a terminal reaches it.
///
/// The new process waits until `record` has noted it down, and only then executes the program. If `record` fails, or if
/// we are killed meanwhile, it ends without having done anything.
pub(crate) fn spawn(
    mut command: Command,
    record: impl FnOnce(Process) -> Result<(), Failure>,
    fail: impl Fn(io::Error) -> Failure,
) -> Result<Child, Failure> {
    let boot = boot().map_err(&fail)?;
    let (mut number, tell_number) = io::pipe().map_err(&fail)?;
    let (permission, mut permit) = io::pipe().map_err(&fail)?;
    let permit_descriptor = permit.as_raw_fd();
    let wait_for_permission = move || {
        rustix::process::setsid()?;
        // SAFETY: the child's copy, which nothing else there uses. With it open the pipe would outlive us.
        #[allow(unsafe_code)]
        unsafe {
            rustix::io::close(permit_descriptor);
        }
        let own = rustix::process::getpid().as_raw_pid();
        (&tell_number).write_all(&own.to_ne_bytes())?;
        (&permission).read_exact(&mut [0])
    };
    #[allow(unsafe_code)] // the only way to a session of its own
    // SAFETY: the closure runs between fork and exec; it makes system calls only, and neither allocates nor locks.
    unsafe {
        command.pre_exec(wait_for_permission)
    };
    std::thread::scope(|scope| {
        // It returns when the program is executed; our ends of the child's pipes are closed with the command.
        let spawned = scope.spawn(move || command.spawn());
        let mut pid = [0; 4];
        // It says nothing if it cannot be started; then the starting thread knows why.
        let recorded = number.read_exact(&mut pid).ok().map(|()| {
            let pid = i32::from_ne_bytes(pid);
            let found =
                stat(pid).ok_or_else(|| fail(io::Error::other("/proc does not show it: mount /proc")));
            let start = found?.start;
            record(Process { pid, start, boot })?;
            permit.write_all(&[1]).map_err(&fail)
        });
        drop(permit);
        let spawned = spawned
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the starting thread panicked")));
        let child = match (recorded, spawned) {
            (Some(Ok(())), Ok(child)) => return Ok(child),
            (Some(Err(failure)), Err(_)) => return Err(failure),
            (_, Err(error)) => return Err(fail(error)),
            (_, Ok(child)) => child,
        };
        // Killed by somebody while it waited.
        Err(fail(end_of(child)))
    })
}

fn end_of(mut child: Child) -> io::Error {
    let _ = child.kill();
    child.wait().map_or_else(
        |error| error,
        |status| io::Error::other(format!("it ended with {}", describe(status))),
    )
}

impl Process {
    /// How it is.
    pub(crate) fn life(&self) -> Life {
        match stat(self.pid) {
            Some(stat) if stat.start == self.start && self.is_of_this_boot() => match stat {
                stat if stat.has_ended() => Life::Ended(stat.exit.map(ExitStatus::from_raw)),
                stat if stat.is_stopped() => Life::Stopped,
                _ => Life::Running,
            },
            _ => Life::Ended(None),
        }
    }

    /// Whether a store means it by a number.
    pub(crate) fn is_called(&self, of_store: u64) -> bool {
        u64::try_from(self.pid).is_ok_and(|pid| process::is(pid, of_store))
    }

    pub(crate) fn is_alive(&self) -> bool {
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
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        let Some(fd) = self.open()? else { return Ok(()) };
        match rustix::process::pidfd_send_signal(&fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether it ends within a time.
    pub(crate) async fn ends_within(&self, limit: Duration) -> bool {
        let ended = async {
            while self.is_alive() {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(limit, ended).await.is_ok()
    }

    /// Ends it: SIGTERM, then SIGKILL, each with a time limit.
    pub(crate) async fn end(&self, limit: Duration) -> io::Result<()> {
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
pub(crate) fn describe(status: ExitStatus) -> String {
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
        let mut command = Command::new("sleep");
        command.arg("1000");
        let mut noted = None;
        let note = |process| {
            noted = Some(process);
            Ok(())
        };
        let child = spawn(command, note, Failure::from_error).unwrap();
        (child, noted.unwrap())
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
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
    fn what_cannot_be_recorded_is_not_executed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("executed");
        let mut command = Command::new("touch");
        command.arg(&path);
        let mut noted = None;
        let refuse = |process| {
            noted = Some(process);
            Err(Failure::new("no room"))
        };
        let failure = spawn(command, refuse, Failure::from_error).unwrap_err();
        assert_eq!(failure.to_string(), "no room");
        assert_eq!(noted.unwrap().life(), Life::Ended(None));
        assert!(!path.exists());
    }

    #[test]
    fn a_program_that_cannot_be_started_is_an_error_with_its_cause() {
        let command = Command::new("/nonexistent/program");
        let failure = spawn(command, |_| Ok(()), Failure::from_error).unwrap_err();
        assert!(failure.to_string().contains("No such file"), "{failure}");
        let mut command = Command::new("sleep");
        command.arg("1\0");
        let failure = spawn(command, |_| Ok(()), Failure::from_error).unwrap_err();
        assert!(failure.to_string().contains("nul byte"), "{failure}");
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
