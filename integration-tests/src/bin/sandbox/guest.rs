//! A VM under the supervisor, and its memory.

use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_dedup::{Config, HostRange, Setup, Supervisor};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;

/// Enough for huge pages, and for batches.
pub(crate) const PAGES: usize = 1024;
/// The socket that stands in for the guest's vsock, and the guest's CID.
pub(crate) const VSOCK: &str = "kernel.vsock";
pub(crate) const CID: u32 = 33;
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Guest {
    pub(crate) supervisor: Arc<Supervisor>,
    pub(crate) store: StoreThread,
    pub(crate) round: u64,
    /// Where files for direct I/O are, if not beside the store: on an overlayfs.
    pub(crate) disks: Option<PathBuf>,
    /// Of sockets.
    pub(crate) folder: PathBuf,
}

/// One half is a copy of the other.
pub(crate) fn twins() -> Pages {
    let pages = Pages::map(PAGES);
    fill(&pages);
    pages
}

pub(crate) fn fill(pages: &Pages) {
    (0..PAGES).for_each(|page| pages.fill(page, (page % (PAGES / 2)) as u64 + 1));
}

pub(crate) fn range(pages: &Pages, first: usize, count: usize) -> HostRange {
    HostRange::try_new(pages.address(first), count * 4096).expect("aligned")
}

impl Guest {
    pub(crate) fn attach(&mut self, config: Config) {
        let setup = self.setup(config);
        self.supervisor.attach(setup).expect("it fits");
    }

    pub(crate) fn setup(&mut self, config: Config) -> Setup {
        self.round += 1;
        let config = Config {
            name: format!("guest-{}", self.round),
            cpu_percent: 100,
            pass_period_ms: 10,
            ..config
        };
        Setup {
            config,
            ..Setup::new(self.store.socket())
        }
    }

    pub(crate) fn add(&self, range: HostRange) {
        // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
        unsafe { self.supervisor.add_range(range) };
    }

    pub(crate) fn wait(&self, what: &str, done: impl Fn(&vmm_dedup::ServiceStats) -> bool) {
        self.wait_for(what, || self.supervisor.stats().is_some_and(|stats| done(&stats)));
    }

    pub(crate) fn wait_for(&self, what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(
                start.elapsed() < PATIENCE,
                "{what} does not happen: {:?} {:?}",
                self.supervisor.status(),
                self.supervisor.stats()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn shares(&self) {
        self.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    }

    /// A disk that is open for direct I/O, if its file system has that.
    pub(crate) fn disk(&self) -> std::io::Result<std::fs::File> {
        self.disk_with(libc::O_DIRECT)
    }

    /// A disk that is open with such flags.
    pub(crate) fn disk_with(&self, flags: i32) -> std::io::Result<std::fs::File> {
        let beside = self.store.path();
        let file = self.disks.as_deref().unwrap_or(beside).join("disk");
        std::fs::write(&file, [0; 4096])?;
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(flags).open(&file)
    }
}
