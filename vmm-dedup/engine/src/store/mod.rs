//! The page store, seen from a service: the connection, and the announcement of VMs that have no service.

pub(crate) mod connection;
pub(crate) mod refusal;
pub(crate) mod session;
mod stranger;
pub(crate) mod told_segments;
