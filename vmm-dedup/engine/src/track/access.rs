//! Which memory is used: the interface of access monitors.

use crate::config::UseSource;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::thp_state::Use;
use crate::sys::page_size::HUGE_SIZE;
use std::io;
use std::time::Duration;

/// Pages of a split 2 MiB that are not shared, so that its use can be sampled by taking them: pages of the store cannot be
/// taken. They cost 0.8 % of what such a range can save. A range that shares all of a huge page of the store has none.
pub(crate) const PROBES: [Page; 4] = [63, 191, 319, 447];

/// Whether the source of use needs [`PROBES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Probes {
    pub(crate) needed: bool,
}

impl Probes {
    /// Whether a page is kept private for sampling.
    pub(crate) fn include(self, map: &PageMap, chunk: usize, page: Page) -> bool {
        let state = map.chunk(chunk);
        let offset = page - map.chunk_at(chunk).pages.start;
        self.needed && (state.huge || state.thp.ours) && PROBES.contains(&offset)
    }
}

/// What a monitor looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// 2 MiB at this address, mapped by one huge page.
    Huge(usize),
    /// The [`PROBES`] of the 2 MiB at this address.
    Split(usize),
}

impl Target {
    /// Host address of the 2 MiB.
    pub(crate) fn start(self) -> usize {
        match self {
            Target::Huge(start) | Target::Split(start) => start,
        }
    }

    pub(crate) fn contains(self, address: usize) -> bool {
        (self.start()..self.start() + HUGE_SIZE).contains(&address)
    }
}

/// Tells which memory is used, by readers as well as by writers, the guest's included, as far as it can.
///
/// The caller names 2 MiB ranges of guest memory as they are mapped now, each once, and touches none of that memory
/// itself during a sample. A monitor changes no content, loses no write and no DMA, keeps huge pages whole, and lets
/// everybody who touched a target go on before it returns.
pub(crate) trait AccessMonitor: std::fmt::Debug + Send {
    /// Which one it is.
    fn source(&self) -> UseSource;

    /// Whether [`PROBES`] must stay private for it.
    fn needs_probes(&self) -> bool;

    /// CPU time that others than the caller have spent for it so far, nanoseconds.
    fn helper_cpu_ns(&self) -> u64 {
        0
    }

    /// The service itself has read these 2 MiB, for that long: no use by anybody else.
    fn note_own_read(&mut self, _start: usize, _lasted: Duration) {}

    /// Watches the targets for about `window`; for each how it was used, `None` if that cannot be told.
    fn sample(&mut self, targets: &[Target], window: Duration) -> io::Result<Vec<Option<Use>>>;
}
