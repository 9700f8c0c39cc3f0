//! A measurement in a process of its own, which answers in JSON on its standard output.

use serde::de::DeserializeOwned;
use std::io::Read;
use std::process::{Command, Stdio};
use vmm_dedup_host::Failure;
use vmm_dedup_host::children::Process;

/// Runs a worker to its end and reads its answer; `what`: what it measures, for messages.
pub(crate) fn ask<T: DeserializeOwned>(command: &mut Command, what: &str) -> Result<T, Failure> {
    let process = Process::start(command.stdin(Stdio::null()).stdout(Stdio::piped()));
    let process = process.map_err(|e| Failure::new(format!("cannot start a measurement: {e}")))?;
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
    serde_json::from_slice(&answer).map_err(|e| Failure::new(format!("unreadable measurement: {e}")))
}
