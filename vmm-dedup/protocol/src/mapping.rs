//! A shared mapping of a memfd, seen only through atomics or copied out, since another process may write it.
#![allow(unsafe_code)] // mmap, and access to memory that other processes may change.

use crate::key::PageWords;
use crate::raw;
use crate::sizes::PAGE_SIZE;
use crate::sync::AtomicU64;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes of a huge page. Longer mappings are aligned so that they can be used.
const HUGE_SIZE: usize = 2 << 20;
/// Linux 6.1, include/uapi/asm-generic/mman-common.h; not every C library's headers have it.
const MADV_COLLAPSE: libc::c_int = 25;

/// A `MAP_SHARED` mapping, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: the mapping is plain memory that this value owns; all access is atomic or volatile.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd` for reading.
    pub fn read_only(fd: impl AsFd, len: usize) -> io::Result<Self> {
        Self::new(fd, len, false)
    }

    /// Maps the first `len` bytes of `fd` for reading and writing.
    pub fn read_write(fd: impl AsFd, len: usize) -> io::Result<Self> {
        Self::new(fd, len, true)
    }

    fn new(fd: impl AsFd, len: usize, writable: bool) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&fd)?;
        let file_len = usize::try_from(stat.st_size).unwrap_or(0);
        if len == 0 || !len.is_multiple_of(PAGE_SIZE) || file_len < len {
            let text = format!("cannot map {len} bytes of a file of {file_len}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        let base = if len >= HUGE_SIZE {
            let place = reserve_aligned(len)?;
            // SAFETY: the place was reserved for this mapping, and nothing else uses it.
            unsafe {
                mmap(
                    place as *mut _,
                    len,
                    prot,
                    MapFlags::SHARED | MapFlags::FIXED,
                    fd,
                    0,
                )
            }
            .inspect_err(|_| unmap(place, len))?
        } else {
            // SAFETY: a new mapping at an address of the kernel's choice; nothing else uses that range.
            unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? }
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { base, len, writable };
        mapping.hide();
        Ok(mapping)
    }

    /// Keeps it out of core dumps and children: it holds pages of guests, also of others'. A child would map slots that the
    /// store does not know to be mapped there.
    fn hide(&self) {
        for advice in [
            rustix::mm::Advice::LinuxDontDump,
            rustix::mm::Advice::LinuxDontFork,
        ] {
            // SAFETY: exactly our own mapping; the advice changes no content. No kernel refuses it.
            let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, advice) };
        }
    }

    /// Lets the kernel use huge pages for the first `len` bytes of the file, where the host allows that for those who ask
    /// (shmem_enabled). A page of a huge one costs a tenth of what a small one costs to allocate.
    pub fn advise_huge(&self, len: usize) {
        assert!(len <= self.len);
        let advice = rustix::mm::Advice::LinuxHugepage;
        // SAFETY: a part of our own mapping; the advice changes no content.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), len, advice) };
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte, for handing ranges to system calls.
    pub fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// The mapping as atomic words. Storing needs a writable mapping, which the caller must have made.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: base is page-aligned and valid for len bytes for as long as self lives; AtomicU64 has the
        // layout of u64 and allows changes by others.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU64>(), self.len / 8) }
    }

    /// Copies a page out; it may be torn if a peer writes at the same time.
    pub fn read_page(&self, page: usize, out: &mut PageWords) {
        let from = self.page_address(page);
        // SAFETY: a page of our mapping, which is readable, and the caller's buffer.
        unsafe { raw::copy_page(from, out.as_mut_ptr() as usize) };
    }

    /// Copies a page in from another mapping; it may be torn if a peer writes that at the same time.
    pub fn copy_page_from(&self, page: usize, other: &Mapping, from: usize) {
        // SAFETY: a page of a mapping, which is readable as long as `other` lives.
        unsafe { self.copy_page_from_address(page, other.page_address(from)) };
    }

    /// Reads page `from` of a file in; it may be torn if somebody writes that at the same time.
    ///
    /// # Errors
    /// Those of the kernel, or the file ends before the end of that page.
    pub fn read_page_from(&self, page: usize, file: impl AsFd, from: usize) -> io::Result<()> {
        assert!(self.writable, "the mapping was made read-only");
        let (to, fd) = (self.page_address(page), file.as_fd().as_raw_fd());
        let mut done = 0;
        while done < PAGE_SIZE {
            let at = i64::try_from(from * PAGE_SIZE + done).map_err(io::Error::other)?;
            // SAFETY: into the rest of a page of our mapping, which is writable and only seen through atomics and copies.
            let read = unsafe { libc::pread(fd, (to + done) as *mut _, PAGE_SIZE - done, at) };
            match usize::try_from(read) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => done += bytes,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies a page in from memory of this process; it may be torn if somebody writes that at the same time.
    ///
    /// # Safety
    /// A page must be readable at `from`.
    pub unsafe fn copy_page_from_address(&self, page: usize, from: usize) {
        assert!(self.writable, "the mapping was made read-only");
        // SAFETY: as promised by the caller, to a page of our mapping, which is writable and only seen through atomics
        // and copies.
        unsafe { raw::copy_page(from, self.page_address(page)) };
    }

    fn page_address(&self, page: usize) -> usize {
        assert!(page < self.len / PAGE_SIZE);
        self.address() + page * PAGE_SIZE
    }

    /// Allocates the memory of consecutive pages of a writable mapping in one call, which costs less than a fault for
    /// each.
    pub fn populate(&self, first: usize, pages: usize) -> io::Result<()> {
        assert!(self.writable && (first + pages) * PAGE_SIZE <= self.len);
        let start = self.address() + first * PAGE_SIZE;
        let advice = rustix::mm::Advice::LinuxPopulateWrite;
        // SAFETY: a part of our own mapping; populating changes no content.
        unsafe { rustix::mm::madvise(start as *mut _, pages * PAGE_SIZE, advice)? };
        Ok(())
    }

    /// Gathers consecutive pages in huge pages, also where the host's `shmem_enabled` is `never`: whoever maps the file in the
    /// same alignment has huge pages from then on. Content stays, and may be read and written meanwhile.
    ///
    /// # Errors
    /// There is no huge page to be had, or nothing in the range; what is in it is as it was.
    pub fn collapse(&self, first: usize, pages: usize) -> io::Result<()> {
        assert!(self.writable && (first + pages) * PAGE_SIZE <= self.len);
        let start = self.address() + first * PAGE_SIZE;
        // rustix does not know this advice.
        // SAFETY: a part of our own mapping; collapsing changes no content.
        if unsafe { libc::madvise(start as *mut _, pages * PAGE_SIZE, MADV_COLLAPSE) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Copies a page in.
    pub fn write_page(&self, page: usize, from: &PageWords) {
        // SAFETY: the buffer is a page long.
        unsafe { self.copy_page_from_address(page, from.as_ptr() as usize) };
    }
}

/// Creates a memfd of `len` bytes with the only writable mapping it will ever have: sealed against resizing and
/// against every later writable mapping or `write`, also through a descriptor reopened from /proc.
pub fn sealed_memfd(name: &str, len: usize) -> io::Result<(OwnedFd, Mapping)> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len as u64)?;
    let map = Mapping::read_write(&file, len)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok((file, map))
}

/// Creates a memfd that both sides may write, but nobody can resize (a shrunk file kills who reads it).
pub fn staging_memfd(len: usize) -> io::Result<(OwnedFd, Mapping)> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create(
        "vmm-dedup-staging",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    ftruncate(&file, len as u64)?;
    let map = Mapping::read_write(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((file, map))
}

/// Address space for a mapping that huge pages fit.
fn reserve_aligned(len: usize) -> io::Result<usize> {
    let whole = len + HUGE_SIZE;
    // SAFETY: a new, inaccessible mapping at an address of the kernel's choice.
    let start =
        unsafe { mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE)? };
    let start = start as usize;
    let place = start.next_multiple_of(HUGE_SIZE);
    unmap(start, place - start);
    unmap(place + len, start + whole - place - len);
    Ok(place)
}

/// Unmaps a range that nobody refers to any more.
fn unmap(start: usize, len: usize) {
    if len > 0 {
        // SAFETY: callers name parts of mappings of their own.
        let _ = unsafe { munmap(start as *mut _, len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Exactly the range that new() mapped; no reference into it outlives self.
        unmap(self.address(), self.len);
    }
}
