//! Guest RAM: mapped as Cloud Hypervisor maps it by default, so that what works here works there.
#![allow(unsafe_code)] // madvise and KVM's memory slots take raw addresses.

use std::io;
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::mmap::GuestRegionMmap;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::config::ThpMode;
use crate::error::Error;
use crate::layout::{HIGH_RAM, HOLE_END, HOLE_START, LOW_RAM_END};

/// Guest RAM. Cheap to clone: the clones refer to the same mappings, which live as long as any of them.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

const MIB: u64 = 1 << 20;

/// Maps `mib` MiB: private, anonymous, not reserved.
pub(crate) fn map(mib: u64, thp: ThpMode) -> Result<GuestMemory, Error> {
    let ranges: Vec<_> = ranges(mib)
        .into_iter()
        .map(|(start, size)| usize::try_from(size).map(|size| (GuestAddress(start), size)))
        .collect::<Result<_, _>>()
        .map_err(|_| Error::MemorySize { mib })?;
    let memory = GuestMemory::from_ranges(&ranges).map_err(|source| Error::MapMemory { mib, source })?;
    let advice = match thp {
        ThpMode::Default => None,
        ThpMode::Always => Some(libc::MADV_HUGEPAGE),
        ThpMode::Never => Some(libc::MADV_NOHUGEPAGE),
    };
    if let Some(advice) = advice {
        memory
            .iter()
            .try_for_each(|region| advise(region, advice))
            .map_err(Error::HugePages)?;
    }
    Ok(memory)
}

/// Start and size of each region: up to 3 GiB from 0, the rest from 4 GiB.
fn ranges(mib: u64) -> Vec<(u64, u64)> {
    let bytes = mib * MIB;
    if bytes <= HOLE_START {
        vec![(0, bytes)]
    } else {
        vec![(0, HOLE_START), (HOLE_END, bytes - HOLE_START)]
    }
}

fn advise(region: &GuestRegionMmap<()>, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the range is the mapping that `region` keeps alive; this advice does not change its content.
    let result = unsafe { libc::madvise(region.as_ptr().cast(), region.size(), advice) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Maps `mib` MiB more, as [`map`] does, behind what there is and not below 4 GiB, and gives it to the VM; returns all memory.
pub(crate) fn plug(
    vm: &VmFd,
    memory: &GuestMemory,
    mib: u64,
) -> Result<(GuestMemory, Arc<GuestRegionMmap<()>>), Error> {
    let no_room = || Error::MemorySize { mib };
    let last = memory.last_addr().raw_value();
    let start = GuestAddress((last + 1).next_multiple_of(MIB).max(HOLE_END));
    let len = usize::try_from(mib * MIB).map_err(|_| no_room())?;
    let region =
        GuestRegionMmap::from_range(start, len, None).map_err(|source| Error::MapMemory { mib, source })?;
    let region = Arc::new(region);
    let all = memory.insert_region(region.clone()).map_err(|_| no_room())?;
    let slot = u32::try_from(memory.num_regions()).map_err(|_| no_room())?;
    set_slot(vm, slot, &region)?;
    Ok((all, region))
}

/// Gives the memory to a VM, one slot a region.
pub(crate) fn register(vm: &VmFd, memory: &GuestMemory) -> Result<(), Error> {
    (0..)
        .zip(memory.iter())
        .try_for_each(|(slot, region)| set_slot(vm, slot, region))
}

fn set_slot(vm: &VmFd, slot: u32, region: &GuestRegionMmap<()>) -> Result<(), Error> {
    let region = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: region.start_addr().raw_value(),
        memory_size: region.len(),
        userspace_addr: region.as_ptr() as u64,
    };
    // SAFETY: the regions do not overlap (vm-memory checks that) and are mapped with the stated sizes. The VM
    // is used by vCPU threads only, which hold a clone of `memory`, so the mappings outlive its use.
    unsafe { vm.set_user_memory_region(region) }.map_err(Error::kvm("add a memory slot"))
}

/// First address behind the RAM at low addresses.
pub(crate) fn low_end(memory: &GuestMemory) -> u64 {
    memory.iter().next().map_or(0, GuestMemoryRegion::len)
}

/// A range of the guest's memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapEntry {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) ram: bool,
}

/// The memory map that the guest is told.
pub(crate) fn guest_map(memory: &GuestMemory) -> Vec<MapEntry> {
    let entry = |start: u64, end: u64, ram| MapEntry {
        start,
        size: end - start,
        ram,
    };
    let mut map = vec![
        entry(0, LOW_RAM_END.raw_value(), true),
        entry(LOW_RAM_END.raw_value(), HIGH_RAM.raw_value(), false),
        entry(HIGH_RAM.raw_value(), low_end(memory), true),
    ];
    map.extend(memory.iter().skip(1).map(|region| {
        let start = region.start_addr().raw_value();
        entry(start, start + region.len(), true)
    }));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_up_to_3_gib_is_one_region() {
        assert_eq!(ranges(256), [(0, 256 * MIB)]);
        assert_eq!(ranges(3072), [(0, 3072 * MIB)]);
    }

    #[test]
    fn memory_above_3_gib_continues_at_4_gib() {
        assert_eq!(ranges(5000), [(0, 3072 * MIB), (4096 * MIB, 1928 * MIB)]);
    }

    #[test]
    fn guest_map_leaves_out_the_firmware_area_and_the_hole() {
        let memory = map(3073, ThpMode::Never).expect("reserving address space works");

        let map = guest_map(&memory);

        let ram: u64 = map.iter().filter(|entry| entry.ram).map(|entry| entry.size).sum();
        assert_eq!(ram, 3073 * MIB - (0x10_0000 - 0x9_fc00));
        assert_eq!(
            map[3],
            MapEntry {
                start: 4096 * MIB,
                size: MIB,
                ram: true
            }
        );
        assert!(!map[1].ram);
    }
}
