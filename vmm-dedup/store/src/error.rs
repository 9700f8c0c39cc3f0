//! What can go wrong, and what to do about it.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use vmm_dedup_protocol::index::IndexError;

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
    #[error("cannot listen on {path} ({source}): check the path's permissions")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The metrics address cannot be bound.
    #[error("cannot serve metrics on {address} ({source}): choose another address, or \"none\"")]
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
