//! The RAM: what the PVH start info says there is, minus what is in use, handed out in whole pages.

use core::ptr::{addr_of, addr_of_mut};
use core::slice;

/// Bytes in a page.
pub const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
/// What boot.s mapped.
const MAPPED: u64 = 4 * GIB;
/// Directories for memory above that: up to 64 GiB of addresses.
const EXTRA_DIRECTORIES: usize = 60;

const MAX_EXTENTS: usize = 16;
const COMMAND_LINE: usize = 2048;
const RAM: u32 = 1;

#[repr(C)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
    rsdp: u64,
    memory_map: u64,
    memory_map_entries: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Module {
    address: u64,
    size: u64,
    command_line: u64,
    reserved: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MapEntry {
    address: u64,
    size: u64,
    kind: u32,
    reserved: u32,
}

#[repr(C, align(4096))]
struct Directory([u64; 512]);

unsafe extern "C" {
    static start_info_address: u64;
    static image_end: u8;
    static mut page_map: [u64; 1024];
}

static mut EXTRA: [Directory; EXTRA_DIRECTORIES] = [const { Directory([0; 512]) }; EXTRA_DIRECTORIES];
static mut LINE: [u8; COMMAND_LINE] = [0; COMMAND_LINE];

/// A range of free RAM, page-aligned.
#[derive(Clone, Copy)]
pub struct Extent {
    /// First byte.
    pub start: u64,
    /// First byte behind it.
    pub end: u64,
}

/// There is not that much free RAM (in one piece, where one piece is needed).
pub struct OutOfMemory {
    /// Bytes.
    pub wanted: u64,
}

/// The RAM of the guest.
pub struct Memory {
    free: [Extent; MAX_EXTENTS],
    count: usize,
    initrd: &'static [u8],
    line: &'static str,
}

impl Memory {
    /// Reads the start info; call it once, and first.
    pub fn from_start_info() -> Memory {
        // SAFETY: boot.s stored the address that the VMM passed; the PVH ABI says what is there, and nothing has
        // been handed out yet that could overlay it. LINE is only written here.
        unsafe {
            let info = &*(start_info_address as *const StartInfo);
            let line = copy_command_line(info.command_line);
            let mut initrd: &[u8] = &[];
            if info.modules > 0 {
                let module = *(info.module_list as *const Module);
                initrd = slice::from_raw_parts(module.address as *const u8, module.size as usize);
            }
            let mut memory = Memory {
                free: [Extent { start: 0, end: 0 }; MAX_EXTENTS],
                count: 0,
                initrd,
                line,
            };
            let map = info.memory_map as *const MapEntry;
            for number in 0..info.memory_map_entries as usize {
                let entry = *map.add(number);
                if entry.kind == RAM {
                    memory.add(entry.address, entry.address + entry.size);
                }
            }
            memory
        }
    }

    /// The kernel command line.
    pub fn command_line(&self) -> &'static str {
        self.line
    }

    /// The first module.
    pub fn initrd(&self) -> &'static [u8] {
        self.initrd
    }

    /// What can still be handed out.
    pub fn free_bytes(&self) -> u64 {
        self.free[..self.count]
            .iter()
            .map(|extent| extent.end - extent.start)
            .sum()
    }

    /// Adds RAM, without the image below it and the initrd in it.
    fn add(&mut self, start: u64, end: u64) {
        let image = addr_of!(image_end) as u64;
        let start = start.max(image).next_multiple_of(PAGE);
        let end = end / PAGE * PAGE;
        map_above_4g(end);
        let initrd = self.initrd.as_ptr() as u64;
        let initrd_end = (initrd + self.initrd.len() as u64).next_multiple_of(PAGE);
        if self.initrd.is_empty() || initrd >= end || initrd_end <= start {
            self.push(start, end);
        } else {
            self.push(start, initrd / PAGE * PAGE);
            self.push(initrd_end, end);
        }
    }

    fn push(&mut self, start: u64, end: u64) {
        if start < end && self.count < MAX_EXTENTS {
            self.free[self.count] = Extent { start, end };
            self.count += 1;
        }
    }

    /// Zeroed memory in one piece for the guest's own use.
    pub fn take_words(&mut self, words: u64) -> Result<&'static mut [u64], OutOfMemory> {
        let bytes = (words * 8).next_multiple_of(PAGE);
        let extent = self.free[..self.count]
            .iter_mut()
            .find(|extent| extent.end - extent.start >= bytes);
        let extent = extent.ok_or(OutOfMemory { wanted: bytes })?;
        // From the end, so that the data pages begin at round addresses.
        extent.end -= bytes;
        // SAFETY: the range is RAM, mapped, in use by nothing else from now on, and aligned to pages.
        unsafe {
            let start = extent.end as *mut u64;
            start.write_bytes(0, words as usize);
            Ok(slice::from_raw_parts_mut(start, words as usize))
        }
    }

    /// Up to `pages` pages in one piece, starting at a multiple of 2 MiB where the piece is large enough.
    pub fn take_pages(&mut self, pages: u64) -> Option<Extent> {
        let extent = self.free[..self.count]
            .iter_mut()
            .find(|extent| extent.start < extent.end)?;
        let aligned = extent.start.next_multiple_of(HUGE);
        let start = if aligned + HUGE <= extent.end {
            aligned
        } else {
            extent.start
        };
        let end = extent.end.min(start + pages * PAGE);
        extent.start = end;
        Some(Extent { start, end })
    }
}

/// Copies the command line to where nothing overwrites it.
///
/// # Safety
/// `address` is 0 or that of a string that ends in a zero byte; called once.
unsafe fn copy_command_line(address: u64) -> &'static str {
    if address == 0 {
        return "";
    }
    // SAFETY: the caller's contract; LINE has no other user before this returns.
    let line = unsafe {
        let line = &mut *addr_of_mut!(LINE);
        let mut used = 0;
        while used < line.len() {
            let byte = (address as *const u8).add(used).read();
            if byte == 0 {
                break;
            }
            line[used] = byte;
            used += 1;
        }
        &line[..used]
    };
    core::str::from_utf8(line).unwrap_or("not-utf8")
}

/// Extends the identity map up to `end`.
fn map_above_4g(end: u64) {
    let mut address = MAPPED;
    while address < end {
        let number = ((address - MAPPED) / GIB) as usize;
        if number >= EXTRA_DIRECTORIES {
            crate::fail("memory", "above-64-gib");
        }
        // SAFETY: one thread, and nobody else refers to these tables; entries go from absent to present, which
        // needs no flush. The pointer table follows the map's first page.
        unsafe {
            let directory = addr_of_mut!(EXTRA[number].0);
            if (*directory)[0] == 0 {
                for (entry, value) in (*directory).iter_mut().enumerate() {
                    *value = (address + entry as u64 * HUGE) | 0x87;
                }
                let pointer = 512 + (address / GIB) as usize;
                (*addr_of_mut!(page_map))[pointer] = directory as u64 | 7;
            }
        }
        address += GIB;
    }
}
