//! One client: a device of its own, and what the vfio-user crate asks of it.

use super::pci::{CONFIG_BYTES, config_space};
use crate::device::{Board, Device};
use crate::memory::{LINE_BYTES, Line, Memory};
use crate::scan_table::Ppn;
use crate::window::WINDOW_BYTES;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_BAR2_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_NUM_REGIONS, VFIO_REGION_INFO_FLAG_MMAP, vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, ServerBackend, ServerRegion, SparseArea};
use vmm_dedup_pageforge_registers::REGISTERS_BYTES;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::mapping::{Mapping, staging_memfd};
use vmm_dedup_vfio_user::{ConfigSpace, DmaMemory, DmaView, Interrupts, plain_region};

/// The client's side of the device: its memory and its interrupts.
#[derive(Debug)]
struct ClientBoard {
    memory: DmaMemory,
    interrupts: Interrupts,
}

impl Board for ClientBoard {
    fn memory(&self) -> impl Memory {
        self.memory.view()
    }

    fn interrupt(&self, vector: usize) {
        self.interrupts.raise(vector);
    }
}

impl Memory for DmaView<'_> {
    fn line(&self, page: Ppn, line: usize) -> Option<Line> {
        DmaView::line(
            self,
            page.number() * PAGE_SIZE as u64 + (line * LINE_BYTES) as u64,
        )
    }
}

/// A client's device.
#[derive(Debug)]
pub(super) struct Session {
    device: Device<ClientBoard>,
    board: Arc<ClientBoard>,
    config: ConfigSpace,
    window_file: OwnedFd,
    window: Arc<Mapping>,
}

impl Session {
    /// A device with so many modules.
    pub(super) fn new(modules: u16) -> io::Result<Self> {
        let (window_file, window) = staging_memfd(WINDOW_BYTES)?;
        let window = Arc::new(window);
        let vectors = modules + 1; // the ring's is the first
        let board = Arc::new(ClientBoard {
            memory: DmaMemory::default(),
            interrupts: Interrupts::new(vectors)?,
        });
        Ok(Self {
            device: Device::new(modules.into(), Arc::clone(&window), Arc::clone(&board))?,
            board,
            config: config_space(vectors),
            window_file,
            window,
        })
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

fn no_region() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "there is no such region")
}

impl vmm_dedup_vfio_user::Session for Session {
    fn regions(&self) -> Vec<ServerRegion> {
        let region = |index: u32| {
            let bytes = match index {
                VFIO_PCI_BAR0_REGION_INDEX => REGISTERS_BYTES,
                VFIO_PCI_BAR2_REGION_INDEX => WINDOW_BYTES,
                VFIO_PCI_CONFIG_REGION_INDEX => CONFIG_BYTES,
                _ => 0,
            };
            let mut region = plain_region(index, bytes as u64);
            if index == VFIO_PCI_BAR2_REGION_INDEX {
                region.region_info.flags |= VFIO_REGION_INFO_FLAG_MMAP;
                let area = vfio_region_sparse_mmap_area {
                    offset: 0,
                    size: bytes as u64,
                };
                region.sparse_areas = vec![SparseArea { area }];
                region.mmap_fd = Some(self.window_file.as_raw_fd());
            }
            region
        };
        (0..VFIO_PCI_NUM_REGIONS).map(region).collect()
    }

    fn irqs(&self) -> Vec<IrqInfo> {
        self.board.interrupts.info()
    }
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
            _ => return Err(no_region()),
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
        Ok(self.board.memory.map(address, size, offset, file, false)?)
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        if flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            self.board.memory.unmap_all();
            return Ok(());
        }
        Ok(self.board.memory.unmap(address, size)?)
    }

    /// Everything but the memory that the client has mapped, which it does not map again.
    fn reset(&mut self) -> io::Result<()> {
        self.device.reset();
        self.config = config_space(self.board.interrupts.count());
        self.board.interrupts.clear();
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        self.board.interrupts.set(index, flags, start, count, fds)
    }
}
