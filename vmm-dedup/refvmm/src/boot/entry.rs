//! How a guest is entered, and where things lie in its memory.

use vm_memory::GuestAddress;

/// How the first vCPU enters the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// 32-bit, with the start info's address in rbx.
    Pvh(GuestAddress),
    /// 64-bit, with the zero page's address in rsi.
    Linux64(GuestAddress),
}

/// A range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) size: u64,
}
