//! Finding out what was written (`dirty`), and what is used (`access`, and the sources that tell it).

pub(crate) mod access;
pub(crate) mod access_source;
pub(crate) mod damon;
pub(crate) mod dirty;
pub(crate) mod fault_sampling;
pub(crate) mod page_idle;
