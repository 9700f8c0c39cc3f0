//! Raising an eventfd that somebody else has as well, without ever waiting.
//!
//! Who writes to an eventfd waits while it is full, unless its open file says that it does not block; and everybody who has the
//! file may change that at any moment, a client too. A request of asynchronous I/O names an eventfd that the kernel raises when the
//! request is done, and that never waits. So raising is a request to read a byte of a file that has it.
#![allow(unsafe_code)] // io_setup, io_submit, io_getevents and io_destroy, which rustix and libc lack.

use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// `aio_context_t` of linux/aio_abi.h.
type Context = libc::c_ulong;

/// `struct io_event`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Event([u64; 4]);

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// What raises eventfds.
#[derive(Debug)]
pub(crate) struct Raiser {
    context: Mutex<Context>,
    /// One byte.
    file: OwnedFd,
}

/// What a system call returned.
fn done(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        n => Ok(n),
    }
}

impl Raiser {
    pub(crate) fn new() -> io::Result<Self> {
        let file = memfd_create("interrupts", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, 1)?;
        let mut context: Context = 0;
        // SAFETY: the kernel writes the context's number to a place that is valid for it, and holds zero as it demands.
        done(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) })?;
        let context = Mutex::new(context);
        Ok(Self { context, file })
    }

    /// Adds one to an eventfd, or leaves it full.
    pub(crate) fn raise(&self, event: &File) -> io::Result<()> {
        let context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        let mut byte = 0u8;
        // SAFETY: zeros are a value of each of its fields.
        let mut request: libc::iocb = unsafe { std::mem::zeroed() };
        request.aio_lio_opcode = IOCB_CMD_PREAD;
        request.aio_fildes = self.file.as_raw_fd().cast_unsigned();
        request.aio_buf = (&raw mut byte) as u64;
        request.aio_nbytes = 1;
        request.aio_flags = IOCB_FLAG_RESFD;
        request.aio_resfd = event.as_raw_fd().cast_unsigned();
        let mut requests = [&raw mut request];
        // SAFETY: one request, which lives until it is done, as does the byte that it names: a file in memory is read before this
        // call returns, and the next call waits for it in any case. The context is this one's.
        done(unsafe { libc::syscall(libc::SYS_io_submit, *context, 1, requests.as_mut_ptr()) })?;
        let mut events = [Event::default()];
        let no_limit = ptr::null_mut::<libc::timespec>();
        loop {
            // SAFETY: there is room for one event; the request that was submitted is the only one. Nothing but itself is waited for.
            let got = done(unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    *context,
                    1,
                    1,
                    events.as_mut_ptr(),
                    no_limit,
                )
            });
            match got {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                got => return got.map(drop),
            }
        }
    }
}

impl Drop for Raiser {
    fn drop(&mut self) {
        let context = *self.context.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is this one's, and nobody uses it any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    }
}
