//! Which sources tell the use of memory, and which of them is taken.

use crate::memory::layout::Memory;
use crate::sys::uffd::Uffd;
use crate::track::access::{AccessMonitor, Target, Use};
use crate::track::damon::Damon;
use crate::track::fault_sampling::TakeAndWait;
use crate::track::page_idle::PageIdle;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use vmm_dedup_protocol::stats::USE_SOURCES;

/// What tells which memory is used. If one cannot, the next of take-and-wait, damon, page-idle and writes is asked, and the reason
/// is logged and explained. Writes that break sharing count as use with any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UseSource {
    /// Memory is taken away for some milliseconds, and who uses it waits: tells how often as well, and needs nothing but what
    /// merging needs. Who uses memory is stopped once in an interval for each 2 MiB of it.
    #[default]
    TakeAndWait,
    /// The kernel's DAMON, which looks at accessed bits: stops nobody, tells less about how often. Needs a kernel with
    /// DAMON for virtual addresses, CAP_SYS_ADMIN, and that nobody else on the host uses DAMON.
    Damon,
    /// The kernel's bitmap of idle pages: as `Damon`, for any number of VMs. Needs CAP_SYS_ADMIN, and a kernel with
    /// CONFIG_IDLE_PAGE_TRACKING, which those of distributions are not.
    PageIdle,
    /// Only writes that break sharing: costs nothing, and takes for idle what is only read.
    Writes,
}

impl UseSource {
    /// All of them, the best first.
    pub const ALL: [UseSource; 4] = [
        UseSource::TakeAndWait,
        UseSource::Damon,
        UseSource::PageIdle,
        UseSource::Writes,
    ];

    /// Its name in configurations and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        USE_SOURCES[self.number()]
    }

    pub(crate) fn number(self) -> usize {
        match self {
            UseSource::TakeAndWait => 1,
            UseSource::Damon => 2,
            UseSource::Writes => 3,
            UseSource::PageIdle => 4,
        }
    }
}

impl std::fmt::Display for UseSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for UseSource {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || UseSource::ALL.map(UseSource::name).join(", ");
        UseSource::ALL
            .into_iter()
            .find(|source| source.name() == name)
            .ok_or_else(|| {
                format!(
                    "nothing named {name:?} tells the use of memory; choose one of {}",
                    names()
                )
            })
    }
}

/// The source that works, and why others that were asked before do not.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) monitor: Box<dyn AccessMonitor>,
    pub(crate) skipped: String,
}

/// Asks `wanted` first, then the others, the best first.
pub(crate) fn choose(wanted: UseSource, tracker: &Arc<Uffd>, memory: &Memory) -> Chosen {
    let others = UseSource::ALL.into_iter().filter(|source| *source != wanted);
    let mut skipped = Vec::new();
    for source in std::iter::once(wanted).chain(others) {
        let monitor: Result<Box<dyn AccessMonitor>, String> = match source {
            UseSource::TakeAndWait => TakeAndWait::new(tracker.clone())
                .map(|monitor| Box::new(monitor) as _)
                .map_err(|e| e.to_string()),
            UseSource::Damon => Damon::start(memory).map(|monitor| Box::new(monitor) as _),
            UseSource::PageIdle => PageIdle::start().map(|monitor| Box::new(monitor) as _),
            UseSource::Writes => Ok(Box::new(Writes)),
        };
        match monitor {
            Ok(monitor) => {
                log::info!("the use of memory is told by {source}");
                let skipped = skipped.join("; ");
                return Chosen { monitor, skipped };
            }
            Err(reason) => {
                let line = format!("the use of memory is not told by {source}: {reason}");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for source in UseSource::ALL {
            assert_eq!(source.name().parse(), Ok(source));
        }
        assert!(
            "bits"
                .parse::<UseSource>()
                .unwrap_err()
                .contains("take-and-wait, damon, page-idle, writes")
        );
    }
}
