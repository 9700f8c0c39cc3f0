//! How a program in a guest marks its own memory.
//!
//! ```no_run
//! use vmm_dedup_hints::{Hints, Mark};
//!
//! # fn main() -> Result<(), vmm_dedup_hints::Error> {
//! let key = vec![0_u8; 4096];
//! let hints = Hints::connect()?;
//! // Returns when nothing of the key's pages is shared, nor will be.
//! hints.mark(Mark::Never, &key)?;
//! # Ok(())
//! # }
//! ```
//!
//! Marks count for whole pages: a page that the range touches is marked. They last until they are lifted, or until the process
//! that connected ends, or until [`Hints`] is dropped. Memory that is unmapped and mapped again must be marked again.
//!
//! # Limits
//!
//! A mark that forbids sharing follows the page when the guest's kernel moves it, but only a second later. Memory that must never
//! leave the VM, whatever happens, does not belong into a guest that shares.
//!
//! # Bytes
//!
//! A socket of type `SOCK_SEQPACKET` at [`SOCKET`]. Each [`Request`] of 24 bytes is answered by a [`Reply`] of 16, in order.
//! Numbers are little-endian. `include/vmm_dedup_hints.h` has the same for C.

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Where the agent listens.
pub const SOCKET: &str = "/run/vmm-dedup-agent/hints.sock";
/// The version of the records.
pub const VERSION: u16 = 1;

/// What a program says of a range of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Mark {
    /// Worth sharing: probably the same in other VMs, and it will stay as it is.
    Worth = 1,
    /// Never to be shared: keys, passwords.
    Never = 2,
    /// About to be overwritten: not worth a look.
    Soon = 3,
    /// None of these: lifts them.
    Nothing = 4,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Status {
    /// The mark holds. One that forbids sharing is in force.
    Holds = 0,
    /// The agent has kept the mark, but no service listens: it will hold when one does.
    NoService = 1,
    /// The range is empty, or not one of this process's.
    Range = 2,
    /// The process has marked as much as it may.
    TooMuch = 3,
    /// The agent may not see where the memory of this process lies.
    Rights = 4,
    /// A record that the agent does not know.
    Unknown = 5,
}

/// Bytes of a request.
pub const REQUEST: usize = 24;
/// Bytes of a reply.
pub const REPLY: usize = 16;

/// A range of addresses of the process that asks, and what it says of it.
///
/// Bytes: version (u16), mark (u16), 0 (u32), address (u64), length in bytes (u64).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What.
    pub mark: Mark,
    /// First address.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

impl Request {
    /// The record.
    #[must_use]
    pub fn to_bytes(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..2].copy_from_slice(&VERSION.to_le_bytes());
        bytes[2..4].copy_from_slice(&(self.mark as u16).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads a record.
    ///
    /// # Errors
    /// The status to reply.
    pub fn parse(bytes: &[u8]) -> Result<Self, Status> {
        let bytes: &[u8; REQUEST] = bytes.try_into().map_err(|_| Status::Unknown)?;
        let [v0, v1, m0, m1, r0, r1, r2, r3, rest @ ..] = *bytes;
        if u16::from_le_bytes([v0, v1]) != VERSION || [r0, r1, r2, r3] != [0; 4] {
            return Err(Status::Unknown);
        }
        let mark = match u16::from_le_bytes([m0, m1]) {
            1 => Mark::Worth,
            2 => Mark::Never,
            3 => Mark::Soon,
            4 => Mark::Nothing,
            _ => return Err(Status::Unknown),
        };
        let number = |at: usize| {
            rest[at..at + 8]
                .iter()
                .rev()
                .fold(0, |n, b| n << 8 | u64::from(*b))
        };
        Ok(Self {
            mark,
            address: number(0),
            length: number(8),
        })
    }
}

/// The answer.
///
/// Bytes: version (u16), status (u16), 0 (u32), pages that are marked and in memory (u64).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What came of it.
    pub status: Status,
    /// Pages of the range that are in memory, and so are marked.
    pub pages: u64,
}

impl Reply {
    /// The record.
    #[must_use]
    pub fn to_bytes(self) -> [u8; REPLY] {
        let mut bytes = [0; REPLY];
        bytes[..2].copy_from_slice(&VERSION.to_le_bytes());
        bytes[2..4].copy_from_slice(&(self.status as u16).to_le_bytes());
        bytes[8..].copy_from_slice(&self.pages.to_le_bytes());
        bytes
    }

    /// Reads a record; `None` if it is none of this version.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [v0, v1, s0, s1, _, _, _, _, pages @ ..] = *<&[u8; REPLY]>::try_from(bytes).ok()?;
        let status = match u16::from_le_bytes([s0, s1]) {
            0 => Status::Holds,
            1 => Status::NoService,
            2 => Status::Range,
            3 => Status::TooMuch,
            4 => Status::Rights,
            5 => Status::Unknown,
            _ => return None,
        };
        let pages = u64::from_le_bytes(pages);
        (u16::from_le_bytes([v0, v1]) == VERSION).then_some(Self { status, pages })
    }
}

/// Why a range is not marked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent.
    #[error("the agent's socket {path} cannot be used: {error} (does vmm-dedup-agent run?)")]
    Socket {
        /// Where.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// The agent does not do it.
    #[error("the agent answered {0:?}")]
    Refused(Status),
    /// An answer of another release.
    #[error("the agent's answer is none of version {VERSION}: use one release of both")]
    Answer,
}

/// A connection to the agent, and all marks that were made by it.
#[derive(Debug)]
pub struct Hints {
    socket: OwnedFd,
    path: PathBuf,
}

impl Hints {
    /// Connects to the agent.
    ///
    /// # Errors
    /// [`Error::Socket`].
    pub fn connect() -> Result<Self, Error> {
        Self::connect_to(Path::new(SOCKET))
    }

    /// Connects to an agent that listens elsewhere.
    ///
    /// # Errors
    /// [`Error::Socket`].
    pub fn connect_to(path: &Path) -> Result<Self, Error> {
        let connect = || {
            let socket = rustix::net::socket_with(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        let path = path.to_owned();
        match connect() {
            Ok(socket) => Ok(Self { socket, path }),
            Err(error) => Err(failed(&path, error)),
        }
    }

    /// Marks the pages that this memory touches, and waits until the mark holds. Returns how many of them are in memory: pages
    /// that nothing was written to yet may not be.
    ///
    /// # Errors
    /// [`Error`]; with [`Status::NoService`] the mark is kept and will hold later.
    pub fn mark<T>(&self, mark: Mark, memory: &[T]) -> Result<u64, Error> {
        let range = memory.as_ptr_range();
        let (address, end) = (range.start.addr() as u64, range.end.addr() as u64);
        let length = end - address;
        let request = Request {
            mark,
            address,
            length,
        };
        let io = |error| failed(&self.path, error);
        rustix::net::send(&self.socket, &request.to_bytes(), SendFlags::NOSIGNAL).map_err(io)?;
        let mut bytes = [0; REPLY];
        let (_, read) = loop {
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other.map_err(io)?,
            }
        };
        let reply = Reply::parse(bytes.get(..read).unwrap_or_default()).ok_or(Error::Answer)?;
        match reply.status {
            Status::Holds => Ok(reply.pages),
            other => Err(Error::Refused(other)),
        }
    }
}

fn failed(path: &Path, error: rustix::io::Errno) -> Error {
    Error::Socket {
        path: path.to_owned(),
        error: error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_out_as_they_went_in() {
        for mark in [Mark::Worth, Mark::Never, Mark::Soon, Mark::Nothing] {
            let request = Request {
                mark,
                address: 0x7fff_0123_4567,
                length: u64::MAX,
            };
            assert_eq!(Request::parse(&request.to_bytes()), Ok(request));
        }
        for status in [Status::Holds, Status::NoService, Status::TooMuch, Status::Unknown] {
            let reply = Reply { status, pages: 77 };
            assert_eq!(Reply::parse(&reply.to_bytes()), Some(reply));
        }
    }

    #[test]
    fn records_of_other_versions_and_lengths_are_refused() {
        let request = Request {
            mark: Mark::Never,
            address: 1,
            length: 1,
        };
        for (at, value) in [(0, 2), (2, 5), (2, 0), (4, 1)] {
            let mut bytes = request.to_bytes();
            bytes[at] = value;
            assert_eq!(Request::parse(&bytes), Err(Status::Unknown));
        }
        let bytes = request.to_bytes();
        assert!(
            Request::parse(&bytes[1..]).is_err() && Request::parse(&[&bytes[..], &[0]].concat()).is_err()
        );
        assert_eq!(Reply::parse(&[0; REPLY]), None);
    }

    #[test]
    fn without_an_agent_it_says_what_is_missing() {
        let error = Hints::connect_to(Path::new("/nonexistent/hints.sock")).unwrap_err();
        assert!(error.to_string().contains("does vmm-dedup-agent run?"), "{error}");
    }
}
