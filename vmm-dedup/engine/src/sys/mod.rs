//! The kernel's interfaces, one module each. All of the engine's unsafe code is here; errnos are translated into
//! meaning once, at this border.

pub(crate) mod bell;
pub(crate) mod guest;
pub(crate) mod huge_scratch;
pub(crate) mod page_size;
pub(crate) mod pagemap;
pub(crate) mod proc;
pub(crate) mod relocate;
pub(crate) mod sched;
pub(crate) mod uffd;
pub(crate) mod vma;
