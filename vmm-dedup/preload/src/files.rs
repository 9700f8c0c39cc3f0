//! The interposed functions that may begin direct I/O. What they open is looked at before the VMM gets the descriptor, so
//! that no I/O to it can be under way: on some file systems direct I/O must not meet merging, which nothing else tells in
//! time.
//!
//! Files that come otherwise (from another process, by io_uring, by system calls of the VMM's own making) are found by the
//! engine, before it next merges.
#![allow(unsafe_code, unreachable_pub)] // C functions, found by name

use crate::hooks::{concerned, quietly};
use crate::manager::tell;
use crate::real;
use libc::{c_char, c_int, c_long, mode_t};
use vmm_dedup::Supervisor;

/// Lets the engine look, if a file was opened for direct I/O.
fn opened(file: c_int, flags: c_int) -> c_int {
    if file >= 0 && flags & libc::O_DIRECT != 0 && concerned() {
        // Why merging is suspended says the service.
        quietly(|| tell(Supervisor::direct_io_opened), ());
    }
    file
}

/// The functions that open files, by their names: variadic in C, where the mode is read only if there is one. (On x86-64 and
/// aarch64 Linux it travels in the same register either way.)
macro_rules! open_functions {
    ($($name:ident($($argument:ident: $kind:ty),*; $flags:ident$(, $mode:ident)?);)*) => {$(
        /// # Safety
        /// That of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind,)* $flags: c_int$(, $mode: mode_t)?) -> c_int {
            // SAFETY: the caller's call.
            opened(unsafe { real::$name($($argument,)* $flags$(, $mode)?) }, $flags)
        }
    )*};
}

open_functions! {
    open(path: *const c_char; flags, mode);
    open64(path: *const c_char; flags, mode);
    openat(folder: c_int, path: *const c_char; flags, mode);
    openat64(folder: c_int, path: *const c_char; flags, mode);
    // What the first ones become where the compiler checks their arguments (_FORTIFY_SOURCE).
    __open_2(path: *const c_char; flags);
    __open64_2(path: *const c_char; flags);
    __openat_2(folder: c_int, path: *const c_char; flags);
    __openat64_2(folder: c_int, path: *const c_char; flags);
}

/// F_SETFL can switch direct I/O on for a file that is open.
fn set(file: c_int, command: c_int, argument: c_long, result: c_int) -> c_int {
    if command == libc::F_SETFL && result == 0 {
        #[allow(clippy::cast_possible_truncation)] // flags are an int
        opened(file, argument as c_int);
    }
    result
}

/// # Safety
/// fcntl's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(file: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the caller's call.
    set(file, command, argument, unsafe {
        real::fcntl(file, command, argument)
    })
}

/// # Safety
/// fcntl's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(file: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the caller's call.
    set(file, command, argument, unsafe {
        real::fcntl64(file, command, argument)
    })
}
