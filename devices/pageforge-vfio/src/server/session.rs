//! One client: a device of its own, and what the vfio-user crate asks of it.

use super::dma::DmaMemory;
use super::pci::{CONFIG_BYTES, Config};
use crate::device::{Board, Device};
use crate::memory::Memory;
use crate::registers::REGISTERS_BYTES;
use crate::window::WINDOW_BYTES;
use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_NORESIZE, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_BAR2_REGION_INDEX,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_NUM_IRQS, VFIO_PCI_NUM_REGIONS,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info,
    vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, ServerBackend, ServerRegion, SparseArea};
use vmm_dedup_protocol::mapping::{Mapping, staging_memfd};

/// Regions that a client can ask for.
pub(super) const REGIONS: u32 = VFIO_PCI_NUM_REGIONS;

/// The client's side of the device: its memory and its interrupts.
#[derive(Debug, Default)]
struct ClientBoard {
    memory: DmaMemory,
    vectors: Mutex<Vec<Option<File>>>,
}

impl Board for ClientBoard {
    fn memory(&self) -> impl Memory {
        self.memory.view()
    }

    fn interrupt(&self, vector: usize) {
        let vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(file)) = vectors.get(vector) {
            // A full eventfd has been raised already.
            let _ = rustix::io::write(file, &1u64.to_ne_bytes());
        }
    }
}

/// A client's device.
#[derive(Debug)]
pub(super) struct Session {
    device: Device<ClientBoard>,
    board: Arc<ClientBoard>,
    config: Config,
    window_file: OwnedFd,
    window: Arc<Mapping>,
    vectors: u16,
}

impl Session {
    /// A device with so many modules.
    pub(super) fn new(modules: u16) -> io::Result<Self> {
        let (window_file, window) = staging_memfd(WINDOW_BYTES)?;
        let window = Arc::new(window);
        let board = Arc::new(ClientBoard::default());
        let vectors = modules + 1; // the ring's is the first
        Ok(Self {
            device: Device::new(modules.into(), Arc::clone(&window), Arc::clone(&board))?,
            board,
            config: Config::new(vectors),
            window_file,
            window,
            vectors,
        })
    }

    /// The regions, as clients see them.
    pub(super) fn regions(&self) -> Vec<ServerRegion> {
        let region = |index: u32| {
            let size = match index {
                VFIO_PCI_BAR0_REGION_INDEX => REGISTERS_BYTES,
                VFIO_PCI_BAR2_REGION_INDEX => WINDOW_BYTES,
                VFIO_PCI_CONFIG_REGION_INDEX => CONFIG_BYTES,
                _ => 0,
            };
            let mapped = index == VFIO_PCI_BAR2_REGION_INDEX;
            let access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
            let area = vfio_region_sparse_mmap_area {
                offset: 0,
                size: WINDOW_BYTES as u64,
            };
            ServerRegion {
                region_info: vfio_region_info {
                    argsz: 32,
                    flags: if size == 0 { 0 } else { access }
                        | if mapped { VFIO_REGION_INFO_FLAG_MMAP } else { 0 },
                    index,
                    size: size as u64,
                    ..Default::default()
                },
                sparse_areas: if mapped {
                    vec![SparseArea { area }]
                } else {
                    Vec::new()
                },
                mmap_fd: mapped.then(|| self.window_file.as_raw_fd()),
            }
        };
        (0..REGIONS).map(region).collect()
    }

    /// The interrupts: MSI-X only.
    pub(super) fn irqs(&self) -> Vec<IrqInfo> {
        let irq = |index| {
            let ours = index == VFIO_PCI_MSIX_IRQ_INDEX;
            IrqInfo {
                index,
                flags: if ours {
                    VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE
                } else {
                    0
                },
                count: if ours { self.vectors.into() } else { 0 },
            }
        };
        (0..VFIO_PCI_NUM_IRQS).map(irq).collect()
    }

    /// The words of the window that an access means: whole words of 8 bytes. Others mean none: nothing on a PCI bus could
    /// tell the guest of an error, and the crate's client does not understand one here.
    fn window_words(&self, offset: u64, len: usize) -> &[AtomicU64] {
        let at = usize::try_from(offset)
            .ok()
            .filter(|at| at.is_multiple_of(8) && len.is_multiple_of(8));
        let words = at.and_then(|at| self.window.words().get(at / 8..at.checked_add(len)? / 8));
        words.unwrap_or(&[])
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// An eventfd that can be written without ever waiting.
fn event(file: File) -> io::Result<File> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(invalid("interrupts are raised through eventfds"));
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)?;
    Ok(file)
}

impl ServerBackend for Session {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            VFIO_PCI_BAR0_REGION_INDEX => self.device.read(offset, data),
            VFIO_PCI_BAR2_REGION_INDEX => {
                data.fill(0);
                let words = self.window_words(offset, data.len());
                for (bytes, word) in data.chunks_exact_mut(8).zip(words) {
                    bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
                }
            }
            VFIO_PCI_CONFIG_REGION_INDEX => self.config.read(offset, data),
            _ => return Err(invalid("there is no such region")),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            VFIO_PCI_BAR0_REGION_INDEX => self.device.write(offset, data),
            VFIO_PCI_BAR2_REGION_INDEX => {
                let words = self.window_words(offset, data.len());
                for (bytes, word) in data.chunks_exact(8).zip(words) {
                    word.store(bytes.try_into().map_or(0, u64::from_ne_bytes), Ordering::Release);
                }
            }
            VFIO_PCI_CONFIG_REGION_INDEX => self.config.write(offset, data),
            _ => return Err(invalid("there is no such region")),
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
        let mapped = self.board.memory.map(address, size, offset, file);
        mapped.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        if flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            self.board.memory.unmap_all();
            return Ok(());
        }
        let unmapped = self.board.memory.unmap(address, size);
        unmapped.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
    }

    /// Everything but the memory that the client has mapped, which it does not map again.
    fn reset(&mut self) -> io::Result<()> {
        self.device.reset();
        self.config = Config::new(self.vectors);
        self.board
            .vectors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        let end = start.checked_add(count).filter(|end| *end <= self.vectors.into());
        let (Some(end), VFIO_PCI_MSIX_IRQ_INDEX) = (end, index) else {
            return Err(invalid("there is no such interrupt vector"));
        };
        let events = match flags {
            _ if flags == VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER => fds
                .into_iter()
                .map(|file| event(file).map(Some))
                .collect::<io::Result<Vec<_>>>()?,
            // No events: these vectors, or all, are switched off.
            _ if flags == VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER && fds.is_empty() => {
                Vec::new()
            }
            _ => return Err(invalid("interrupts can be given eventfds, or none")),
        };
        let mut vectors = self.board.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        if count == 0 {
            vectors.clear();
            return Ok(());
        }
        if !events.is_empty() && events.len() != count as usize {
            return Err(invalid("there must be an eventfd for each vector"));
        }
        vectors.resize_with(self.vectors.into(), || None);
        let mut events = events.into_iter();
        for vector in &mut vectors[start as usize..end as usize] {
            *vector = events.next().flatten();
        }
        Ok(())
    }
}
