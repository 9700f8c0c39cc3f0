//! The device behind a vfio-user socket. It is not trusted: whatever it does, the driver comes back soon, with answers or
//! an error.

use super::courier::Courier;
use super::failure::{ConnectError, failed};
use super::port::Port;
use crate::timing;
use crate::window::{Job, WINDOW_BYTES, Window};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{SealFlags, fcntl_get_seals};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_PCI_BAR0_REGION_INDEX,
    VFIO_PCI_BAR2_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};
use vfio_user::Client;
use vmm_dedup::compare::{Answer, Arena, Error, PageId, Pages};
use vmm_dedup_pageforge_registers as reg;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::mapping::Mapping;

/// A device in another process.
pub struct VfioUser {
    courier: Courier,
    window: Mapping,
    done: Arc<Done>,
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
        let courier = Courier::start(path)?;
        let identity = courier.ask(|device| Ok((read(device, 0)?, read(device, reg::SHAPE)?)))?;
        let (magic, shape) = identity.map_err(client)?;
        if magic != reg::MAGIC || shape >> 16 != reg::LAYOUT {
            return Err(ConnectError::Foreign);
        }
        let window = courier.ask(map_window)??;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let theirs = event.try_clone()?;
        let enabled = courier.ask(move |device| {
            let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
            device.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, flags, 0, 1, &[theirs.as_raw_fd()])?;
            write(device, reg::ENABLE, reg::RING_BIT)
        })?;
        enabled.map_err(client)?;
        Ok(Self {
            courier,
            window,
            done: Arc::new(Done {
                event,
                hopeless: AtomicBool::new(false),
            }),
            tail: 0,
        })
    }

    /// Lets the device read all pages of an arena.
    ///
    /// # Errors
    /// As [`Port::map`].
    pub fn map_arena(&mut self, arena: &Arena) -> Result<(), Error> {
        self.map(PageId(0), arena.pages(), arena.file())
    }

    fn counter(&self, counter: reg::Counter) -> u64 {
        let offset = u64::from(reg::ACCOUNT) + counter as u64 * 8;
        let read = self.courier.ask(move |device| {
            let mut bytes = [0; 8];
            let read = device.region_read(VFIO_PCI_BAR0_REGION_INDEX, offset, &mut bytes);
            read.map_or(0, |()| u64::from_le_bytes(bytes))
        });
        read.unwrap_or(0)
    }
}

/// What wakes whoever waits for the device.
struct Done {
    /// Rung by the device when it has nothing left to do.
    event: OwnedFd,
    /// Set when it never will.
    hopeless: AtomicBool,
}

impl Done {
    fn give_up(&self, error: &vfio_user::Error) {
        self.hopeless.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        // Only now, as who reads the log may wait for a page that the device is to verify.
        log::debug!("the device cannot be reached: {error}");
    }
}

/// Maps the device's window.
fn map_window(device: &mut Client) -> Result<Mapping, ConnectError> {
    let region = device.region(VFIO_PCI_BAR2_REGION_INDEX);
    let window = region.and_then(|region| region.file_offset.as_ref());
    let file = window.ok_or(ConnectError::Foreign)?.file();
    let seals = fcntl_get_seals(file).map_err(|_| ConnectError::Unsealed)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(ConnectError::Unsealed);
    }
    Ok(Mapping::read_write(file, WINDOW_BYTES)?)
}

impl std::fmt::Debug for VfioUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VfioUser")
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
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

    fn has_memory_of_its_own(&self) -> bool {
        true
    }

    fn begin(&mut self, _pages: &dyn Pages, jobs: &[Job]) -> Answer<u32> {
        let first = self.tail;
        if jobs.is_empty() {
            return Ok(first);
        }
        let window = Window::new(self.window.words());
        for job in jobs {
            window.set_job(self.tail, job);
            self.tail = self.tail.wrapping_add(1);
        }
        let tail = self.tail;
        let done = Arc::clone(&self.done);
        // Nobody waits for the answer: that the device heard it shows by what it does.
        self.courier.send(move |device| {
            if let Err(error) = write(device, reg::RING_TAIL, tail) {
                done.give_up(&error);
            }
        })?;
        Ok(first)
    }

    fn done(&mut self, known: u32, wait: Duration) -> Answer<u32> {
        let deadline = Instant::now() + wait;
        loop {
            let head = Window::new(self.window.words()).head();
            if head.wrapping_sub(known) > self.tail.wrapping_sub(known) {
                return Err(failed(format!(
                    "it has done job {head}, and has jobs {known} to {}",
                    self.tail
                )));
            }
            if self.done.hopeless.load(Ordering::Acquire) {
                return Err(failed("it is gone"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if head != known || known == self.tail || left.is_zero() {
                return Ok(head);
            }
            let timeout = Timespec::try_from(left).map_err(failed)?;
            let mut fds = [PollFd::new(&self.done.event, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => {}
                // The count says nothing; reading it makes the next wait wait.
                Ok(_) => _ = rustix::io::read(&self.done.event, &mut [0; 8]),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error)),
            }
        }
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

    fn helper_cpu_ns(&self) -> u64 {
        self.courier.cpu_ns()
    }

    /// A file that can shrink the device would read slowly. What it refuses shows when it is asked about these pages.
    fn map(&mut self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Answer<()> {
        let (address, size) = (first.0 * PAGE_SIZE as u64, (pages * PAGE_SIZE) as u64);
        let file = file.try_clone_to_owned().map_err(failed)?;
        let mapped = self
            .courier
            .ask(move |device| device.dma_map(0, address, size, file.as_raw_fd()))?;
        mapped.map_err(failed)
    }

    fn unmap(&mut self, first: PageId, pages: usize) -> Answer<()> {
        let (address, size) = (first.0 * PAGE_SIZE as u64, (pages * PAGE_SIZE) as u64);
        let unmapped = self.courier.ask(move |device| device.dma_unmap(address, size))?;
        unmapped.map_err(failed)
    }
}
