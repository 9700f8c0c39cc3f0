//! How a guest is entered by PVH: an ELF image with such a note, a start info structure in its memory, and a vCPU in 32-bit mode.
//! Source: the PVH boot ABI, as Xen has it (start_info.h).

use crate::vm::Failure;
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_start_info};
use linux_loader::loader::{Elf, KernelLoader};
use std::fs::File;
use std::path::Path;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

const START_INFO: GuestAddress = GuestAddress(0x6000);
const MEMORY_MAP: GuestAddress = GuestAddress(0x6080);
const COMMAND_LINE: GuestAddress = GuestAddress(0x2_0000);
/// Below is what this module writes, and what a firmware would have; above is the guest's.
const HIGH_RAM: GuestAddress = GuestAddress(0x10_0000);

const MAGIC: u32 = 0x336e_c578;
const RAM: u32 = 1;

/// Puts a kernel and what it is told into memory; where it is entered.
pub(crate) fn load(
    memory: &GuestMemoryMmap<()>,
    kernel: &Path,
    command_line: &str,
) -> Result<GuestAddress, Failure> {
    let loaded = Elf::load(memory, None, &mut File::open(kernel)?, Some(HIGH_RAM))?;
    let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
        return Err("the kernel has no PVH entry".into());
    };
    memory.write_slice(&[command_line.as_bytes(), &[0]].concat(), COMMAND_LINE)?;
    let mut entries = 0;
    for region in memory.iter() {
        let start = region.start_addr().max(HIGH_RAM);
        let ram = hvm_memmap_table_entry {
            addr: start.raw_value(),
            size: region.last_addr().unchecked_offset_from(start) + 1,
            type_: RAM,
            reserved: 0,
        };
        let place = MEMORY_MAP.unchecked_add(entries * size_of_val(&ram) as u64);
        memory.write_obj(ram, place)?;
        entries += 1;
    }
    let info = hvm_start_info {
        magic: MAGIC,
        version: 1,
        cmdline_paddr: COMMAND_LINE.raw_value(),
        memmap_paddr: MEMORY_MAP.raw_value(),
        memmap_entries: u32::try_from(entries)?,
        ..Default::default()
    };
    memory.write_obj(info, START_INFO)?;
    Ok(entry)
}

/// Has a vCPU enter there: protected mode, flat segments, no paging.
pub(crate) fn enter(vcpu: &VcpuFd, entry: GuestAddress) -> Result<(), Failure> {
    let mut sregs = vcpu.get_sregs()?;
    let flat = |selector, type_| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(0x08, 0xb);
    let data = flat(0x10, 0x3);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        limit: 0x67,
        selector: 0x18,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.cr0 = 1;
    vcpu.set_sregs(&sregs)?;
    let regs = kvm_regs {
        rip: entry.raw_value(),
        rbx: START_INFO.raw_value(),
        // The bit that is always set.
        rflags: 2,
        ..Default::default()
    };
    Ok(vcpu.set_regs(&regs)?)
}
