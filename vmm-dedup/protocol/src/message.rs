//! Messages between service and store. docs/protocol.md describes the exchange; this module is the wire format.
//!
//! One message is one `SOCK_SEQPACKET` record: a [`Header`] and a body. Numbers are little-endian (both sides run on
//! one host). A record whose length, version or counts do not fit is an [`Malformed`] error and ends the connection;
//! parsing copies nothing and allocates only what was received.

mod account;
mod batch;
mod record;

pub use crate::malformed::{Malformed, VERSION};
pub use account::{Stats, StatsRequest, StoreStats};
pub use batch::{Ask, Batch, RefDelta, Staged, Wish, encode_batch};
pub use record::{Header, Kind, MAGIC, MAX_AMBIGUOUS, MAX_BATCH, MAX_GAP, MAX_MESSAGE, encode};

use crate::control::{Explain, Explained, NotDone, Set};
use crate::name::Name;
use crate::refusal::{Refused, plain};
use crate::sizes::{MAX_SLOTS, SLOTS_PER_SEGMENT, STAGING_PAGES};
use crate::stats::ServiceStats;
use batch::parse_batch;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Role {
    /// A dedup service.
    Service = 1,
    /// Someone who asks: for statistics, or a VM to change or explain something.
    Observer = 2,
}

// A store reads what services of its own release wrote. Who changes the layout gives it a new version together with this size.
const _: () = assert!(VERSION == 15 && size_of::<ServiceStats>() == 2592);

/// service → store, first message of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Hello {
    /// Guest pages of this VM; bounds its sightings and references.
    pub pages: u64,
    /// A [`Role`].
    pub role: u32,
    reserved: u32,
    name: Name,
}

impl Hello {
    /// A greeting.
    pub fn new(role: Role, name: &str, pages: u64) -> Self {
        Self {
            pages,
            role: role as u32,
            reserved: 0,
            name: Name::new(name),
        }
    }

    /// The VM's name.
    pub fn name(&self) -> String {
        self.name.text()
    }

    /// The role, if it is one.
    pub fn role(&self) -> Result<Role, Malformed> {
        match self.role {
            1 => Ok(Role::Service),
            2 => Ok(Role::Observer),
            other => Err(Malformed::Value {
                field: "role",
                value: other.into(),
            }),
        }
    }
}

/// store → service, with two descriptors: the index and the staging buffer (read-write, [`STAGING_PAGES`] pages).
/// An observer gets no descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Welcome {
    /// The trust domain's salt.
    pub salt: u64,
    /// Names this store process; a service that finds another one after reconnecting starts afresh.
    pub incarnation: u64,
    /// Names this membership among all that the store process has had; 0 for who is no member.
    pub membership: u64,
    /// Bytes of the index file.
    pub index_bytes: u64,
    /// 1: the store shares securely, so that nothing of it may be mapped into a guest; else 0.
    pub secure: u64,
}

/// A record, parsed.
#[derive(Debug)]
#[allow(missing_docs)] // each is described at its body
pub enum Message<'a> {
    Hello(Hello),
    Welcome(Welcome),
    Batch(Batch<'a>),
    /// What is wanted of the batch's sightings: [`Ask`].
    BatchReply(&'a [u32]),
    /// [`Staged`] pages that lie in the staging buffer, from its first page on.
    Publish(&'a [u64]),
    /// A slot number for each page of the `Publish`, or [`NO_SLOT`].
    Published(&'a [u32]),
    Report(&'a ServiceStats),
    StatsRequest(StatsRequest),
    Stats(&'a Stats),
    /// A segment of the store, with its descriptor (read-only).
    Segment(u32),
    /// A segment that has no slots in use any more: unmap it, and answer with `Released`.
    SegmentRetired(u32),
    /// The pages in use of a segment have moved; where, tells [`forward`](mod@crate::forward).
    Evacuated(u32),
    /// The service's process maps nothing of a retired segment any more, and names none of its slots again.
    Released(u32),
    /// A new index file of that many bytes, with its descriptor.
    Index(u64),
    /// Why the store closes the connection, made safe as all texts of peers.
    Error(String),
    /// A refused VM announces itself (instead of a `Hello`), or is explained.
    Refused(Refused),
    Set(Set),
    Explain(Explain),
    /// A `Set` of this serial number is done.
    Done(u64),
    Explained(Explained),
    NotDone(NotDone),
    /// The service's last message: its process maps no slot that it knows from this connection.
    Goodbye,
    /// The service's process maps no slot that it knows from an earlier connection, which had this [`Welcome::membership`].
    TakeOver(u64),
}

/// In a `Published`: this page got no slot (the store is full, or its content did not have the announced key).
pub const NO_SLOT: u32 = u32::MAX;

/// Parses one record. `buffer` should be 8-byte aligned ([`aligned_buffer`]).
pub fn parse(buffer: &[u8]) -> Result<Message<'_>, Malformed> {
    let length = || Malformed::Length { got: buffer.len() };
    let (header, body) = Header::ref_from_prefix(buffer).map_err(|_| length())?;
    if header.magic != MAGIC {
        return Err(Malformed::Magic(header.magic));
    }
    if header.version != VERSION {
        return Err(Malformed::Version(header.version));
    }
    if header.len as usize != buffer.len() || buffer.len() > MAX_MESSAGE {
        return Err(length());
    }
    let kind = Kind::try_new(header.kind).ok_or(Malformed::Kind(header.kind))?;
    Ok(match kind {
        Kind::Hello => Message::Hello(Hello::read_from_bytes(body).map_err(|_| length())?),
        Kind::Welcome => Message::Welcome(Welcome::read_from_bytes(body).map_err(|_| length())?),
        Kind::Batch => Message::Batch(parse_batch(body).ok_or_else(length)?),
        Kind::BatchReply => Message::BatchReply(list(body, MAX_BATCH).ok_or_else(length)?),
        Kind::Publish => Message::Publish(list(body, STAGING_PAGES).ok_or_else(length)?),
        Kind::Published => Message::Published(list(body, STAGING_PAGES).ok_or_else(length)?),
        Kind::Report => Message::Report(ServiceStats::ref_from_bytes(body).map_err(|_| length())?),
        Kind::StatsRequest => {
            Message::StatsRequest(StatsRequest::read_from_bytes(body).map_err(|_| length())?)
        }
        Kind::Stats => Message::Stats(Stats::ref_from_bytes(body).map_err(|_| length())?),
        Kind::Segment => Message::Segment(segment(body).ok_or_else(length)?),
        Kind::SegmentRetired => Message::SegmentRetired(segment(body).ok_or_else(length)?),
        Kind::Evacuated => Message::Evacuated(segment(body).ok_or_else(length)?),
        Kind::Released => Message::Released(segment(body).ok_or_else(length)?),
        Kind::Index => Message::Index(u64::read_from_bytes(body).map_err(|_| length())?),
        Kind::Error => Message::Error(plain(&String::from_utf8_lossy(body))),
        Kind::Refused => Message::Refused(Refused::parse(body, buffer.len())?),
        Kind::Set => Message::Set(Set::parse(body, buffer.len())?),
        Kind::Explain => Message::Explain(Explain::read_from_bytes(body).map_err(|_| length())?),
        Kind::Done => Message::Done(u64::read_from_bytes(body).map_err(|_| length())?),
        Kind::Explained => Message::Explained(Explained::parse(body, buffer.len())?),
        Kind::NotDone => Message::NotDone(NotDone::parse(body, buffer.len())?),
        Kind::Goodbye if body.is_empty() => Message::Goodbye,
        Kind::Goodbye => return Err(length()),
        Kind::TakeOver => Message::TakeOver(u64::read_from_bytes(body).map_err(|_| length())?),
    })
}

fn segment(body: &[u8]) -> Option<u32> {
    let index = u32::read_from_bytes(body).ok()?;
    (index < MAX_SLOTS / SLOTS_PER_SEGMENT).then_some(index)
}

fn list<T: FromBytes + KnownLayout + Immutable>(body: &[u8], max: usize) -> Option<&[T]> {
    let items = <[T]>::ref_from_bytes(body).ok()?;
    (items.len() <= max).then_some(items)
}

/// A receive buffer of [`MAX_MESSAGE`] bytes with the alignment that [`parse`] wants.
pub fn aligned_buffer() -> Vec<u64> {
    vec![0; MAX_MESSAGE / 8]
}

#[cfg(test)]
mod tests;
