//! What a peer did that ends its connection. The text goes to the peer.

use crate::error::Error;
use crate::ledger::epochs::EpochViolation;
use crate::ledger::lifetime::ReferenceViolation;
use std::io;
use vmm_dedup_protocol::message::Malformed;

/// Why a connection is closed.
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
    TooManyConnections { pid: u64, count: usize },
    #[error(
        "user {uid} has {count} connections, live or broken, the most that one user may have (an eighth is kept for others): raise \
         max_connections"
    )]
    TooManyOfUser { uid: u32, count: usize },
    #[error(
        "VMs of user {uid} kept what went until others got nothing new: no VM of that user joins for {seconds} s, then try again"
    )]
    Barred { uid: u32, seconds: u32 },
    #[error("your process cannot be identified: {0}")]
    Unidentified(#[source] io::Error),
    #[error(
        "user {uid} may not join this store: start the VM as one of its users, or the store with this user on its list (--join-user)"
    )]
    Stranger { uid: u32, again: bool },
    #[error("the store has {0} connections, as many as it takes: raise max_connections")]
    Full(usize),
    #[error("no Hello came within {0:?}")]
    Silent(std::time::Duration),
    #[error(
        "your process has said nothing for a while, or has not acknowledged what left the index, and keeps files that went, or slots, of \
         which too much is kept: connect again once it goes on"
    )]
    Stopped,
    #[error("a message that cannot be read")]
    Unreadable(#[source] io::Error),
    #[error("the store cannot get memory or descriptors: {0}")]
    Resources(#[source] Error),
}
