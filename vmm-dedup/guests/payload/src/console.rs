//! The host's end of the serial line: collects the output, and lets a test wait for a report.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::report::{Report, ReportError};

/// The report that was waited for did not come.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WaitError {
    /// Not in time.
    #[error("the payload did not report what was awaited within {waited:?}; its last output was:\n{tail}")]
    Timeout {
        /// How long the caller waited.
        waited: Duration,
        /// The end of the output.
        tail: String,
    },
    /// It ended without.
    #[error("the payload ended without the report that was awaited; its last output was:\n{tail}")]
    Ended {
        /// The end of the output.
        tail: String,
    },
    /// A line was damaged.
    #[error(transparent)]
    Damaged(#[from] ReportError),
}

/// Collects serial output. Clones share it: give one to the VMM as its serial output, and wait on the other.
#[derive(Clone, Default)]
pub struct Console {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    grown: Condvar,
}

#[derive(Default)]
struct State {
    output: Vec<u8>,
    /// How much of `output` has been split into lines.
    parsed: usize,
    reports: Vec<Report>,
    damaged: Option<ReportError>,
}

impl State {
    fn parse(&mut self) {
        while let Some(length) = self.output[self.parsed..].iter().position(|byte| *byte == b'\n') {
            let line = String::from_utf8_lossy(&self.output[self.parsed..self.parsed + length]);
            match Report::parse(&line) {
                Ok(report) => self.reports.extend(report),
                Err(error) => self.damaged = self.damaged.take().or(Some(error)),
            }
            self.parsed += length + 1;
        }
    }

    fn tail(&self) -> String {
        const TAIL: usize = 2000;
        String::from_utf8_lossy(&self.output[self.output.len().saturating_sub(TAIL)..]).into_owned()
    }
}

impl Console {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All output so far.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.state().output).into_owned()
    }

    /// All reports so far.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.state().reports.clone()
    }

    /// Waits until something can be found in the output or the reports, and is told as soon as a line is there.
    pub fn wait<T>(&self, timeout: Duration, find: impl Fn(&str, &[Report]) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            let found = find(&String::from_utf8_lossy(&state.output), &state.reports);
            let left = deadline.saturating_duration_since(Instant::now());
            if found.is_some() || left.is_zero() {
                return found;
            }
            let woken = self.shared.grown.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the first report that `wanted` accepts, past or future.
    ///
    /// # Errors
    /// If it does not come in time, if the payload ends without it, or if a line is damaged.
    pub fn wait_for(&self, timeout: Duration, wanted: impl Fn(&Report) -> bool) -> Result<Report, WaitError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        let mut seen = 0;
        loop {
            if let Some(found) = state.reports[seen..].iter().find(|report| wanted(report)) {
                return Ok(found.clone());
            }
            seen = state.reports.len();
            if let Some(damaged) = &state.damaged {
                return Err(damaged.clone().into());
            }
            if matches!(state.reports.last(), Some(Report::Done { .. })) {
                return Err(WaitError::Ended { tail: state.tail() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WaitError::Timeout {
                    waited: timeout,
                    tail: state.tail(),
                });
            }
            state = self
                .shared
                .grown
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits until the guest has filled its pages.
    ///
    /// # Errors
    /// As for [`Console::wait_for`].
    pub fn wait_ready(&self, timeout: Duration) -> Result<Report, WaitError> {
        self.wait_for(timeout, |report| matches!(report, Report::Ready { .. }))
    }

    /// Waits for the end; true if the guest found everything as it must be.
    ///
    /// # Errors
    /// As for [`Console::wait_for`].
    pub fn wait_done(&self, timeout: Duration) -> Result<bool, WaitError> {
        let done = self.wait_for(timeout, |report| matches!(report, Report::Done { .. }))?;
        Ok(done == Report::Done { ok: true })
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.state();
        state.output.extend_from_slice(bytes);
        if bytes.contains(&b'\n') {
            state.parse();
            self.shared.grown.notify_all();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
