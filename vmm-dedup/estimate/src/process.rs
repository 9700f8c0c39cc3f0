//! The memory of a live process, by way of /proc/PID/maps, /proc/PID/pagemap and process_vm_readv.
//! Source: Linux, Documentation/admin-guide/mm/pagemap.rst; process_vm_readv(2).
#![allow(unsafe_code)] // process_vm_readv

use crate::error::Error;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::SEGMENT_NAME;

/// Pages are counted in files as well as in processes as u64.
pub(crate) const PAGE: u64 = PAGE_SIZE as u64;
/// Pagemap entries read at a time: those of 128 MiB.
const ENTRIES: u64 = 1 << 15;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// Of a file, or shared anonymous memory.
const FILE: u64 = 1 << 61;
/// Mapped here and nowhere else: neither the zero page, nor merged, nor shared with a child.
const EXCLUSIVE: u64 = 1 << 56;

#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    command: String,
}

/// What of a process's private memory is there that was anonymous, before a store's pages were mapped into it or since.
#[derive(Debug, Default)]
pub(crate) struct Populated {
    /// Addresses of pages of its own.
    pub(crate) ranges: Vec<Range<u64>>,
    /// Pages of its mappings that were never touched, or are swapped out.
    pub(crate) absent: u64,
    /// Pages that others map as well.
    pub(crate) shared: u64,
}

impl Process {
    pub(crate) fn open(pid: u32) -> Result<Self, Error> {
        let command = fs::read_to_string(format!("/proc/{pid}/comm")).map_err(error(pid))?;
        Ok(Self {
            pid,
            command: command.trim().to_owned(),
        })
    }

    /// The program's name.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }

    /// Looks at the page tables; touches no page.
    pub(crate) fn populated(&self) -> Result<Populated, Error> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).map_err(error(self.pid))?;
        let pagemap = File::open(format!("/proc/{}/pagemap", self.pid)).map_err(error(self.pid))?;
        let mut populated = Populated::default();
        for mapping in maps.lines().filter_map(Mapping::read) {
            self.walk(&pagemap, &mapping, &mut populated)?;
        }
        Ok(populated)
    }

    fn walk(&self, pagemap: &File, mapping: &Mapping, populated: &mut Populated) -> Result<(), Error> {
        let mut bytes = Vec::new();
        let Range { start, end } = mapping.addresses;
        let (mut page, end) = (start / PAGE, end / PAGE);
        while page < end {
            let count = ENTRIES.min(end - page);
            bytes.resize(usize::try_from(count * 8).unwrap_or(0), 0);
            let read = pagemap.read_at(&mut bytes, page * 8).map_err(error(self.pid))?;
            if read < 8 {
                return Ok(());
            }
            for entry in bytes[..read].chunks_exact(8) {
                let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
                let at = page * PAGE;
                match (entry & PRESENT != 0, entry & FILE != 0, entry & EXCLUSIVE != 0) {
                    // A store's page that the process has not touched since it was mapped.
                    (false, ..) if mapping.of_store && entry & SWAPPED == 0 => populated.shared += 1,
                    (false, ..) => populated.absent += 1,
                    (true, false, true) => match populated.ranges.last_mut() {
                        Some(last) if last.end == at => last.end += PAGE,
                        _ => populated.ranges.push(at..at + PAGE),
                    },
                    (true, ..) => populated.shared += 1,
                }
                page += 1;
            }
        }
        Ok(())
    }

    /// Reads ranges one after the other. Returns the bytes read: fewer if a page has gone meanwhile.
    pub(crate) fn read(&self, ranges: &[Range<u64>], buffer: &mut [u8]) -> Result<usize, Error> {
        let length = |range: &Range<u64>| usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let total: usize = ranges.iter().map(length).sum();
        let local = libc::iovec {
            iov_base: buffer[..total].as_mut_ptr().cast(),
            iov_len: total,
        };
        let remote: Vec<libc::iovec> = ranges
            .iter()
            .map(|range| libc::iovec {
                iov_base: std::ptr::without_provenance_mut(usize::try_from(range.start).unwrap_or(0)),
                iov_len: length(range),
            })
            .collect();
        // SAFETY: the local vector is one valid, exclusive buffer; the remote ones are addresses of another process,
        // which the kernel checks. Their number is at most the pages of a batch, below IOV_MAX.
        let read = unsafe {
            libc::process_vm_readv(
                self.pid.cast_signed(),
                &raw const local,
                1,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        match usize::try_from(read) {
            Ok(read) => Ok(read),
            Err(_) => match io::Error::last_os_error() {
                // The first page has gone.
                e if e.raw_os_error() == Some(libc::EFAULT) => Ok(0),
                e => Err(error(self.pid)(e)),
            },
        }
    }
}

/// Private memory that is anonymous, or maps a store's pages where it was.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    addresses: Range<u64>,
    of_store: bool,
}

impl Mapping {
    /// A line of /proc/PID/maps; `None` for what is no such memory, or cannot be read.
    fn read(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let permissions = fields.next()?;
        let inode = fields.nth(2)?;
        let name = fields.next().unwrap_or("");
        let of_store = name.strip_prefix("/memfd:") == Some(SEGMENT_NAME);
        let is_anonymous = inode == "0" && !name.starts_with('/') && !name.starts_with("[v");
        let usable = permissions.starts_with('r') && permissions.ends_with('p');
        if !usable || !(of_store || is_anonymous) {
            return None;
        }
        let address = |text| u64::from_str_radix(text, 16).ok();
        Some(Self {
            addresses: address(start)?..address(end)?,
            of_store,
        })
    }
}

fn error(pid: u32) -> impl Fn(io::Error) -> Error {
    move |source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Error::Gone { pid },
        Some(libc::EPERM | libc::EACCES) => Error::Denied { pid },
        _ => Error::Process { pid, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_that_is_anonymous_or_a_stores_is_examined() {
        let mapping = |of_store| {
            let addresses = 0x7f00_0000_0000..0x7f00_0020_0000;
            Some(Mapping { addresses, of_store })
        };
        let guest = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0    [anon:guest]";
        assert_eq!(Mapping::read(guest), mapping(false));
        let shared =
            "7f0000000000-7f0000200000 rw-p 00003000 00:01 77        /memfd:vmm-dedup-segment (deleted)";
        assert_eq!(Mapping::read(shared), mapping(true));
        for other in [
            "7f0000000000-7f0000200000 r--s 00000000 00:01 77   /memfd:vmm-dedup-segment (deleted)",
            "7f0000000000-7f0000200000 rw-s 00000000 00:01 77   /memfd:ch_ram (deleted)",
            "7f0000000000-7f0000200000 rw-p 00000000 00:0f 77   /anon_hugepage (deleted)",
            "7f0000000000-7f0000200000 ---p 00000000 00:00 0",
            "7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0    [vdso]",
            "nonsense",
        ] {
            assert_eq!(Mapping::read(other), None, "{other}");
        }
    }
}
