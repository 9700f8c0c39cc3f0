//! Huge and small pages side by side.

pub(crate) mod collapse;
pub(crate) mod duplicates;
pub(crate) mod monitor;
pub(crate) mod policy;
pub(crate) mod pressure;
pub(crate) mod shared_huge;
