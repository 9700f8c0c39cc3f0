//! What the VMM reads from files into guest memory, by calls of libc's. What it reads by io_uring or Linux AIO passes by unseen.
#![allow(unsafe_code, unreachable_pub)] // C functions, found by name

use crate::hooks::{concerned, quietly};
use crate::{manager, real};
use libc::{c_int, c_void, iovec, off_t, size_t, ssize_t};
use std::ops::Range;

/// Shorter reads fill no page.
const SHORTEST: usize = 4096;

/// The addresses that a read of so many bytes has filled.
fn filled(pieces: &[iovec], bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let mut left = bytes;
    pieces.iter().map_while(move |piece| {
        let len = piece.iov_len.min(left);
        left -= len;
        let start = piece.iov_base as usize;
        (len > 0).then(|| start..start.saturating_add(len))
    })
}

/// Notes what was read, wherever that lies: the service knows what is guest memory.
///
/// # Safety
/// The kernel has just taken `count` pieces from there.
unsafe fn note(pieces: *const iovec, count: usize, read: ssize_t) {
    let bytes = usize::try_from(read).unwrap_or(0);
    if bytes < SHORTEST || !concerned() {
        return;
    }
    let note = || {
        let Some(supervisor) = manager::supervisor() else {
            return;
        };
        // SAFETY: as the caller says.
        let pieces = unsafe { std::slice::from_raw_parts(pieces, count) };
        filled(pieces, bytes).for_each(|addresses| supervisor.note_read(addresses));
    };
    quietly(note, ());
}

macro_rules! one_piece {
    ($($name:ident;)*) => {$(
        /// # Safety
        /// That of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(file: c_int, at: *mut c_void, len: size_t, offset: off_t) -> ssize_t {
            // SAFETY: the caller's call.
            let read = unsafe { real::$name(file, at, len, offset) };
            let piece = iovec {
                iov_base: at,
                iov_len: len,
            };
            // SAFETY: our own piece.
            unsafe { note(&raw const piece, 1, read) };
            read
        }
    )*};
}

macro_rules! pieces {
    ($($name:ident;)*) => {$(
        /// # Safety
        /// That of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(file: c_int, pieces: *const iovec, count: c_int, offset: off_t) -> ssize_t {
            // SAFETY: the caller's call.
            let read = unsafe { real::$name(file, pieces, count, offset) };
            // SAFETY: something was read, so that the kernel has taken them.
            unsafe { note(pieces, usize::try_from(count).unwrap_or(0), read) };
            read
        }
    )*};
}

one_piece! {
    pread;
    pread64;
}

pieces! {
    preadv;
    preadv64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_read_fills_the_first_pieces() {
        let piece = |at: usize, iov_len| iovec {
            iov_base: at as *mut c_void,
            iov_len,
        };
        let pieces = [piece(0x1000, 4096), piece(0x9000, 4096), piece(0xf000, 10)];
        let all: Vec<_> = filled(&pieces, 8202).collect();
        assert_eq!(all, [0x1000..0x2000, 0x9000..0xa000, 0xf000..0xf00a]);
        let some: Vec<_> = filled(&pieces, 5000).collect();
        assert_eq!(some, [0x1000..0x2000, 0x9000..0x9000 + 904]);
    }
}
