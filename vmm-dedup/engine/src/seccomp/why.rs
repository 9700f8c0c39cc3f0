//! When rare calls are made.

/// When a part of the engine makes a call that it does not make in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Why {
    /// Something fails in the middle: whoever works on guest memory puts back, tries again or gives up, in another way if need be; a
    /// store is lost; or the scanning thread has died, and others clean up behind it.
    Trouble,
    /// The host has no /dev/userfaultfd.
    NoDevice,
    /// The bitmap of idle pages tells the use of memory, on kernels that have it, with CAP_SYS_ADMIN.
    IdleBitmap,
    /// DAMON does, on kernels that have it, with CAP_SYS_ADMIN.
    KernelDamon,
    /// Open files lie on an overlayfs, whose layers are looked at, or are registered with an io_uring.
    OpenFiles,
    /// A thread is started by a C library, or on a kernel, before clone3.
    Threads,
    /// The thread panics, by a bug: the trace is written, with RUST_BACKTRACE from the program's own files.
    Panic,
    /// Another try a moment later: a page is busy, memory is short, /proc changes while it is read. Or a wait goes on that was
    /// stopped in the middle (a debugger, a snapshot of the host).
    Again,
    /// A lock is contended.
    Locks,
    /// The allocator needs more memory, or its heap shrinks; and while pages are healed memory's lock is waited for, by a call that
    /// does nothing else.
    Allocator,
    /// The C library is not the one that the table was recorded with (glibc 2.36): musl, or an older glibc.
    OtherLibrary,
}
