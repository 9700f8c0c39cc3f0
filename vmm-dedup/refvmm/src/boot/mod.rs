//! Kernel, initrd and boot parameters into guest memory.

mod acpi;
mod entry;
mod linux;
mod pvh;

use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use vm_memory::{Address, Bytes, GuestAddress, ReadVolatile};

use crate::config::{Image, VmConfig};
use crate::error::Error;
use crate::image::{self, Kind};
use crate::layout;
use crate::memory::{self, GuestMemory};
use entry::Range;

pub(crate) use entry::Entry;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// `initrd_addr_max` of kernels that say nothing: all memory below the hole.
const NO_LIMIT: u64 = layout::HOLE_START;

struct Kernel {
    entry: Entry,
    setup: Option<setup_header>,
    end: u64,
    initrd_limit: u64,
}

/// Loads everything that `config` names, and writes what the guest is told about it.
pub(crate) fn load(memory: &GuestMemory, config: &VmConfig) -> Result<Entry, Error> {
    let name = config.kernel.to_string();
    let kernel = match &config.kernel {
        Image::Path(path) => {
            let mut file = File::open(path).map_err(|source| Error::KernelRead {
                kernel: name.clone(),
                source,
            })?;
            load_kernel(memory, &mut file, name)?
        }
        Image::Bytes(bytes) => load_kernel(memory, &mut Cursor::new(*bytes), name)?,
    };
    let limit = kernel.initrd_limit.min(memory::low_end(memory));
    let initrd = config
        .initrd
        .as_deref()
        .map(|path| load_initrd(memory, path, kernel.end, limit))
        .transpose()?;
    write_command_line(memory, &config.cmdline)?;
    acpi::write(memory, config.vcpus)?;
    match kernel.entry {
        Entry::Pvh(_) => pvh::write(memory, initrd)?,
        Entry::Linux64(_) => linux::write(memory, kernel.setup, &config.cmdline, initrd)?,
    }
    Ok(kernel.entry)
}

fn load_kernel<F>(memory: &GuestMemory, file: &mut F, name: String) -> Result<Kernel, Error>
where
    F: Read + ReadVolatile + Seek,
{
    let kind = image::classify(file, &name)?;
    let (Kind::Elf { end } | Kind::BzImage { end, .. }) = kind;
    let low_end = memory::low_end(memory);
    if end > low_end {
        let (needed_mib, low_mib) = (end.div_ceil(MIB), low_end / MIB);
        return Err(Error::KernelTooLarge {
            kernel: name,
            needed_mib,
            low_mib,
        });
    }
    let high_ram = Some(layout::HIGH_RAM);
    match kind {
        Kind::Elf { end } => {
            let loaded = Elf::load(memory, None, file, high_ram)
                .map_err(|source| Error::KernelLoad { kernel: name, source })?;
            let entry = match loaded.pvh_boot_cap {
                PvhBootCapability::PvhEntryPresent(address) => Entry::Pvh(address),
                _ => Entry::Linux64(loaded.kernel_load),
            };
            Ok(Kernel {
                entry,
                setup: None,
                end,
                initrd_limit: NO_LIMIT,
            })
        }
        Kind::BzImage { end, initrd_limit } => {
            let loaded = BzImage::load(memory, Some(layout::BZIMAGE), file, high_ram)
                .map_err(|source| Error::KernelLoad { kernel: name, source })?;
            // The 64-bit entry is 512 bytes into the protected-mode code, by the boot protocol.
            let entry = Entry::Linux64(GuestAddress(loaded.kernel_load.raw_value() + 0x200));
            Ok(Kernel {
                entry,
                setup: loaded.setup_header,
                end: end.max(loaded.kernel_end),
                initrd_limit,
            })
        }
    }
}

/// Puts the initrd as high as it may be, on a page of its own.
fn load_initrd(memory: &GuestMemory, path: &Path, floor: u64, limit: u64) -> Result<Range, Error> {
    let initrd = path.display().to_string();
    let failed = |source| Error::InitrdRead {
        initrd: initrd.clone(),
        source,
    };
    let mut file = File::open(path).map_err(failed)?;
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    let room = limit.saturating_sub(floor.next_multiple_of(PAGE)) / PAGE * PAGE;
    if size > room {
        return Err(Error::InitrdTooLarge { initrd, size, room });
    }
    let start = (limit - size) / PAGE * PAGE;
    let length = usize::try_from(size).map_err(|_| Error::InitrdTooLarge {
        initrd: initrd.clone(),
        size,
        room,
    })?;
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut file, length)
        .map_err(|error| failed(std::io::Error::other(error)))?;
    Ok(Range { start, size })
}

fn write_command_line(memory: &GuestMemory, line: &str) -> Result<(), Error> {
    let mut bytes = line.as_bytes().to_vec();
    bytes.push(0);
    memory
        .write_slice(&bytes, layout::CMDLINE)
        .map_err(Error::WriteMemory)
}

#[cfg(test)]
mod tests;
