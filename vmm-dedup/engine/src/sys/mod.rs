//! The kernel's interfaces, one module each. System calls on guest memory are made here only; errnos become meaning
//! once, at this border. (Code elsewhere that reads or replaces guest pages is unsafe as well, item by item.)

pub(crate) mod asker;
pub(crate) mod bell;
#[cfg(feature = "pack")]
pub(crate) mod cache;
pub(crate) mod cpu_budget;
mod descriptors;
pub(crate) mod direct_io;
pub(crate) mod fork;
pub(crate) mod guest;
pub(crate) mod home;
#[cfg_attr(not(feature = "inject"), allow(unreachable_pub))]
pub(crate) mod inject;
pub(crate) mod late_log;
pub(crate) mod page_size;
pub(crate) mod pagemap;
pub(crate) mod pin_count;
pub(crate) mod pinners;
pub(crate) mod proc;
pub(crate) mod relocate;
pub(crate) mod sched;
pub(crate) mod shortage;
pub(crate) mod thread;
pub(crate) mod uffd;
pub(crate) mod vma;
