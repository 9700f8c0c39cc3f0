//! What the kernel says to calls that fail in tests, and what the engine tells of them.

use crate::memory::Pages;
use crate::store::StoreThread;
use vmm_dedup::{Call, Config, DedupService, Site};

/// What the kernel says to a call that lacks what it needs.
#[must_use]
pub fn lack(call: Call) -> i32 {
    match call {
        Call::Wake | Call::Schedule => libc::EINVAL,
        Call::PollFaults | Call::Brk => libc::EINTR,
        Call::Fork | Call::Mincore | Call::Split => libc::EAGAIN,
        Call::PagemapRead => libc::EIO,
        _ => libc::ENOMEM,
    }
}

/// Whether what failed is done in another way, as the engine says where it makes the call, or need not be done: then nothing is told.
#[must_use]
pub fn has_another_way(site: &Site) -> bool {
    // Advice is lost.
    site.has_another_way || site.call == Call::Advise
}

/// Whether another counter tells of it: `heal_failed_total` of the service, which the tests of healing look at.
#[must_use]
pub fn is_counted_elsewhere(site: &Site) -> bool {
    matches!(site.call, Call::Fork | Call::PagemapRead)
}

/// What counts failures of the process: a service with little to do.
#[derive(Debug)]
pub struct Counter {
    service: DedupService,
    _store: StoreThread,
}

impl Counter {
    /// Starts that service.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start() -> Self {
        let store = StoreThread::start();
        let config = Config {
            name: "counter".into(),
            pass_period_ms: 3_600_000,
            ..Config::default()
        };
        let service = Pages::map(1).serve(&store.socket(), config);
        Self {
            service: service.expect("dedup starts"),
            _store: store,
        }
    }

    /// So far. What was noted is logged soon after.
    ///
    /// # Panics
    /// If the service has ended.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.service.pass().expect("a pass").window_failures_total
    }
}
