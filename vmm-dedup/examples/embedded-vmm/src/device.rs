//! A device that pins guest memory for good, as passthrough does: io_uring's registered buffers. And memory of a device in
//! another process.
#![allow(unsafe_code)] // raw guest memory

use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use vm_memory::mmap::GuestRegionMmap;
use vm_memory::{FileOffset, GuestAddress};

/// Memory that another process may map as well, far above all other.
pub(crate) fn shared_memory(mib: usize) -> Result<Arc<GuestRegionMmap<()>>, Box<dyn std::error::Error>> {
    let file = File::from(rustix::fs::memfd_create(
        "shared",
        rustix::fs::MemfdFlags::CLOEXEC,
    )?);
    file.set_len((mib << 20) as u64)?;
    let place = (GuestAddress(1 << 40), mib << 20);
    let region = GuestRegionMmap::from_range(place.0, place.1, Some(FileOffset::new(file, 0)))?;
    Ok(Arc::new(region))
}

/// Bytes of one DMA.
const PIECE: u32 = 4096;

/// Pins memory for as long as it lives.
pub(crate) struct Device {
    ring: IoUring,
    memory: Range<usize>,
}

impl Device {
    /// Pins a range of guest memory.
    pub(crate) fn plug(memory: Range<usize>) -> io::Result<Self> {
        let ring = IoUring::new(2)?;
        let buffer = libc::iovec {
            iov_base: memory.start as *mut libc::c_void,
            iov_len: memory.len(),
        };
        // SAFETY: guest memory, which the VM's memory outlives this device by; the device is dropped first.
        unsafe { ring.submitter().register_buffers(&[buffer]) }?;
        Ok(Self { ring, memory })
    }

    /// Writes zeros into all of it by DMA, a number of times.
    pub(crate) fn write(&mut self, times: usize) -> io::Result<()> {
        let zeros = File::open("/dev/zero")?;
        let places = || self.memory.clone().step_by(PIECE as usize);
        for place in (0..times).flat_map(|_| places()).collect::<Vec<usize>>() {
            let read = opcode::ReadFixed::new(types::Fd(zeros.as_raw_fd()), place as *mut u8, PIECE, 0);
            // SAFETY: the descriptor and the registered buffer live until the completion below.
            unsafe { self.ring.submission().push(&read.build()) }.map_err(io::Error::other)?;
            self.ring.submit_and_wait(1)?;
            let result = self.ring.completion().next().map_or(0, |done| done.result());
            if u32::try_from(result) != Ok(PIECE) {
                return Err(io::Error::other(format!("the device wrote {result} bytes")));
            }
        }
        Ok(())
    }
}
