//! Which sources tell the use of memory, and which of them is taken.

use crate::compare::Retry;
use crate::config::UseSource;
use crate::error::Error;
use crate::memory::layout::Memory;
use crate::memory::thp_state::Use;
use crate::sys::late_log;
use crate::sys::uffd::Uffd;
use crate::track::access::{AccessMonitor, Target};
use crate::track::damon::Damon;
use crate::track::fault_sampling::FaultSampling;
use crate::track::page_idle::PageIdle;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The source that works, and why others that were asked before do not.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) monitor: Box<dyn AccessMonitor>,
    skipped: Vec<(UseSource, String)>,
    /// Sampling by taking was asked before this one and could not start: when it is tried again, in intervals. (What the others
    /// lack, the host lacks.)
    sampling: Retry,
}

impl Chosen {
    /// Why sources that were asked before do not tell the use of memory.
    pub(crate) fn skipped(&self) -> String {
        let lines: Vec<&str> = self.skipped.iter().map(|(_, line)| line.as_str()).collect();
        lines.join("; ")
    }

    /// Whether sampling by taking is to be started again in this interval.
    pub(crate) fn may_sample_again(&self, interval: u64) -> bool {
        let sampling = |(source, _): &(UseSource, String)| *source == UseSource::FaultSampling;
        self.skipped.iter().any(sampling) && self.sampling.is_due(interval)
    }

    /// Starts sampling by taking, if that works by now; else it is tried again, each time after a longer pause. Whether it works.
    pub(crate) fn sample_again(&mut self, interval: u64, tracker: &Arc<Uffd>) -> bool {
        match FaultSampling::new(tracker.clone()) {
            Ok(monitor) => {
                self.monitor = Box::new(monitor);
                // What was asked after it did not tell either.
                let asked_first = |(source, _): &(UseSource, String)| *source != UseSource::FaultSampling;
                self.skipped = std::mem::take(&mut self.skipped)
                    .into_iter()
                    .take_while(asked_first)
                    .collect();
                log::info!("{}", told(UseSource::FaultSampling));
                true
            }
            Err(error) => {
                self.sampling.fail(interval);
                note_not_started(error);
                false
            }
        }
    }
}

/// Sampling could not start.
fn note_not_started(error: Error) {
    let error = match error {
        Error::Scratch(source) | Error::Pagemap(source) => source,
        other => io::Error::other(other),
    };
    late_log::note(
        "starting to sample the use of memory",
        &error,
        "it is tried again, each time after a longer pause",
    );
}

/// Asks `wanted` first, then the others, the best first; not the guest's agent, which is asked range by range
/// ([`agent_use`](mod@crate::hints::agent_use)).
pub(crate) fn choose(wanted: UseSource, interval: Duration, tracker: &Arc<Uffd>, memory: &Memory) -> Chosen {
    let others = UseSource::ALL.iter().copied().filter(|source| *source != wanted);
    let mut skipped = Vec::new();
    // In intervals, which are long: up to 64 of them.
    let mut sampling = Retry::brief();
    for source in std::iter::once(wanted).chain(others) {
        let monitor: Result<Box<dyn AccessMonitor>, String> = match source {
            UseSource::Agent => continue,
            UseSource::FaultSampling => FaultSampling::new(tracker.clone())
                .map(|monitor| Box::new(monitor) as _)
                .map_err(|error| {
                    let reason = error.to_string();
                    sampling.fail(0);
                    note_not_started(error);
                    reason
                }),
            UseSource::Damon | UseSource::PageIdle if !cfg!(feature = "privileged") => {
                Err("this program is built without the feature privileged".into())
            }
            UseSource::Damon => Damon::start(memory, interval).map(|monitor| Box::new(monitor) as _),
            UseSource::PageIdle => PageIdle::start().map(|monitor| Box::new(monitor) as _),
            UseSource::Writes => Ok(Box::new(Writes)),
        };
        match monitor {
            Ok(monitor) => {
                log::info!("{}", told(source));
                return Chosen {
                    monitor,
                    skipped,
                    sampling,
                };
            }
            Err(reason) => {
                let line = not_told(source, &reason);
                log::warn!("{line}");
                skipped.push((source, line));
            }
        }
    }
    // Not reached: writes always can.
    Chosen {
        monitor: Box::new(Writes),
        skipped,
        sampling,
    }
}

pub(crate) fn told(source: UseSource) -> String {
    format!("the use of memory is told by {source}")
}

pub(crate) fn not_told(source: UseSource, why: &dyn std::fmt::Display) -> String {
    format!("the use of memory is not told by {source}: {why}")
}

/// Tells nothing that write tracking does not tell anyway: what is not written is not used.
#[derive(Debug)]
struct Writes;

impl AccessMonitor for Writes {
    fn source(&self) -> UseSource {
        UseSource::Writes
    }

    fn needs_probes(&self) -> bool {
        false
    }

    fn sample(&mut self, targets: &[Target], _window: Duration) -> io::Result<Vec<Option<Use>>> {
        Ok(vec![Some(Use::None); targets.len()])
    }
}
