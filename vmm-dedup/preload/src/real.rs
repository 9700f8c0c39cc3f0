//! The functions that we stand before: the next library's (libc's, or another preloaded one's), or the system calls
//! for as long as nobody has looked for those.
#![allow(unsafe_code)] // calls of C functions

use libc::{c_int, c_long, c_ulong, c_void, off_t, size_t};
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

/// Looks for all of them. Called when the library is loaded: later, dlsym could meet our own hooks.
pub(crate) fn resolve() {
    for next in [&IOCTL, &MMAP, &MUNMAP, &MREMAP, &MADVISE] {
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

#[allow(clippy::cast_possible_truncation)] // system calls that return 0 or -1
fn int(result: c_long) -> c_int {
    result as c_int
}

fn pointer(result: c_long) -> *mut c_void {
    result as *mut c_void
}
