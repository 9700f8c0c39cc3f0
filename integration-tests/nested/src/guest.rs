//! A guest: a VMM's process, with the guest's console on its standard streams.

use crate::wait::{check, wait_for};
use crate::{Failure, Workload};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A running guest; killed when dropped.
pub(crate) struct Guest {
    pub(crate) name: String,
    process: Child,
    keyboard: Box<dyn Write + Send>,
    console: Console,
    /// Lines that were asked for before, which are not looked at again.
    seen: usize,
}

/// The kernel command line of a guest.
pub(crate) fn cmdline(name: &str, workload: Workload) -> String {
    // Of L1's init; see Accelerator::guest_arguments.
    let more = std::env::var("GUEST_ARGUMENTS").unwrap_or_default();
    format!("console=ttyS0 panic=-1 quiet mitigations=off workload={workload} name={name} {more}")
}

impl Guest {
    /// Starts a VMM whose serial line is its standard streams.
    pub(crate) fn start(name: &str, command: &mut Command) -> Result<Self, Failure> {
        let mut process = spawn(name, command)?;
        let console = Console::default();
        console.follow(process.stdout.take());
        console.follow(process.stderr.take());
        let keyboard = process
            .stdin
            .take()
            .ok_or_else(|| Failure::new("a guest without a keyboard"))?;
        Ok(Self::new(name, process, Box::new(keyboard), console))
    }

    /// Starts a VMM whose serial line is a socket that it makes.
    pub(crate) fn start_on_socket(name: &str, command: &mut Command, socket: &Path) -> Result<Self, Failure> {
        let mut process = spawn(name, command)?;
        let console = Console::default();
        console.follow(process.stdout.take());
        console.follow(process.stderr.take());
        let line = wait_for("a guest's serial line", || Ok(UnixStream::connect(socket).ok()))?;
        console.follow(line.try_clone().ok());
        Ok(Self::new(name, process, Box::new(line), console))
    }

    fn new(name: &str, process: Child, keyboard: Box<dyn Write + Send>, console: Console) -> Self {
        Self {
            name: name.to_owned(),
            process,
            keyboard,
            console,
            seen: 0,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Everything that the VMM and the guest have said.
    pub(crate) fn log(&self) -> String {
        self.console.lines().join("\n")
    }

    /// The next line with `part`, after those found before; waits for it.
    pub(crate) fn wait(&mut self, part: &str) -> Result<String, Failure> {
        let name = self.name.clone();
        wait_for(&format!("{name} to say \"{part}\""), || {
            if let Some(line) = self.find(part) {
                return Ok(Some(line));
            }
            let ended = self.process.try_wait().map_err(|e| Failure::new(e.to_string()))?;
            check(ended.is_none(), || {
                format!("{name} has ended before it said \"{part}\":\n{}", self.log())
            })?;
            Ok(None)
        })
        .map_err(|failure| Failure::new(format!("{failure}\n{}", self.log())))
    }

    fn find(&mut self, part: &str) -> Option<String> {
        let console = self.console.lines();
        let at = console[self.seen..].iter().position(|line| line.contains(part))? + self.seen;
        self.seen = at + 1;
        Some(console[at].clone())
    }

    /// Types a command and waits for a line with `answer`.
    pub(crate) fn ask(&mut self, command: &str, answer: &str) -> Result<String, Failure> {
        self.type_line(command)?;
        self.wait(answer)
    }

    pub(crate) fn type_line(&mut self, text: &str) -> Result<(), Failure> {
        let typed = self
            .keyboard
            .write_all(format!("{text}\n").as_bytes())
            .and_then(|()| self.keyboard.flush());
        typed.map_err(|e| {
            let (name, log) = (&self.name, self.log());
            Failure::new(format!("{name} has no keyboard any more: {e}\n{log}"))
        })
    }

    /// Rounds that its workload has done.
    pub(crate) fn progress(&mut self) -> Result<u64, Failure> {
        let line = self.ask("progress", "L2 progress")?;
        let rounds = line.split_whitespace().last().and_then(|word| word.parse().ok());
        rounds.ok_or_else(|| Failure::new(format!("{} said: {line}", self.name)))
    }

    /// Waits for the verdict after `verify` was typed; fails if a file is wrong, or a round of its work was.
    pub(crate) fn verified(&mut self) -> Result<(), Failure> {
        let line = self.wait("L2 verified")?;
        let right = line.contains("verified, 0 bad") && !self.log().contains("FAILED");
        check(right, || format!("{} has lost data:\n{}", self.name, self.log()))
    }

    /// Waits for the end of its process.
    pub(crate) fn ended(&mut self) -> Result<ExitStatus, Failure> {
        let name = self.name.clone();
        wait_for(&format!("{name} to end"), || {
            self.process.try_wait().map_err(|e| Failure::new(e.to_string()))
        })
    }

    /// Waits for its end after `poweroff` was typed.
    pub(crate) fn powered_off(&mut self) -> Result<(), Failure> {
        let status = self.ended()?;
        check(status.success(), || {
            format!("{} ended with {status}:\n{}", self.name, self.log())
        })
    }

    pub(crate) fn kill(&mut self) -> Result<(), Failure> {
        self.process.kill().map_err(|e| Failure::new(e.to_string()))?;
        self.ended().map(drop)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both do nothing to one that has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(name: &str, command: &mut Command) -> Result<Child, Failure> {
    let command = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
        .spawn()
        .map_err(|e| Failure::new(format!("{name} cannot be started: {e}")))
}

/// Lines that a VMM and its guest have said, on whatever they are said.
#[derive(Clone, Default)]
struct Console(Arc<Mutex<Vec<String>>>);

impl Console {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Collects what comes, to its end, in a thread.
    fn follow(&self, output: Option<impl Read + Send + 'static>) {
        let Some(output) = output else { return };
        let console = self.clone();
        std::thread::spawn(move || {
            let mut input = BufReader::new(output);
            let mut line = Vec::new();
            while input.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                console.lines().push(text);
                line.clear();
            }
        });
    }
}
