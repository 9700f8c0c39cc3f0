//! The PVH start info: what a guest entered by its Xen note finds at rbx.

use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::{Address, Bytes, GuestAddress};

use super::entry::Range;
use crate::error::Error;
use crate::layout;
use crate::memory::{self, GuestMemory};

const MAGIC: u32 = 0x336e_c578;
const VERSION: u32 = 1;
const RAM: u32 = 1;
const RESERVED: u32 = 2;

pub(super) fn write(memory: &GuestMemory, initrd: Option<Range>) -> Result<(), Error> {
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        cmdline_paddr: layout::CMDLINE.raw_value(),
        rsdp_paddr: layout::ACPI.raw_value(),
        memmap_paddr: layout::PVH_MEMORY_MAP.raw_value(),
        ..Default::default()
    };
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.size,
            ..Default::default()
        };
        memory
            .write_obj(module, layout::PVH_MODULES)
            .map_err(Error::WriteMemory)?;
        info.modlist_paddr = layout::PVH_MODULES.raw_value();
        info.nr_modules = 1;
    }
    let mut place = layout::PVH_MEMORY_MAP.raw_value();
    for range in memory::guest_map(memory) {
        let type_ = if range.ram { RAM } else { RESERVED };
        let entry = hvm_memmap_table_entry {
            addr: range.start,
            size: range.size,
            type_,
            reserved: 0,
        };
        memory
            .write_obj(entry, GuestAddress(place))
            .map_err(Error::WriteMemory)?;
        place += size_of::<hvm_memmap_table_entry>() as u64;
        info.memmap_entries += 1;
    }
    memory
        .write_obj(info, layout::PVH_INFO)
        .map_err(Error::WriteMemory)
}
