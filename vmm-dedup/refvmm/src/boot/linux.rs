//! The 64-bit Linux boot protocol: the zero page, and page tables that map the first 4 GiB.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Address, Bytes, GuestAddress};

use super::entry::Range;
use crate::error::Error;
use crate::layout;
use crate::memory::{self, GuestMemory};

const LOADER_UNDEFINED: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
const MAGIC: u32 = 0x5372_6448;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

const TABLE: u64 = 4096;
const DIRECTORIES: u64 = 4;
const HUGE: u64 = 2 << 20;
const PRESENT_WRITABLE: u64 = 3;
const PRESENT_WRITABLE_HUGE: u64 = 0x83;

pub(super) fn write(
    memory: &GuestMemory,
    setup: Option<setup_header>,
    cmdline: &str,
    initrd: Option<Range>,
) -> Result<(), Error> {
    let zero_page = zero_page(memory, setup, cmdline, initrd)?;
    memory
        .write_obj(zero_page, layout::ZERO_PAGE)
        .map_err(Error::WriteMemory)?;
    write_page_tables(memory)
}

fn zero_page(
    memory: &GuestMemory,
    setup: Option<setup_header>,
    cmdline: &str,
    initrd: Option<Range>,
) -> Result<boot_params, Error> {
    // All addresses are below the hole, which begins at 3 GiB, and the command line is short.
    let low = |value: u64| u32::try_from(value).map_err(|_| Error::CommandLine { bytes: cmdline.len() });
    let mut params = boot_params {
        hdr: setup.unwrap_or(setup_header {
            boot_flag: BOOT_FLAG,
            header: MAGIC,
            kernel_alignment: KERNEL_ALIGNMENT,
            ..Default::default()
        }),
        acpi_rsdp_addr: layout::ACPI.raw_value(),
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = low(layout::CMDLINE.raw_value())?;
    params.hdr.cmdline_size = low(cmdline.len() as u64)?;
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = low(initrd.start)?;
        params.hdr.ramdisk_size = low(initrd.size)?;
    }
    for (entry, range) in params.e820_table.iter_mut().zip(memory::guest_map(memory)) {
        let r#type = if range.ram { E820_RAM } else { E820_RESERVED };
        *entry = boot_e820_entry {
            addr: range.start,
            size: range.size,
            r#type,
        };
        params.e820_entries += 1;
    }
    Ok(params)
}

fn write_page_tables(memory: &GuestMemory) -> Result<(), Error> {
    let root = layout::PAGE_TABLES.raw_value();
    let (pointers, directories) = (root + TABLE, root + 2 * TABLE);
    let put = |address: u64, value: u64| {
        memory
            .write_obj(value, GuestAddress(address))
            .map_err(Error::WriteMemory)
    };
    put(root, pointers | PRESENT_WRITABLE)?;
    for number in 0..DIRECTORIES {
        put(
            pointers + number * 8,
            (directories + number * TABLE) | PRESENT_WRITABLE,
        )?;
    }
    for number in 0..DIRECTORIES * 512 {
        put(directories + number * 8, (number * HUGE) | PRESENT_WRITABLE_HUGE)?;
    }
    Ok(())
}
