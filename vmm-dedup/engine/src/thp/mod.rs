//! Huge and small pages side by side: which huge pages to split, to keep, and to build again.

pub(crate) mod collapse;
pub(crate) mod duplicates;
pub(crate) mod monitor;
pub(crate) mod policy;
pub(crate) mod pressure;
pub(crate) mod shared_huge;
pub(crate) mod split;
pub(crate) mod twin_count;
pub(crate) mod zeros;
