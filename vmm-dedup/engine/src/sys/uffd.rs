//! userfaultfd: the few ioctls the engine needs, with the ABI asserted. (The `userfaultfd` crate needs libclang at
//! build time and lacks UFFDIO_MOVE.) Source: Linux, include/uapi/linux/userfaultfd.h.
#![allow(unsafe_code)] // ioctls

use crate::error::Error;
use crate::seccomp::request::{
    self, UFFDIO_API, UFFDIO_COPY, UFFDIO_MOVE, UFFDIO_POISON, UFFDIO_REGISTER, UFFDIO_UNREGISTER,
    UFFDIO_WAKE, UFFDIO_WRITEPROTECT, UFFDIO_ZEROPAGE, USERFAULTFD_IOC_NEW, as_taken,
};
use crate::sys::inject::{self, Call};
use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::pagemap::Places;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::ops;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const UFFD_API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const FEATURE_MOVE: u64 = 1 << 16;

const MODE_DONTWAKE: u64 = 1 << 0;
/// Tries to protect a range while the kernel says that mappings are changing, and the time between two.
const PROTECT_TRIES: usize = 100;
const PROTECT_PAUSE: Duration = Duration::from_micros(20);
const EVENT_PAGEFAULT: u8 = 0x12;

/// What faults a registered range reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Writes to protected pages.
    Wp,
    /// Any touch of a page that is not there.
    Missing,
}

impl Mode {
    fn bits(self) -> u64 {
        match self {
            Mode::Missing => 1,
            Mode::Wp => 2,
        }
    }
}

#[repr(C)]
#[derive(Default)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Default)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Default)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// uffdio_copy and uffdio_move have one layout.
#[repr(C)]
#[derive(Default)]
struct Transfer {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
#[derive(Default)]
struct Fill {
    range: Range,
    mode: u64,
    done: i64,
}

/// struct uffd_msg for page faults.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    feature: u64,
}

const _: () = assert!(request::size(UFFDIO_API) == size_of::<Api>());
const _: () = assert!(request::size(UFFDIO_REGISTER) == size_of::<Register>());
const _: () = assert!(request::size(UFFDIO_UNREGISTER) == size_of::<Range>());
const _: () = assert!(request::size(UFFDIO_WAKE) == size_of::<Range>());
const _: () = assert!(request::size(UFFDIO_WRITEPROTECT) == size_of::<WriteProtect>());
const _: () = assert!(request::size(UFFDIO_COPY) == size_of::<Transfer>());
const _: () = assert!(request::size(UFFDIO_MOVE) == size_of::<Transfer>());
const _: () = assert!(request::size(UFFDIO_ZEROPAGE) == size_of::<Fill>());
const _: () = assert!(request::size(UFFDIO_POISON) == size_of::<Fill>());
const _: () = assert!(size_of::<Event>() == 32);

/// Why pages could not be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveError {
    /// Pinned (a DMA or io_uring buffer) or not exclusively ours: it must stay where it is.
    Pinned,
    /// Nothing there to move.
    Absent,
    /// Try again: the kernel was changing the mapping.
    Again,
    /// Anything else: not anonymous, locked, no memory for page tables.
    Refused(i32),
}

/// A userfaultfd.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
    places: Places,
    /// Guest memory that should be registered here and is not, since the kernel refused.
    untracked: Mutex<Vec<ops::Range<usize>>>,
}

impl Uffd {
    /// A descriptor for tracking and taking: write protection is resolved by the kernel (WP_ASYNC).
    pub(crate) fn tracker() -> Result<Self, Error> {
        Self::with_features(&[
            (
                FEATURE_PAGEFAULT_FLAG_WP,
                "userfaultfd write protection (Linux 5.7)",
            ),
            (
                FEATURE_WP_HUGETLBFS_SHMEM,
                "userfaultfd write protection of shmem (Linux 5.19)",
            ),
            (FEATURE_WP_UNPOPULATED, "UFFD_FEATURE_WP_UNPOPULATED (Linux 6.4)"),
            (FEATURE_WP_ASYNC, "UFFD_FEATURE_WP_ASYNC (Linux 6.7)"),
            (FEATURE_MOVE, "UFFDIO_MOVE (Linux 6.8)"),
        ])
    }

    /// A descriptor for breaking: a write to a protected page waits for us.
    pub(crate) fn breaker() -> Result<Self, Error> {
        Self::with_features(&[
            (
                FEATURE_PAGEFAULT_FLAG_WP,
                "userfaultfd write protection (Linux 5.7)",
            ),
            (
                FEATURE_WP_HUGETLBFS_SHMEM,
                "userfaultfd write protection of shmem (Linux 5.19)",
            ),
        ])
    }

    /// A descriptor for pages that are packed: whoever touches one waits for us.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn packer() -> Result<Self, Error> {
        Self::with_features(&[(FEATURE_MOVE, "UFFDIO_MOVE (Linux 6.8)")])
    }

    fn with_features(wanted: &[(u64, &'static str)]) -> Result<Self, Error> {
        let mut probe = Api {
            api: UFFD_API,
            ..Api::default()
        };
        ioctl(&Self::open()?, UFFDIO_API, &mut probe).map_err(Error::Userfaultfd)?;
        if let Some((_, name)) = wanted.iter().find(|(bit, _)| probe.features & bit == 0) {
            return Err(Error::KernelLacks(name));
        }
        let uffd = Self {
            fd: Self::open()?,
            places: Places::open()?,
            untracked: Mutex::new(Vec::new()),
        };
        let features = wanted.iter().fold(0, |all, (bit, _)| all | bit);
        let mut api = Api {
            api: UFFD_API,
            features,
            ioctls: 0,
        };
        ioctl(&uffd.fd, UFFDIO_API, &mut api).map_err(Error::Userfaultfd)?;
        Ok(uffd)
    }

    /// Opens through /dev/userfaultfd, else through the system call: either lets us see faults that KVM raises.
    fn open() -> Result<OwnedFd, Error> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let fd = match std::fs::File::open("/dev/userfaultfd") {
            // SAFETY: an ioctl without memory argument on a descriptor we own.
            Ok(device) => unsafe { libc::ioctl(device.as_raw_fd(), as_taken(USERFAULTFD_IOC_NEW), flags) },
            // SAFETY: a system call without memory arguments.
            Err(_) => RawFd::try_from(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) }).unwrap_or(-1),
        };
        if fd < 0 {
            return Err(Error::NoUserfaultfd(io::Error::last_os_error()));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Registers a page-aligned range, or replaces the mode of one that is registered here.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn register(&self, start: usize, len: usize, mode: Mode) -> io::Result<()> {
        self.ioctl(
            Call::Register,
            UFFDIO_REGISTER,
            &mut Register {
                range: range(start, len),
                mode: mode.bits(),
                ioctls: 0,
            },
        )
    }

    /// Ends registration; waiters go on.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn unregister(&self, start: usize, len: usize) -> io::Result<()> {
        self.ioctl(Call::Unregister, UFFDIO_UNREGISTER, &mut range(start, len))
    }

    /// Notes memory that could not be registered.
    pub(crate) fn note_untracked(&self, range: ops::Range<usize>) {
        self.untracked().push(range);
    }

    /// What was noted since the last call.
    pub(crate) fn take_untracked(&self) -> Vec<ops::Range<usize>> {
        std::mem::take(&mut *self.untracked())
    }

    fn untracked(&self) -> MutexGuard<'_, Vec<ops::Range<usize>>> {
        self.untracked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets every thread go on that waits in the range.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn wake(&self, start: usize, len: usize) -> io::Result<()> {
        self.ioctl(Call::Wake, UFFDIO_WAKE, &mut range(start, len))
    }

    /// Protects or releases a range. While the kernel changes the process's mappings it is tried again for some time.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn write_protect(&self, start: usize, len: usize, protect: bool) -> io::Result<()> {
        for _attempt in 0..PROTECT_TRIES {
            let mut request = WriteProtect {
                range: range(start, len),
                mode: u64::from(protect),
            };
            match self.ioctl(Call::WriteProtect, UFFDIO_WRITEPROTECT, &mut request) {
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::sleep(PROTECT_PAUSE),
                done => return done,
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// Puts the zero page into empty places, without waking anyone.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn zero_page(&self, start: usize, len: usize) -> io::Result<()> {
        self.ioctl(
            Call::ZeroPage,
            UFFDIO_ZEROPAGE,
            &mut Fill {
                range: range(start, len),
                mode: MODE_DONTWAKE,
                done: 0,
            },
        )
    }

    /// Fills an empty place with a copy of `source`, without waking anyone.
    ///
    /// # Safety
    /// `source` must be readable for `len` bytes, and `dst` an empty registered place of which nobody holds a
    /// Rust reference.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) unsafe fn copy(&self, dst: usize, source: usize, len: usize) -> io::Result<()> {
        self.ioctl(Call::Copy, UFFDIO_COPY, &mut transfer(dst, source, len))
    }

    /// Makes an empty place one of broken memory: who touches it gets SIGBUS, a guest a machine check.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn poison(&self, start: usize, len: usize) -> io::Result<()> {
        self.ioctl(
            Call::Poison,
            UFFDIO_POISON,
            &mut Fill {
                range: range(start, len),
                mode: MODE_DONTWAKE,
                done: 0,
            },
        )
    }

    /// Whether a place of anonymous memory holds anything: a page in memory, in swap, on the way between or broken. Asking
    /// touches nothing, so it never waits.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn filled(&self, at: usize) -> bool {
        self.places.filled(at)
    }

    /// Moves pages, in order, until one cannot be moved: `(bytes moved, why it ended)`. The source is empty
    /// afterwards; a touch of it waits if its range is registered for missing pages. The destination must be empty.
    ///
    /// # Safety
    /// Nobody may hold a Rust reference into either range.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) unsafe fn move_pages(&self, dst: usize, src: usize, len: usize) -> (usize, Option<MoveError>) {
        let mut request = transfer(dst, src, len);
        let error = self.ioctl(Call::Move, UFFDIO_MOVE, &mut request).err();
        let mut moved = usize::try_from(request.done).unwrap_or(0);
        // Kernels that move several pages in one step (Linux 6.18 for one) lose count when they have to try again, because
        // somebody used a page just then, or reclaim has it: what they have moved meanwhile is not reported, and then they say
        // that its place is taken, or to try again. It is where it was to go, and nowhere else. Reclaim may have swapped it out
        // since, so it is the page tables that are asked.
        if let Some(libc::EEXIST | libc::ENOENT | libc::EAGAIN) =
            error.as_ref().and_then(io::Error::raw_os_error)
        {
            let reported = moved;
            while moved < len && self.filled(dst + moved) && !self.filled(src + moved) {
                moved += PAGE_SIZE;
            }
            if moved > reported {
                return (moved, (moved < len).then_some(MoveError::Again));
            }
        }
        let reason = error.map(|e| match e.raw_os_error() {
            Some(libc::EBUSY) => MoveError::Pinned,
            // What is there must not pass for nothing: a copy of zeros would be put in its place.
            Some(libc::ENOENT) if !self.filled(src + moved) => MoveError::Absent,
            Some(libc::EAGAIN) => MoveError::Again,
            other => MoveError::Refused(other.unwrap_or(0)),
        });
        (moved, reason)
    }

    /// Waits until somebody's fault can be read; whether there is one.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn wait_for_fault(&self, time: Duration) -> io::Result<bool> {
        inject::before(Call::PollFaults)?;
        let mut poll = [PollFd::new(self, PollFlags::IN)];
        let timeout = Timespec::try_from(time).ok();
        Ok(rustix::event::poll(&mut poll, timeout.as_ref())? > 0)
    }

    /// Whether somebody's fault can be read, or can within so much time. If the kernel does not tell, somebody may wait: who asks
    /// ends early for his sake, and that only takes another try.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn somebody_waits(&self, time: Duration) -> bool {
        self.wait_for_fault(time).unwrap_or_else(|error| {
            late_log::note(
                "looking whether somebody waits",
                &error,
                "it counts as if somebody does",
            );
            true
        })
    }

    /// Addresses of the faults that wait now, up to the room in `out`. Never blocks.
    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    pub(crate) fn read_faults(&self, out: &mut Vec<usize>) -> io::Result<()> {
        inject::before(Call::ReadFaults)?;
        let mut events = [Event::default(); 32];
        // SAFETY: the buffer is writable for its whole size, and Event is plain data.
        let got = unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                events.as_mut_ptr().cast(),
                size_of_val(&events),
            )
        };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock {
                Ok(())
            } else {
                Err(error)
            };
        };
        let faults = events[..got / size_of::<Event>()]
            .iter()
            .filter(|e| e.event == EVENT_PAGEFAULT);
        out.extend(faults.filter_map(|e| usize::try_from(e.address).ok()));
        Ok(())
    }

    #[cfg_attr(any(test, feature = "inject"), track_caller)]
    fn ioctl<T>(&self, call: Call, request: u32, arg: &mut T) -> io::Result<()> {
        inject::before(call)?;
        ioctl(&self.fd, request, arg)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn ioctl<T>(fd: &OwnedFd, request: u32, arg: &mut T) -> io::Result<()> {
    // SAFETY: each request above goes with the argument type that its constant states the size of; the kernel
    // checks addresses inside it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), as_taken(request), arg) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn range(start: usize, len: usize) -> Range {
    Range {
        start: start as u64,
        len: len as u64,
    }
}

fn transfer(dst: usize, src: usize, len: usize) -> Transfer {
    Transfer {
        dst: dst as u64,
        src: src as u64,
        len: len as u64,
        mode: MODE_DONTWAKE,
        done: 0,
    }
}
