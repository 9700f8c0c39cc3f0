//! What can go wrong, and what to do about it.

use crate::epochs::EpochViolation;
use crate::lifetime::ReferenceViolation;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use vmm_dedup_protocol::index::IndexError;
use vmm_dedup_protocol::message::Malformed;

/// Why the store cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration value is out of range.
    #[error("{field} is {value}: {hint}")]
    Config {
        /// Which value.
        field: &'static str,
        /// What it is.
        value: String,
        /// What it should be.
        hint: &'static str,
    },
    /// The directory of the socket is missing.
    #[error("the directory {0} does not exist: create it, owned by the user that runs the store")]
    NoDirectory(PathBuf),
    /// Another store is alive.
    #[error("a store is already listening on {0}: stop it, or choose another socket path")]
    InUse(PathBuf),
    /// Something else lies where the socket should be.
    #[error("{0} exists and is not a socket: remove it, or choose another socket path")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {path}: check the path's permissions")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The metrics address cannot be bound.
    #[error("cannot serve metrics on {address}: choose another address, or switch metrics off")]
    Metrics {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The index cannot be made.
    #[error("the shared index cannot be created: is there memory left?")]
    Index(#[source] IndexError),
    /// A memfd, random numbers or another resource of the kernel cannot be had.
    #[error("the kernel refused memory or a descriptor: check the limits on memory and open files")]
    Memory(#[source] io::Error),
}

/// What a peer did that ends its connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Epoch(#[from] EpochViolation),
    #[error(transparent)]
    Reference(#[from] ReferenceViolation),
    #[error("not expected here: {0}")]
    Unexpected(&'static str),
    #[error("{pages} pages were announced, this store takes VMs of 1 to {max}: raise max_vm_pages")]
    Pages { pages: u64, max: u64 },
    #[error("{count} {what} for {pages} announced pages: announce all pages, withdraw what changed")]
    TooMany {
        what: &'static str,
        count: u64,
        pages: u64,
    },
    #[error(
        "process {pid} has {count} connections, live or broken, the most that one process may have: restart it"
    )]
    TooManyConnections { pid: u32, count: usize },
    #[error("the store has {0} connections, as many as it takes: raise max_connections")]
    Full(usize),
    #[error("no Hello came within {0:?}")]
    Silent(std::time::Duration),
    #[error("a message that cannot be read")]
    Unreadable(#[source] io::Error),
    #[error("the store cannot get memory or descriptors: {0}")]
    Resources(#[source] Error),
}
