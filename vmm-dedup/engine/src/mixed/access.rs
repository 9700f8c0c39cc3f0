//! Which memory is used: the interface of access monitors.

use crate::page_size::HUGE_SIZE;
use std::io;
use std::time::Duration;

/// Pages of a split 2 MiB that are never shared, so that its use can be sampled on them: reading a page of the store
/// leaves no trace that a process could see. They cost 0.8 % of what such a range can save.
pub(crate) const PROBES: [usize; 4] = [63, 191, 319, 447];

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

/// What a sample tells of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Nobody touched it.
    None,
    /// It was touched, but not soon: less often than [`OFTEN`] says.
    Rare,
    /// It was touched at once, or a device works on it.
    Often,
}

/// How soon memory that is used often is touched. Uses come at random, so something used once in this time is found
/// used often in two samples of three, and something used ten times less in one of ten. At one access a millisecond
/// small pages cost some hundredths of a per cent of a core in TLB misses; huge pages are for what is used more.
pub(crate) const OFTEN: Duration = Duration::from_millis(1);

/// Tells which memory is used, by readers as well as by writers, the guest's included.
///
/// The caller names 2 MiB ranges of guest memory as they are mapped now, each once, and touches none of that memory
/// itself during a sample. A monitor changes no content, loses no write and no DMA, keeps huge pages whole, and lets
/// everybody who touched a target go on before it returns.
pub(crate) trait AccessMonitor: std::fmt::Debug + Send {
    /// Its number in [`vmm_dedup_protocol::stats::USE_SOURCES`].
    fn source(&self) -> u64;

    /// Watches the targets for about `window`; for each how it was used, `None` if that cannot be told.
    fn sample(&mut self, targets: &[Target], window: Duration) -> io::Result<Vec<Option<Use>>>;
}
