//! Mapping, moving and discarding ranges of address space.
#![allow(unsafe_code)] // mmap and its relatives

use crate::sys::inject::{self, Call};
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE, bytes};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Between two tries of what must work in the end and needs memory of the kernel.
pub(crate) const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// Anonymous memory of our own, unmapped on drop: scratch space and reserves.
#[derive(Debug)]
pub(crate) struct Anonymous {
    base: usize,
    len: usize,
}

impl Anonymous {
    /// Reserves address space for `pages` small pages; nothing is populated.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn new(pages: usize) -> io::Result<Self> {
        let len = bytes(pages);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        inject::before(Call::MapAnonymous)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        check(base)?;
        let this = Self {
            base: base as usize,
            len,
        };
        // Small pages only: what is moved here is taken page by page. Refused where there are no huge pages at all.
        let _ = advise(this.base, len, libc::MADV_NOHUGEPAGE);
        Ok(this)
    }

    /// 2 MiB that one huge page can map, not populated; the caller checks whether one does.
    pub(crate) fn new_huge() -> io::Result<Self> {
        let mut this = Self::new(2 * CHUNK_PAGES)?;
        let end = this.base + this.len;
        let base = this.base.next_multiple_of(HUGE_SIZE);
        unmap(this.base, base - this.base);
        (this.base, this.len) = (base, HUGE_SIZE);
        unmap(base + HUGE_SIZE, end - (base + HUGE_SIZE));
        advise(base, HUGE_SIZE, libc::MADV_HUGEPAGE)?;
        Ok(this)
    }

    /// Keeps it out of core dumps and children: guest pages will be here. (Moving them asks for equal access only.)
    pub(crate) fn hide(&self) {
        for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
            advise_again(&(self.base..self.base + self.len), advice);
        }
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Pages left.
    pub(crate) fn pages(&self) -> usize {
        self.len / crate::sys::page_size::PAGE_SIZE
    }

    /// Gives up the first `pages` pages: the caller owns their address range now and moves it away (or unmaps it).
    /// The range must not stay with us, since the kernel may give the hole to anyone.
    pub(crate) fn take_front(&mut self, pages: usize) -> usize {
        assert!(pages <= self.pages());
        let start = self.base;
        self.base += bytes(pages);
        self.len -= bytes(pages);
        start
    }

    /// Frees the pages of a part.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset + len <= self.len);
        discard_own(self.base + offset, len)
    }

    /// Allocates the pages of a part.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn populate_part(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset + len <= self.len);
        advise(self.base + offset, len, libc::MADV_POPULATE_WRITE)
    }

    /// Allocates every page now, or fails without killing anyone.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn populate(&self) -> io::Result<()> {
        advise(self.base, self.len, libc::MADV_POPULATE_WRITE)
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        unmap(self.base, self.len);
    }
}

/// Unmaps memory of ours: what [`Anonymous::take_front`] gave away and could not be moved, what was mapped beside the guest. What the
/// kernel refuses to unmap (cutting a mapping takes one more) stays mapped and empty; nobody uses it again.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn unmap(start: usize, len: usize) {
    if len == 0 {
        return;
    }
    let unmap = || {
        inject::before(Call::Unmap)?;
        // SAFETY: the range is a mapping of the caller's own, which nothing refers to any more.
        if unsafe { libc::munmap(start as *mut _, len) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    if let Err(error) = unmap() {
        let emptied = discard_own(start, len);
        let then = match emptied {
            Ok(()) => "its addresses stay taken; raise vm.max_map_count",
            Err(_) => "it stays allocated; raise vm.max_map_count",
        };
        late_log::note("unmapping memory of the service", &error, then);
    }
}

/// Fills a hole that a call left which failed half-way, with inaccessible memory: nobody else gets the addresses, and who
/// touches them reads nothing wrong. Fails (EEXIST) where something is mapped.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn hold_hole(at: usize, len: usize) -> io::Result<()> {
    fill(at, len, libc::PROT_NONE)
}

/// Lets inaccessible memory be read and written.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn allow_access(at: usize, len: usize) -> io::Result<()> {
    inject::before(Call::Protect)?;
    // SAFETY: memory that hold_hole() mapped; it is empty, so its users see nothing that they could have seen before.
    if unsafe { libc::mprotect(at as *mut _, len, libc::PROT_READ | libc::PROT_WRITE) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg_attr(any(test, feature = "inject"), track_caller)]
fn fill(at: usize, len: usize, prot: i32) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    inject::before(Call::MapAnonymous)?;
    // SAFETY: MAP_FIXED_NOREPLACE maps only where nothing is mapped.
    check(unsafe { libc::mmap(at as *mut _, len, prot, flags, -1, 0) })
}

/// Whether something is mapped at every page of a range. Asking touches nothing.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn is_mapped(at: usize, len: usize) -> bool {
    let mut states = vec![0u8; len.div_ceil(PAGE_SIZE)];
    let mut ask = || {
        inject::before(Call::Mincore)?;
        // SAFETY: a byte is written for each page, and there are so many.
        if unsafe { libc::mincore(at as *mut _, len, states.as_mut_ptr()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    loop {
        match ask() {
            Ok(()) => return true,
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => return false,
            // The kernel lacks a page for the answer.
            Err(error) => late_log::note("looking at the mappings", &error, "it was tried again"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Frees pages of our own, also those of a process that has locked all of its memory.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn discard_own(at: usize, len: usize) -> io::Result<()> {
    advise(at, len, libc::MADV_DONTNEED_LOCKED)
}

/// Splits the huge page that an address lies in, if there is one: the kernel does that before it marks a part of it as
/// cold, which is all that it is told here. Nothing is taken away, and others can use the pages but for moments.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn split_huge_page(at: usize) -> io::Result<()> {
    advise(at, crate::sys::page_size::PAGE_SIZE, libc::MADV_COLD)
}

/// Maps the pages of a range as reading them would.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn populate_read(at: usize, len: usize) -> io::Result<()> {
    advise(at, len, libc::MADV_POPULATE_READ)
}

/// Gives each page of a range memory of its own, as writing it would; its content stays.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn populate_write(at: usize, len: usize) -> io::Result<()> {
    advise(at, len, libc::MADV_POPULATE_WRITE)
}

#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn advise(start: usize, len: usize, advice: i32) -> io::Result<()> {
    inject::before(match advice {
        libc::MADV_POPULATE_WRITE => Call::Populate,
        libc::MADV_POPULATE_READ => Call::PopulateRead,
        libc::MADV_DONTNEED | libc::MADV_DONTNEED_LOCKED => Call::Discard,
        libc::MADV_COLD => Call::Split,
        _ => Call::Advise,
    })?;
    // SAFETY: MADV_DONTNEED(_LOCKED) is only used on memory of our own that Rust does not refer to; the others change no content.
    if unsafe { libc::madvise(start as *mut _, len, advice) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Maps `len` bytes of a store segment over guest memory: private and writable, so that the kernel copies on write,
/// from a descriptor that is read-only.
///
/// # Safety
/// The range must be guest memory whose pages were taken away or hold the same bytes under write protection, and
/// nobody may hold a Rust reference into it.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) unsafe fn map_segment(
    at: usize,
    len: usize,
    segment: BorrowedFd<'_>,
    offset: usize,
) -> io::Result<()> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    inject::before_mapping(Call::MapSegment, at, len)?;
    // SAFETY: as promised by the caller.
    check(unsafe { libc::mmap(at as *mut _, len, prot, flags, segment.as_raw_fd(), offset) })
}

/// Maps fresh anonymous memory over guest memory that is given up. If that fails, what was there is there still. The caller may be a
/// thread whose system calls are filtered: it makes none but mmap, madvise and futex, whatever fails.
///
/// # Safety
/// The range must be guest memory that the VMM gives up.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) unsafe fn renew(at: usize, len: usize) -> io::Result<()> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let renewed = inject::before_mapping(Call::MapAnonymous, at, len).and_then(|()| {
        // SAFETY: as promised by the caller.
        check(unsafe { libc::mmap(at as *mut _, len, prot, flags, -1, 0) })
    });
    let Err(error) = renewed else {
        return Ok(());
    };
    // Where the kernel unmapped the place before it failed, zeros are what the guest shall see, and there is no way back.
    while let Err(refused) = fill(at, len, prot) {
        if refused.raw_os_error() == Some(libc::EEXIST) || !has_hole(at, len) {
            return Err(error);
        }
        late_log::note(
            "mapping fresh memory over guest memory",
            &refused,
            "the hole that was left was filled as soon as that worked",
        );
        rest(MEMORY_PAUSE);
    }
    Ok(())
}

/// Whether nothing is mapped at some page of a range. That its memory is cold is all that is told of it.
fn has_hole(at: usize, len: usize) -> bool {
    // SAFETY: it changes no content.
    let told = unsafe { libc::madvise(at as *mut _, len, libc::MADV_COLD) };
    told < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// Sleeps by a futex. (A thread that parks instead would take a wake-up that is meant for something else.)
fn rest(time: Duration) {
    let nobody = Mutex::new(());
    let guard = nobody.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = Condvar::new().wait_timeout(guard, time);
}

/// Returns when everybody who held the lock of this process's mappings before has let it go. (The kernel only refuses that to
/// a process that is about to end.)
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn wait_for_lock_holders() {
    while let Err(error) = ask_for_break() {
        late_log::note(
            "waiting for whoever changes mappings",
            &error,
            "it was tried again until it worked",
        );
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg_attr(any(test, feature = "inject"), track_caller)]
fn ask_for_break() -> io::Result<()> {
    inject::before(Call::Brk)?;
    // SAFETY: no break is below every one that there can be, so nothing changes; but it is found out under the lock, held for writing.
    if unsafe { libc::syscall(libc::SYS_brk, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Repeats what the VMM had advised for guest memory. It changes no content; advice that the kernel refuses is lost.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn advise_again(range: &std::ops::Range<usize>, advice: i32) {
    if let Err(error) = advise(range.start, range.len(), advice) {
        late_log::note("repeating advice for guest memory", &error, "it is lost");
    }
}

/// madvise(MADV_DONTNEED).
///
/// # Safety
/// The range must be memory that the VMM gives up.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) unsafe fn dont_need(at: usize, len: usize) -> io::Result<()> {
    advise(at, len, libc::MADV_DONTNEED)
}

/// Maps `len` bytes of a store segment as [`map_segment`] does, at an address of the kernel's choice.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) fn map_segment_anywhere(len: usize, segment: BorrowedFd<'_>, offset: usize) -> io::Result<usize> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    inject::before(Call::MapSegment)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            prot,
            flags,
            segment.as_raw_fd(),
            offset,
        )
    };
    check(base)?;
    Ok(base as usize)
}

/// Moves `len` bytes of a mapping of ours over guest memory, atomically for everyone who uses that.
///
/// # Safety
/// `from` must be our own and hold what the guest shall see; nobody may hold a Rust reference into either range.
#[cfg_attr(any(test, feature = "inject"), track_caller)]
pub(crate) unsafe fn move_over(from: usize, to: usize, len: usize) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    inject::before_mapping(Call::Remap, to, len)?;
    // SAFETY: as promised by the caller.
    check(unsafe { libc::mremap(from as *mut _, len, len, flags, to) })
}

fn check(result: *mut libc::c_void) -> io::Result<()> {
    if result == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
