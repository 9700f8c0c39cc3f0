//! A measurement in a process of its own, which answers in JSON on its standard output: once, or line by line whatever it is
//! asked.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Read, Write, stdin};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use vmm_dedup_host::children::Process;
use vmm_dedup_host::{Failure, say};

/// Runs a worker to its end and reads its answer; `what`: what it measures, for messages.
pub(crate) fn ask<T: DeserializeOwned>(command: &mut Command, what: &str) -> Result<T, Failure> {
    let process = start(command.stdin(Stdio::null()))?;
    let mut answer = Vec::new();
    if let Some(mut output) = process.output() {
        output.read_to_end(&mut answer).map_err(Failure::from_error)?;
    }
    let status = process.wait().map_err(Failure::from_error)?;
    if !status.success() {
        return Err(Failure::new(format!(
            "the measurement of {what} failed ({status})"
        )));
    }
    serde_json::from_slice(&answer).map_err(unreadable)
}

fn start(command: &mut Command) -> Result<Process, Failure> {
    let process = Process::start(command.stdout(Stdio::piped()));
    process.map_err(|e| Failure::new(format!("cannot start a measurement: {e}")))
}

fn unreadable(error: serde_json::Error) -> Failure {
    Failure::new(format!("unreadable measurement: {error}"))
}

/// The worker's side: one answer.
pub(crate) fn answer(measured: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(measured).map_err(Failure::from_error)?;
    say!("{text}");
    Ok(())
}

/// The worker's side of a conversation: answers each question by `reply` until there are no more.
pub(crate) fn converse<Q: DeserializeOwned>(
    mut reply: impl FnMut(Q) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for line in stdin().lines() {
        reply(serde_json::from_str(&line.map_err(Failure::from_error)?).map_err(unreadable)?)?;
    }
    Ok(())
}

/// A worker that is asked line by line; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Conversation {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    process: Process,
    name: String,
}

impl Conversation {
    /// Starts the worker; `name`: for messages.
    pub(crate) fn start(command: &mut Command, name: String) -> Result<Self, Failure> {
        let process = start(command.stdin(Stdio::piped()))?;
        let (Some(input), Some(output)) = (process.input(), process.output()) else {
            return Err(Failure::new(format!("{name} has no pipes")));
        };
        Ok(Self {
            input,
            output: BufReader::new(output),
            process,
            name,
        })
    }

    /// Asks, and does not wait for the answer: others can be asked meanwhile.
    pub(crate) fn tell(&mut self, question: &impl Serialize) -> Result<(), Failure> {
        let mut line = serde_json::to_string(question).map_err(Failure::from_error)?;
        line.push('\n');
        // One that has ended has said why on standard error.
        let told = self.input.write_all(line.as_bytes());
        told.map_err(|_| Failure::new(format!("{} ended during the measurement", self.name)))
    }

    /// Waits for the answer to the first question that has none yet.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(Failure::from_error)?;
        if line.is_empty() {
            return Err(Failure::new(format!(
                "{} ended during the measurement",
                self.name
            )));
        }
        serde_json::from_str(&line).map_err(unreadable)
    }

    /// The worker's process number.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }
}
