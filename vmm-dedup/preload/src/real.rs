//! The functions that we stand before: the next library's (libc's, or another preloaded one's), or the system calls
//! for as long as nobody has looked for those.
#![allow(unsafe_code)] // calls of C functions

use libc::{c_char, c_int, c_long, c_ulong, c_void, iovec, mode_t, off_t, size_t, ssize_t};
use std::ffi::CStr;
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering};

struct Next {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            at: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    fn get(&self) -> Option<*mut c_void> {
        let at = self.at.load(Ordering::Relaxed);
        (!at.is_null()).then_some(at)
    }
}

static IOCTL: Next = Next::new(c"ioctl");
static MMAP: Next = Next::new(c"mmap");
static MUNMAP: Next = Next::new(c"munmap");
static MREMAP: Next = Next::new(c"mremap");
static MADVISE: Next = Next::new(c"madvise");
static MPROTECT: Next = Next::new(c"mprotect");
static OPEN: Next = Next::new(c"open");
static OPEN64: Next = Next::new(c"open64");
static OPENAT: Next = Next::new(c"openat");
static OPENAT64: Next = Next::new(c"openat64");
static OPEN_2: Next = Next::new(c"__open_2");
static OPEN64_2: Next = Next::new(c"__open64_2");
static OPENAT_2: Next = Next::new(c"__openat_2");
static OPENAT64_2: Next = Next::new(c"__openat64_2");
static FCNTL: Next = Next::new(c"fcntl");
static FCNTL64: Next = Next::new(c"fcntl64");
static PREAD: Next = Next::new(c"pread");
static PREAD64: Next = Next::new(c"pread64");
static PREADV: Next = Next::new(c"preadv");
static PREADV64: Next = Next::new(c"preadv64");

/// All of them.
static FUNCTIONS: [&Next; 20] = [
    &IOCTL,
    &MMAP,
    &MUNMAP,
    &MREMAP,
    &MADVISE,
    &MPROTECT,
    &OPEN,
    &OPEN64,
    &OPENAT,
    &OPENAT64,
    &OPEN_2,
    &OPEN64_2,
    &OPENAT_2,
    &OPENAT64_2,
    &FCNTL,
    &FCNTL64,
    &PREAD,
    &PREAD64,
    &PREADV,
    &PREADV64,
];

/// Looks for all of them. Called when the library is loaded: later, dlsym could meet our own hooks.
pub(crate) fn resolve() {
    for next in FUNCTIONS {
        // SAFETY: a valid name; RTLD_NEXT is meant for this.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, next.name.as_ptr()) };
        next.at.store(found, Ordering::Relaxed);
    }
}

/// # Safety
/// That of the function of this name, for all below.
pub(crate) unsafe fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's call, handed on; the symbol has this type. (It is variadic in C: on x86-64 and aarch64
    // Linux the third argument travels in the same register either way.)
    unsafe {
        match IOCTL.get() {
            Some(next) => transmute::<*mut c_void, unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int>(next)(
                fd, request, arg,
            ),
            None => int(libc::syscall(libc::SYS_ioctl, fd, request, arg)),
        }
    }
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn mmap(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void;
    // SAFETY: as above.
    unsafe {
        match MMAP.get() {
            Some(next) => transmute::<*mut c_void, Mmap>(next)(at, len, prot, flags, fd, offset),
            None => pointer(libc::syscall(libc::SYS_mmap, at, len, prot, flags, fd, offset)),
        }
    }
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn munmap(at: *mut c_void, len: size_t) -> c_int {
    // SAFETY: as above.
    unsafe {
        match MUNMAP.get() {
            Some(next) => {
                transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, size_t) -> c_int>(next)(at, len)
            }
            None => int(libc::syscall(libc::SYS_munmap, at, len)),
        }
    }
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn mremap(
    at: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    new_at: *mut c_void,
) -> *mut c_void {
    type Mremap = unsafe extern "C" fn(*mut c_void, size_t, size_t, c_int, ...) -> *mut c_void;
    // SAFETY: as above.
    unsafe {
        match MREMAP.get() {
            Some(next) => transmute::<*mut c_void, Mremap>(next)(at, len, new_len, flags, new_at),
            None => pointer(libc::syscall(libc::SYS_mremap, at, len, new_len, flags, new_at)),
        }
    }
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn madvise(at: *mut c_void, len: size_t, advice: c_int) -> c_int {
    type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
    // SAFETY: as above.
    unsafe {
        match MADVISE.get() {
            Some(next) => transmute::<*mut c_void, Madvise>(next)(at, len, advice),
            None => int(libc::syscall(libc::SYS_madvise, at, len, advice)),
        }
    }
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn mprotect(at: *mut c_void, len: size_t, prot: c_int) -> c_int {
    type Mprotect = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
    // SAFETY: as above.
    unsafe {
        match MPROTECT.get() {
            Some(next) => transmute::<*mut c_void, Mprotect>(next)(at, len, prot),
            None => int(libc::syscall(libc::SYS_mprotect, at, len, prot)),
        }
    }
}

/// The functions that open a file by its path, and those that do it relative to a folder; `$large`: flags that the name
/// stands for.
macro_rules! opens {
    ($($name:ident, $next:ident, $large:expr;)*) => {$(
        /// # Safety
        /// See [`ioctl`].
        pub(crate) unsafe fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            type Open = unsafe extern "C" fn(*const c_char, c_int, ...) -> c_int;
            // SAFETY: as above.
            unsafe {
                match $next.get() {
                    Some(next) => transmute::<*mut c_void, Open>(next)(path, flags, mode),
                    None => int(libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags | $large, mode)),
                }
            }
        }
    )*};
}

opens! {
    open, OPEN, 0;
    open64, OPEN64, libc::O_LARGEFILE;
}

macro_rules! opens_at {
    ($($name:ident, $next:ident, $large:expr;)*) => {$(
        /// # Safety
        /// See [`ioctl`].
        pub(crate) unsafe fn $name(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, ...) -> c_int;
            // SAFETY: as above.
            unsafe {
                match $next.get() {
                    Some(next) => transmute::<*mut c_void, OpenAt>(next)(folder, path, flags, mode),
                    None => int(libc::syscall(libc::SYS_openat, folder, path, flags | $large, mode)),
                }
            }
        }
    )*};
}

opens_at! {
    openat, OPENAT, 0;
    openat64, OPENAT64, libc::O_LARGEFILE;
}

/// The same with checked arguments. A libc without them has no programs that call them; then the plain one does.
macro_rules! checked_opens {
    ($($name:ident, $next:ident, $plain:ident($($folder:ident)?);)*) => {$(
        /// # Safety
        /// See [`ioctl`].
        pub(crate) unsafe fn $name($($folder: c_int,)? path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: as above.
            unsafe {
                match $next.get() {
                    Some(next) => transmute::<*mut c_void, checked_type!($($folder)?)>(next)($($folder,)? path, flags),
                    None => $plain($($folder,)? path, flags, 0),
                }
            }
        }
    )*};
}

macro_rules! checked_type {
    () => { unsafe extern "C" fn(*const c_char, c_int) -> c_int };
    ($folder:ident) => { unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int };
}

checked_opens! {
    __open_2, OPEN_2, open();
    __open64_2, OPEN64_2, open64();
    __openat_2, OPENAT_2, openat(folder);
    __openat64_2, OPENAT64_2, openat64(folder);
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn fcntl(file: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: as above.
    unsafe { any_fcntl(&FCNTL, file, command, argument) }
}

/// # Safety
/// See [`ioctl`].
pub(crate) unsafe fn fcntl64(file: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: as above.
    unsafe { any_fcntl(&FCNTL64, file, command, argument) }
}

unsafe fn any_fcntl(next: &Next, file: c_int, command: c_int, argument: c_long) -> c_int {
    type Fcntl = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;
    // SAFETY: as above.
    unsafe {
        match next.get() {
            Some(next) => transmute::<*mut c_void, Fcntl>(next)(file, command, argument),
            None => int(libc::syscall(libc::SYS_fcntl, file, command, argument)),
        }
    }
}

/// The functions that read from a place of a file; off_t has 64 bits.
macro_rules! reads {
    ($($name:ident, $next:ident, $call:ident, $pieces:ty, $count:ty;)*) => {$(
        /// # Safety
        /// See [`ioctl`].
        pub(crate) unsafe fn $name(file: c_int, pieces: $pieces, count: $count, offset: off_t) -> ssize_t {
            type Read = unsafe extern "C" fn(c_int, $pieces, $count, off_t) -> ssize_t;
            // SAFETY: as above. (The kernel takes the upper half of preadv's offset apart: none here.)
            unsafe {
                match $next.get() {
                    Some(next) => transmute::<*mut c_void, Read>(next)(file, pieces, count, offset),
                    None => size(libc::syscall(libc::$call, file, pieces, count, offset, 0)),
                }
            }
        }
    )*};
}

reads! {
    pread, PREAD, SYS_pread64, *mut c_void, size_t;
    pread64, PREAD64, SYS_pread64, *mut c_void, size_t;
    preadv, PREADV, SYS_preadv, *const iovec, c_int;
    preadv64, PREADV64, SYS_preadv, *const iovec, c_int;
}

#[allow(clippy::cast_possible_truncation)] // as wide
fn size(result: c_long) -> ssize_t {
    result as ssize_t
}

#[allow(clippy::cast_possible_truncation)] // system calls that return a descriptor, 0 or -1
fn int(result: c_long) -> c_int {
    result as c_int
}

fn pointer(result: c_long) -> *mut c_void {
    result as *mut c_void
}
