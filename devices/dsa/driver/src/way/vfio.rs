//! VFIO: the whole device, which Linux has given to this process (`vfio-pci`), behind an IOMMU.
//!
//! The device reaches what [`WorkQueue::map`] gives it and nothing else: the store's segments, read only, and buffers of the
//! driver's own. What it is given is pinned for as long; memory of a guest is never given to it, since a page that is
//! replaced would stay the device's under the old one's content.
//!
//! Interrupts come by eventfd: vector 0 tells of errors and halts, vector 1 of batches that somebody sleeps for.
#![allow(unsafe_code)] // maps the portal, writes to it, and gives memory to the device by address

use super::queue::{QueueLimits, Trouble, WorkQueue};
use super::registers::{Registers, SetupError, Wanted, bring_up, general_status, reset, take_software_error};
use crate::instructions::{Instructions, wait_for_line};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vfio_bindings::bindings::vfio as sys;
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioOps};
use vmm_dedup_dsa_abi::config::Mode;
use vmm_dedup_dsa_abi::portal::{Kind, PLACE, PORTAL_BYTES, offset};
use vmm_dedup_dsa_abi::registers::{self as reg, DeviceState, VENDOR};
use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_sys_util::eventfd::EventFd;

/// Regions of a PCI device under VFIO.
const BAR0: u32 = sys::VFIO_PCI_BAR0_REGION_INDEX;
const BAR2: u32 = sys::VFIO_PCI_BAR2_REGION_INDEX;
const CONFIG: u32 = sys::VFIO_PCI_CONFIG_REGION_INDEX;
/// PCI's command register, and its bits for memory accesses to the device and by it.
const PCI_COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 6;
/// Vectors: the device's own, and that of the queue.
const VECTORS: usize = 2;
const QUEUE_VECTOR: u16 = 1;

/// Why a device cannot be used through VFIO.
#[derive(Debug, thiserror::Error)]
pub enum VfioFailure {
    /// It is not a PCI device's folder.
    #[error("{0} is not a PCI device: name one such as /sys/bus/pci/devices/0000:6a:01.0")]
    Name(PathBuf),
    /// Another kind of device.
    #[error("{path} is no DSA: vendor {vendor:#06x}, device {device:#06x}")]
    Other {
        /// What was named.
        path: PathBuf,
        /// PCI's number of the vendor.
        vendor: u16,
        /// PCI's number of the device.
        device: u16,
    },
    /// Another driver has it.
    #[error("{path} belongs to {driver}: unbind it, and bind it to vfio-pci (driverctl, or driver_override)")]
    Driver {
        /// What was named.
        path: PathBuf,
        /// Its driver, or "no driver".
        driver: String,
    },
    /// The kernel does not give it away.
    #[error(
        "{path} cannot be opened: {source}; is the IOMMU on, may this user open /dev/vfio/N, has nobody else the group?"
    )]
    Open {
        /// What was named.
        path: PathBuf,
        /// Why not.
        source: VfioError,
    },
    /// Its portals cannot be mapped.
    #[error("the portals of {path} cannot be mapped")]
    Portal {
        /// What was named.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The CPU cannot submit.
    #[error("this CPU has no MOVDIR64B, which a dedicated queue needs")]
    Instruction,
    /// Interrupts cannot be had.
    #[error("interrupts of {path}: {source}")]
    Interrupts {
        /// What was named.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The device refuses.
    #[error("{path}: {source}")]
    Setup {
        /// What was named.
        path: PathBuf,
        /// Why.
        source: SetupError,
    },
}

/// A device of this process's own, with one dedicated queue.
pub struct Vfio {
    name: String,
    limits: QueueLimits,
    portal: Portal,
    /// Vectors 0 and 1.
    events: [EventFd; VECTORS],
    bars: Bars,
    /// Closed after the device, which is when the kernel forgets what the device was given.
    container: Arc<VfioContainer>,
    /// What the device was given.
    given: Vec<(DeviceAddress, Mapping)>,
}

/// The device's registers.
struct Bars(VfioDevice);

impl Registers for Bars {
    fn read(&mut self, offset: u64) -> u64 {
        // What cannot be read reads as all ones, as from a device that is gone.
        let mut bytes = [0xff; 8];
        self.0.region_read(BAR0, &mut bytes, offset);
        u64::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.0.region_write(BAR0, &value.to_le_bytes(), offset);
    }
}

/// The page to which descriptors are written.
struct Portal {
    base: NonNull<u8>,
    place: usize,
}

// SAFETY: the portal is memory of a device, mapped for this value alone, and written through &mut only.
unsafe impl Send for Portal {}

impl Portal {
    fn map(device: &VfioDevice) -> io::Result<Self> {
        let at = device.get_region_offset(BAR2) + offset(0, Kind::Unlimited);
        if device.get_region_flags(BAR2) & sys::VFIO_REGION_INFO_FLAG_MMAP == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: the descriptor is the device's, open for as long as `device` lives.
        let file = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), PORTAL_BYTES, prot, flags, file, at)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let portal = Self { base, place: 0 };
        portal.touch();
        Ok(portal)
    }

    /// Has the kernel map the page now, which it does at the first access, and again after a reset of the function. So no
    /// submission waits for that, and an emulator of MOVDIR64B, which may not be able to raise a page fault, need not.
    fn touch(&self) {
        // SAFETY: the first word of the mapping, which lives as long as this value. The device answers such a read with some
        // number, and does nothing else.
        let _ = unsafe { self.base.as_ptr().cast::<u32>().read_volatile() };
    }
}

impl Drop for Portal {
    fn drop(&mut self) {
        // SAFETY: exactly what map() has mapped; nobody else knows the address.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), PORTAL_BYTES) };
    }
}

impl Vfio {
    /// Takes over a device by its folder, such as `/sys/bus/pci/devices/0000:6a:01.0`, which is bound to `vfio-pci`: resets
    /// it and configures one dedicated queue.
    ///
    /// # Errors
    /// [`VfioFailure`].
    pub fn open(path: &Path) -> Result<Self, VfioFailure> {
        let name = describe(path)?;
        if !Instructions::of_this_cpu().movdir64b {
            return Err(VfioFailure::Instruction);
        }
        let path = || path.to_owned();
        let opened = VfioContainer::new(None).and_then(|container| {
            let container = Arc::new(container);
            let ops: Arc<dyn VfioOps> = container.clone();
            let device = VfioDevice::new(&path(), ops, false)?;
            Ok((container, device))
        });
        let (container, device) = opened.map_err(|source| VfioFailure::Open { path: path(), source })?;
        device.reset();
        master_the_bus(&device);
        let portal = Portal::map(&device).map_err(|source| VfioFailure::Portal { path: path(), source })?;
        let failed = |source: io::Error| VfioFailure::Interrupts { path: path(), source };
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(failed);
        let events = [event()?, event()?];
        let enabled = device.enable_msix(events.iter().collect());
        enabled.map_err(|error| failed(io::Error::other(error)))?;
        let mut bars = Bars(device);
        let mut limits =
            configure(&mut bars).map_err(|source| VfioFailure::Setup { path: path(), source })?;
        limits.node = std::fs::read_to_string(path().join("numa_node"))
            .ok()
            .and_then(|node| node.trim().parse().ok());
        Ok(Self {
            name,
            limits,
            portal,
            events,
            bars,
            container,
            given: Vec::new(),
        })
    }

    /// Pins memory for the device.
    fn give(&self, at: DeviceAddress, mapping: &Mapping, writable: bool) -> io::Result<()> {
        let write = if writable { sys::VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
        let request = sys::vfio_iommu_type1_dma_map {
            argsz: argument_size::<sys::vfio_iommu_type1_dma_map>(),
            flags: sys::VFIO_DMA_MAP_FLAG_READ | write,
            vaddr: mapping.address() as u64,
            iova: at.0,
            size: mapping.len() as u64,
        };
        // vfio-ioctls' own call always lets the device write, which the kernel refuses for a segment of the store.
        // SAFETY: VFIO_IOMMU_MAP_DMA reads the request. The memory is a mapping of ours that stays until it was taken back,
        // and is only seen through atomics and copies.
        let result =
            unsafe { libc::ioctl(self.container.as_raw_fd(), VFIO_IOMMU_MAP_DMA, &raw const request) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// `_IO(VFIO_TYPE, VFIO_BASE + 13)` (Linux, include/uapi/linux/vfio.h).
const VFIO_IOMMU_MAP_DMA: libc::Ioctl = ((sys::VFIO_TYPE as u32) << 8 | (sys::VFIO_BASE + 13)) as libc::Ioctl;

#[allow(clippy::cast_possible_truncation)] // some ten bytes
const fn argument_size<T>() -> u32 {
    size_of::<T>() as u32
}

/// VFIO leaves bus mastering off.
fn master_the_bus(device: &VfioDevice) {
    let mut command = [0; 2];
    device.region_read(CONFIG, &mut command, PCI_COMMAND);
    let command = u16::from_le_bytes(command) | MEMORY_AND_MASTER;
    device.region_write(CONFIG, &command.to_le_bytes(), PCI_COMMAND);
}

/// One dedicated queue; errors and halts are interrupts.
fn configure(bars: &mut Bars) -> Result<QueueLimits, SetupError> {
    let wanted = Wanted {
        mode: Mode::Dedicated,
        ..Wanted::default()
    };
    let limits = bring_up(bars, wanted)?;
    bars.write(reg::GENCTRL, reg::GENCTRL_SOFTWARE_ERROR | reg::GENCTRL_HALT);
    Ok(limits)
}

/// A name for messages, if it is a DSA that belongs to VFIO.
fn describe(path: &Path) -> Result<String, VfioFailure> {
    let wrong = || VfioFailure::Name(path.to_owned());
    let number = |name: &str| {
        let text = std::fs::read_to_string(path.join(name)).map_err(|_| wrong())?;
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).map_err(|_| wrong())
    };
    let (vendor, device) = (number("vendor")?, number("device")?);
    let known = [reg::DEVICE_SPR, reg::DEVICE_GNR, reg::DEVICE_DMR];
    if vendor != VENDOR || !known.contains(&device) {
        let path = path.to_owned();
        return Err(VfioFailure::Other { path, vendor, device });
    }
    let driver = std::fs::read_link(path.join("driver")).ok();
    let driver = driver.as_deref().and_then(Path::file_name);
    let driver = driver.map_or("no driver".into(), |name| name.to_string_lossy().into_owned());
    if driver != "vfio-pci" {
        let path = path.to_owned();
        return Err(VfioFailure::Driver { path, driver });
    }
    let name = path.file_name().ok_or_else(wrong)?;
    Ok(name.to_string_lossy().into_owned())
}

impl WorkQueue for Vfio {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> QueueLimits {
        self.limits
    }

    fn uses_process_addresses(&self) -> bool {
        false
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble> {
        let Portal { base, place } = &mut self.portal;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the place is within the mapping, which lives as long as this value, and aligned to 64 bytes, as a
        // descriptor is. The CPU was seen to have the instruction when the device was opened.
        unsafe {
            crate::instructions::movdir64b(base.as_ptr().add(*place), descriptor);
        }
        *place = (*place + PLACE) % PORTAL_BYTES;
        Ok(true)
    }

    fn relax(&mut self, status: &AtomicU64) {
        wait_for_line(status, || status.load(Ordering::Acquire) & 0xff != 0);
    }

    fn vector(&self) -> Option<u16> {
        Some(QUEUE_VECTOR)
    }

    fn nap(&mut self, most: Duration) {
        let event = &self.events[usize::from(QUEUE_VECTOR)];
        let mut poll = libc::pollfd {
            fd: event.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(most.as_secs()).unwrap_or(1),
            tv_nsec: most.subsec_nanos().into(),
        };
        // SAFETY: ppoll reads one entry and a time, and writes the entry.
        unsafe { libc::ppoll(&raw mut poll, 1, &raw const time, std::ptr::null()) };
        // It does not block; what woke the thread is not counted.
        let _ = event.read();
    }

    fn trouble(&mut self) -> Option<Trouble> {
        let _ = self.events[0].read();
        if self.bars.read(reg::GENCAP) == u64::MAX {
            return Some(Trouble::Gone("the device does not answer any more".to_owned()));
        }
        let status = general_status(&mut self.bars);
        match status.state() {
            DeviceState::Halted => return Some(Trouble::Halted(status.reset())),
            DeviceState::Disabled | DeviceState::Draining => {
                return Some(Trouble::Gone("the device is disabled".to_owned()));
            }
            DeviceState::Enabled => {}
        }
        take_software_error(&mut self.bars).map(|details| Trouble::Software {
            error: details.error,
            address: details.fault_address,
        })
    }

    fn abort(&mut self) -> bool {
        super::registers::abort(&mut self.bars).is_ok()
    }

    /// By a command; where that does not help, by the PCI function.
    fn reset(&mut self) -> Result<(), Trouble> {
        if configure(&mut self.bars).is_ok() {
            return Ok(());
        }
        self.bars.0.reset();
        master_the_bus(&self.bars.0);
        self.portal.touch();
        let configured = configure(&mut self.bars);
        configured
            .map(drop)
            .map_err(|error| Trouble::Gone(error.to_string()))
    }

    fn map(
        &mut self,
        at: DeviceAddress,
        bytes: usize,
        file: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<(), Trouble> {
        let mapped = if writable {
            Mapping::read_write(file, bytes)
        } else {
            Mapping::read_only(file, bytes)
        };
        let name = &self.name;
        let failed = |error: io::Error| {
            Trouble::Gone(format!(
                "{name} cannot be given {bytes} bytes: {error}; what it is given is pinned: raise RLIMIT_MEMLOCK"
            ))
        };
        let mapping = mapped.map_err(failed)?;
        self.give(at, &mapping, writable).map_err(failed)?;
        self.given.push((at, mapping));
        Ok(())
    }

    fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble> {
        let taken = self.container.vfio_dma_unmap(at.0, bytes);
        // The mapping goes only when the device has lost it.
        taken.map_err(|error| Trouble::Gone(format!("{} keeps what it was given: {error}", self.name)))?;
        self.given
            .retain(|(given, mapping)| *given != at || mapping.len() != bytes);
        Ok(())
    }
}

impl Drop for Vfio {
    fn drop(&mut self) {
        // Nothing is in flight after a reset; where none helps, the kernel resets the function when the device is closed,
        // before it lets go of the memory.
        if reset(&mut self.bars).is_err() {
            self.bars.0.reset();
        }
        // Errors mean that there were no interrupts.
        let _ = self.bars.0.disable_msix();
    }
}

impl std::fmt::Debug for Vfio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vfio")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn folder(vendor: &str, device: &str, driver: Option<&str>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("vendor"), vendor).unwrap();
        fs::write(folder.path().join("device"), device).unwrap();
        if let Some(driver) = driver {
            symlink(
                format!("../../../bus/pci/drivers/{driver}"),
                folder.path().join("driver"),
            )
            .unwrap();
        }
        folder
    }

    #[test]
    fn only_a_dsa_that_belongs_to_vfio_is_opened() {
        for (folder, text) in [
            (
                folder("0x8086\n", "0x0b25\n", Some("idxd")),
                "belongs to idxd: unbind it",
            ),
            (folder("0x8086\n", "0x11fb\n", None), "belongs to no driver"),
            (
                folder("0x1af4\n", "0x1050\n", Some("vfio-pci")),
                "is no DSA: vendor 0x1af4, device 0x1050",
            ),
            (folder("nonsense", "", None), "is not a PCI device"),
        ] {
            let error = Vfio::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        let error = Vfio::open(Path::new("/sys/bus/pci/devices/0000:ff:1f.7")).unwrap_err();
        assert!(error.to_string().contains("is not a PCI device"), "{error}");
    }

    #[test]
    fn a_device_that_the_kernel_does_not_give_away_says_what_to_look_at() {
        let folder = folder("0x8086\n", "0x0b25\n", Some("vfio-pci"));
        let error = Vfio::open(folder.path()).unwrap_err().to_string();
        let expected = if Instructions::of_this_cpu().movdir64b {
            "is the IOMMU on"
        } else {
            "no MOVDIR64B"
        };
        assert!(error.contains(expected), "{error}");
    }
}
