//! The device behind a vfio-user socket.

use super::Port;
use crate::registers as reg;
use crate::timing;
use crate::window::{Info, Job, WINDOW_BYTES, Window};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_PCI_BAR0_REGION_INDEX,
    VFIO_PCI_BAR2_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};
use vfio_user::Client;
use vmm_dedup::backend::{Answer, Arena, Error, PageId, Pages};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::mapping::Mapping;

/// How long the device may take for a ring of jobs. The longest compare 31 equal pages each: well below a second.
const PATIENCE: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The protocol failed.
    #[error("no vfio-user device at {path}: start one with `vmm-dedup device pageforge --socket`")]
    Client {
        /// Where it was looked for.
        path: PathBuf,
        /// What went wrong.
        source: vfio_user::Error,
    },
    /// It is another device, or another version of this one.
    #[error(
        "the device is not a PageForge of layout {}: driver and device must be of one release",
        reg::LAYOUT
    )]
    Foreign,
    /// The kernel says no.
    #[error("the device cannot be set up")]
    Io(#[from] io::Error),
}

/// A device in another process.
pub struct VfioUser {
    client: Mutex<Client>,
    window: Mapping,
    empty: OwnedFd,
    tail: u32,
}

impl VfioUser {
    /// Connects to a device, which is this driver's alone.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(path: &Path) -> Result<Self, ConnectError> {
        let client = |source| ConnectError::Client {
            path: path.to_owned(),
            source,
        };
        let mut device = Client::new(path).map_err(client)?;
        if read(&mut device, 0).map_err(client)? != reg::MAGIC
            || read(&mut device, reg::SHAPE).map_err(client)? >> 16 != reg::LAYOUT
        {
            return Err(ConnectError::Foreign);
        }
        let window = device
            .region(VFIO_PCI_BAR2_REGION_INDEX)
            .and_then(|region| region.file_offset.as_ref());
        let window = Mapping::read_write(window.ok_or(ConnectError::Foreign)?.file(), WINDOW_BYTES)?;
        let empty = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
        let vectors = device.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, flags, 0, 1, &[empty.as_raw_fd()]);
        vectors.map_err(client)?;
        write(&mut device, reg::ENABLE, reg::RING_BIT).map_err(client)?;
        Ok(Self {
            client: Mutex::new(device),
            window,
            empty,
            tail: 0,
        })
    }

    /// Lets the device read `pages` pages of a file, as pages `first` and following. The file should not be able to
    /// shrink (F_SEAL_SHRINK): else the device reads it slowly.
    ///
    /// # Errors
    /// If the device cannot be told. What it then refuses shows when it is asked about these pages.
    pub fn map(&self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Result<(), Error> {
        let (address, size) = (first.0 * PAGE_SIZE as u64, (pages * PAGE_SIZE) as u64);
        let mapped = self.lock().dma_map(0, address, size, file.as_raw_fd());
        mapped.map_err(failed)
    }

    /// Lets the device read all pages of an arena.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_arena(&self, arena: &Arena) -> Result<(), Error> {
        self.map(PageId(0), arena.pages(), arena.file())
    }

    fn lock(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, counter: reg::Counter) -> u64 {
        let mut bytes = [0; 8];
        let offset = u64::from(reg::ACCOUNT) + counter as u64 * 8;
        let read = self
            .lock()
            .region_read(VFIO_PCI_BAR0_REGION_INDEX, offset, &mut bytes);
        read.map_or(0, |()| u64::from_le_bytes(bytes))
    }

    /// Waits until the device has done all jobs.
    fn wait(&self) -> Result<(), Error> {
        while Window::new(self.window.words()).head() != self.tail {
            let mut fds = [PollFd::new(&self.empty, PollFlags::IN)];
            match poll(&mut fds, Some(&PATIENCE)) {
                Ok(0) => return Err(Error::Device("it does not answer".to_owned())),
                // The count says nothing; reading it makes the next wait wait.
                Ok(_) => _ = rustix::io::read(&self.empty, &mut [0; 8]),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for VfioUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VfioUser")
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Device(error.to_string())
}

fn read(client: &mut Client, register: u32) -> Result<u32, vfio_user::Error> {
    let mut bytes = [0; 4];
    client.region_read(VFIO_PCI_BAR0_REGION_INDEX, register.into(), &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn write(client: &mut Client, register: u32, value: u32) -> Result<(), vfio_user::Error> {
    client.region_write(VFIO_PCI_BAR0_REGION_INDEX, register.into(), &value.to_le_bytes())
}

impl Port for VfioUser {
    fn name(&self) -> &'static str {
        "pageforge-vfio-user"
    }

    fn window(&self) -> Window<'_> {
        Window::new(self.window.words())
    }

    /// The device reads what was mapped for it, not `pages`.
    fn run(&mut self, _pages: &dyn Pages, jobs: &[Job]) -> Answer<Vec<Info>> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let numbers: Vec<u32> = (0..)
            .map(|n| self.tail.wrapping_add(n))
            .take(jobs.len())
            .collect();
        let window = Window::new(self.window.words());
        for (number, job) in numbers.iter().zip(jobs) {
            window.set_job(*number, job);
        }
        self.tail = numbers.last().map_or(self.tail, |last| last.wrapping_add(1));
        write(&mut self.lock(), reg::RING_TAIL, self.tail).map_err(failed)?;
        self.wait()?;
        Ok(numbers.into_iter().map(|number| window.outcome(number)).collect())
    }

    fn account(&self) -> timing::Account {
        timing::Account {
            tables: self.counter(reg::Counter::Tables),
            comparisons: self.counter(reg::Counter::Comparisons),
            cache_lines: self.counter(reg::Counter::CacheLines),
            dram_lines: self.counter(reg::Counter::DramLines),
            network_lines: self.counter(reg::Counter::NetworkLines),
            key_lines: self.counter(reg::Counter::KeyLines),
            keys: self.counter(reg::Counter::Keys),
            cycles: self.counter(reg::Counter::Cycles),
            cycles_squared: self.counter(reg::Counter::CyclesSquared),
        }
    }

    fn device_cpu_ns(&self) -> u64 {
        self.counter(reg::Counter::ModelNs)
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        0
    }
}
