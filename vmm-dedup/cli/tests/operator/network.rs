//! A network of a test's own, where the ports that others on this machine use are free.

use crate::host::Process;
use std::io::Read;
use std::process::{Command, Stdio};

/// Goes with the process that keeps it.
pub(crate) struct Network {
    keeper: Process,
}

impl Network {
    /// One with nothing but a loopback device; `None`, with a word, where it cannot be had.
    pub(crate) fn new() -> Option<Self> {
        let script = "{ ip link set lo up || busybox ip link set lo up; } && echo up && exec cat";
        let mut keeper = Command::new("unshare");
        keeper.args(["--net", "sh", "-c", script]);
        keeper.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut keeper = Process(keeper.stderr(Stdio::null()).spawn().expect("unshare"));
        let mut said = [0; 3];
        let output = keeper.0.stdout.as_mut().expect("a pipe");
        if output.read_exact(&mut said).is_err() {
            eprintln!("SKIPPED: a network namespace cannot be had");
            return None;
        }
        Some(Self { keeper })
    }

    /// A command, in it.
    pub(crate) fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside
            .arg(format!("--net=/proc/{}/ns/net", self.keeper.pid()))
            .arg("--")
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }
}
