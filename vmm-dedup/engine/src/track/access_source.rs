//! Which sources tell the use of memory, and which of them is taken.

use crate::config::UseSource;
use crate::memory::layout::Memory;
use crate::memory::thp_state::Use;
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
    pub(crate) skipped: String,
}

/// Asks `wanted` first, then the others, the best first; not the guest's agent, which is asked range by range
/// ([`agent_use`](mod@crate::hints::agent_use)).
pub(crate) fn choose(wanted: UseSource, tracker: &Arc<Uffd>, memory: &Memory) -> Chosen {
    let others = UseSource::ALL.into_iter().filter(|source| *source != wanted);
    let mut skipped = Vec::new();
    for source in std::iter::once(wanted).chain(others) {
        let monitor: Result<Box<dyn AccessMonitor>, String> = match source {
            UseSource::Agent => continue,
            UseSource::FaultSampling => FaultSampling::new(tracker.clone())
                .map(|monitor| Box::new(monitor) as _)
                .map_err(|e| e.to_string()),
            UseSource::Damon | UseSource::PageIdle if !cfg!(feature = "privileged") => {
                Err("this program is built without the feature privileged".into())
            }
            UseSource::Damon => Damon::start(memory).map(|monitor| Box::new(monitor) as _),
            UseSource::PageIdle => PageIdle::start().map(|monitor| Box::new(monitor) as _),
            UseSource::Writes => Ok(Box::new(Writes)),
        };
        match monitor {
            Ok(monitor) => {
                log::info!("{}", told(source));
                let skipped = skipped.join("; ");
                return Chosen { monitor, skipped };
            }
            Err(reason) => {
                let line = not_told(source, &reason);
                log::warn!("{line}");
                skipped.push(line);
            }
        }
    }
    // Not reached: writes always can.
    Chosen {
        monitor: Box::new(Writes),
        skipped: skipped.join("; "),
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
