//! The subcommands, one module each. None knows another.

#[cfg(feature = "demo")]
pub(crate) mod demo;
pub(crate) mod device;
pub(crate) mod doctor;
pub(crate) mod estimate;
pub(crate) mod explain;
pub(crate) mod fleet;
pub(crate) mod manual;
pub(crate) mod run;
pub(crate) mod set;
pub(crate) mod stat;
pub(crate) mod store;
pub(crate) mod top;
