//! One client: a device of its own, what the vfio-user crate asks of it, and the thread that does its work.

use crate::device::Device;
use crate::pci::{CONFIG_BYTES, Config, portal_bytes};
use crate::pieces::Pieces;
use crate::spaces::ClientMemory;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_BAR2_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_NUM_REGIONS,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, ServerBackend, ServerRegion};
use vmm_dedup_dsa_abi::registers::REGISTERS_BYTES;
use vmm_dedup_dsa_model::{Board, Core, Memory, Shape, Way};
use vmm_dedup_vfio_user::{Interrupts, plain_region};

/// The client's side of the device: its memory and its interrupts.
#[derive(Debug)]
struct ClientBoard {
    memory: ClientMemory,
    interrupts: Interrupts,
}

impl Board for ClientBoard {
    fn memory(&self) -> &dyn Memory {
        &self.memory
    }

    fn interrupt(&self, vector: u16) {
        self.interrupts.raise(vector.into());
    }
}

/// The device, shared by those who access its registers and its thread.
#[derive(Debug)]
struct Shared {
    core: Mutex<Core>,
    /// How many wait for the core besides the device's thread, which lets them go first: a thread that gives a mutex back and
    /// takes it again has it before one that waits for it is awake.
    callers: AtomicUsize,
    /// Told when the device has something new to do, or its end has come.
    news: Condvar,
    board: ClientBoard,
    began: Instant,
}

/// A client's device.
#[derive(Debug)]
pub(crate) struct Session {
    shared: Arc<Shared>,
    shape: Shape,
    config: Config,
    pieces: Pieces,
    /// `None` once it was told to end.
    thread: Option<JoinHandle<()>>,
    end: Arc<AtomicBool>,
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// For the device's thread.
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For all others.
    fn core(&self) -> MutexGuard<'_, Core> {
        self.callers.fetch_add(1, Ordering::AcqRel);
        let core = self.lock();
        self.callers.fetch_sub(1, Ordering::AcqRel);
        core
    }

    /// Does what is due, step by step, so that registers are answered in between and the end is heard soon.
    fn work(&self, has_ended: impl Fn() -> bool) {
        let mut core = self.lock();
        while !has_ended() {
            let now = self.now();
            match core.next_event() {
                Some(due) if due <= now => {
                    core.advance(due, &self.board);
                    // Whoever waits for the registers has its turn.
                    drop(core);
                    while self.callers.load(Ordering::Acquire) > 0 {
                        std::thread::yield_now();
                    }
                    core = self.lock();
                }
                Some(due) => {
                    let left = Duration::from_nanos(due - now);
                    let waited = self.news.wait_timeout(core, left);
                    (core, _) = waited.unwrap_or_else(PoisonError::into_inner);
                }
                None => core = self.news.wait(core).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Session {
    pub(crate) fn new(device: &Device) -> io::Result<Self> {
        let mut core = Core::new(device.shape.clone(), device.timing, device.faults);
        let config = Config::new(&device.shape);
        let (bus_master, pasid) = config.bus();
        core.set_bus(bus_master, pasid);
        let shared = Arc::new(Shared {
            core: Mutex::new(core),
            callers: AtomicUsize::new(0),
            news: Condvar::new(),
            board: ClientBoard {
                memory: ClientMemory::new(device.spaces.clone()),
                interrupts: Interrupts::new(device.shape.vectors())?,
            },
            began: Instant::now(),
        });
        let end = Arc::new(AtomicBool::new(false));
        let (own, ended) = (Arc::clone(&shared), Arc::clone(&end));
        let thread = std::thread::Builder::new().name("dsa".into());
        let thread = thread.spawn(move || own.work(|| ended.load(Ordering::Acquire)))?;
        Ok(Self {
            shared,
            shape: device.shape.clone(),
            config,
            pieces: Pieces::default(),
            thread: Some(thread),
            end,
        })
    }

    fn function_reset(&mut self) {
        self.pieces.clear();
        self.shared.core().function_reset();
    }

    fn tell_bus(&self) {
        let (bus_master, pasid) = self.config.bus();
        self.shared.core().set_bus(bus_master, pasid);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // First, so that the thread does no more of what is left than the step that it is at.
        self.end.store(true, Ordering::Release);
        {
            // Under the lock, so that the thread does not miss it between looking and waiting.
            let _core = self.shared.core();
            self.shared.news.notify_all();
        }
        if let Some(thread) = self.thread.take() {
            // A panic of it has been told already.
            let _ = thread.join();
        }
    }
}

fn no_region() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "there is no such region")
}

impl vmm_dedup_vfio_user::Session for Session {
    fn regions(&self) -> Vec<ServerRegion> {
        let region = |index: u32| {
            let bytes = match index {
                VFIO_PCI_BAR0_REGION_INDEX => REGISTERS_BYTES,
                VFIO_PCI_BAR2_REGION_INDEX => portal_bytes(&self.shape) as u64,
                VFIO_PCI_CONFIG_REGION_INDEX => CONFIG_BYTES as u64,
                _ => 0,
            };
            plain_region(index, bytes)
        };
        (0..VFIO_PCI_NUM_REGIONS).map(region).collect()
    }

    fn irqs(&self) -> Vec<IrqInfo> {
        self.shared.board.interrupts.info()
    }
}

impl ServerBackend for Session {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            VFIO_PCI_BAR0_REGION_INDEX => self.shared.core().read_registers(offset, data),
            // Portals cannot be read.
            VFIO_PCI_BAR2_REGION_INDEX => data.fill(0xff),
            VFIO_PCI_CONFIG_REGION_INDEX => self.config.read(offset, data),
            _ => return Err(no_region()),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            VFIO_PCI_BAR0_REGION_INDEX => {
                let shared = &self.shared;
                let mut core = shared.core();
                core.write_registers(offset, data, shared.now(), &shared.board);
                shared.news.notify_one();
            }
            VFIO_PCI_BAR2_REGION_INDEX => {
                let inside = offset < portal_bytes(&self.shape) as u64;
                let shared = &self.shared;
                self.pieces
                    .write(offset, if inside { data } else { &[] }, |at, bytes| {
                        // What is lost a software error tells of.
                        let _ = shared
                            .core()
                            .submit(at, Way::Posted, bytes, shared.now(), &shared.board);
                        shared.news.notify_one();
                    });
            }
            VFIO_PCI_CONFIG_REGION_INDEX => {
                if self.config.write(offset, data) {
                    self.function_reset();
                }
                self.tell_bus();
            }
            _ => return Err(no_region()),
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        file: Option<File>,
    ) -> io::Result<()> {
        let file = file.filter(|_| flags.contains(DmaMapFlags::READ));
        let writable = flags.contains(DmaMapFlags::WRITE);
        Ok(self
            .shared
            .board
            .memory
            .dma
            .map(address, size, offset, file, writable)?)
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        let dma = &self.shared.board.memory.dma;
        if flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            dma.unmap_all();
            return Ok(());
        }
        Ok(dma.unmap(address, size)?)
    }

    /// Everything but the memory that the client has mapped, which it does not map again.
    fn reset(&mut self) -> io::Result<()> {
        self.config = Config::new(&self.shape);
        self.function_reset();
        self.tell_bus();
        self.shared.board.interrupts.clear();
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        self.shared.board.interrupts.set(index, flags, start, count, fds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_dsa::{Registers, Wanted, bring_up};
    use vmm_dedup_dsa_abi::{Descriptor, portal};

    struct Bar<'a>(&'a mut Session);

    impl Registers for Bar<'_> {
        fn read(&mut self, offset: u64) -> u64 {
            let mut bytes = [0; 8];
            let read = self.0.region_read(VFIO_PCI_BAR0_REGION_INDEX, offset, &mut bytes);
            read.unwrap();
            u64::from_le_bytes(bytes)
        }

        fn write(&mut self, offset: u64, value: u32) {
            let bytes = value.to_le_bytes();
            let written = self.0.region_write(VFIO_PCI_BAR0_REGION_INDEX, offset, &bytes);
            written.unwrap();
        }
    }

    /// A mutex lets its last owner have it again before those who wait.
    #[test]
    fn the_devices_thread_does_nothing_more_while_somebody_waits_for_the_registers() {
        const NOPS: u64 = 64;
        let mut session = Session::new(&Device::default()).unwrap();
        session
            .region_write(VFIO_PCI_CONFIG_REGION_INDEX, 4, &[6, 0])
            .unwrap();
        bring_up(&mut Bar(&mut session), Wanted::default()).unwrap();
        let shared = Arc::clone(&session.shared);
        let done = || shared.lock().account().descriptors;
        shared.callers.fetch_add(1, Ordering::AcqRel);
        let nop = Descriptor::nop().to_bytes();
        for _ in 0..NOPS {
            let at = portal::offset(0, portal::Kind::Unlimited);
            session
                .region_write(VFIO_PCI_BAR2_REGION_INDEX, at, &nop)
                .unwrap();
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(done() < NOPS, "it did not make way");
        shared.callers.fetch_sub(1, Ordering::AcqRel);
        while done() < NOPS {
            std::thread::yield_now();
        }
    }
}
