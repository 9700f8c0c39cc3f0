//! Messages between service and store. docs/protocol.md describes the exchange; this module is the wire format.
//!
//! One message is one `SOCK_SEQPACKET` record: a [`Header`] and a body. Numbers are little-endian (both sides run on
//! one host). A record whose length, version or counts do not fit is an [`Malformed`] error and ends the connection;
//! parsing copies nothing and allocates only what was received.

use crate::control::{Explain, Explained, NotDone, Set};
use crate::key::Key;
use crate::name::Name;
use crate::refusal::Refused;
use crate::stats::ServiceStats;
use crate::{MAX_SLOTS, STAGING_PAGES, Slot};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// "vmd1".
pub const MAGIC: u32 = 0x3164_6d76;
/// Version of everything in this crate. Peers of another version are refused.
pub const VERSION: u16 = 3;
/// Longest record, below the default socket buffer.
pub const MAX_MESSAGE: usize = 64 << 10;
/// Most sightings, withdrawals and reference changes in one batch, each.
pub const MAX_BATCH: usize = 2048;
/// Most ambiguous keys in one batch.
pub const MAX_AMBIGUOUS: usize = 512;
/// Longest gap between guest pages that the layout of slots repeats.
pub const MAX_GAP: u16 = 7;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Role {
    /// A dedup service.
    Service = 1,
    /// Someone who asks: for statistics, or a VM to change or explain something.
    Observer = 2,
}

/// Kinds of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs)] // each is described at its body
pub enum Kind {
    Hello = 1,
    Welcome = 2,
    Batch = 3,
    BatchReply = 4,
    Publish = 5,
    Published = 6,
    Report = 7,
    StatsRequest = 8,
    Stats = 9,
    Segment = 10,
    SegmentRetired = 11,
    Index = 12,
    Error = 13,
    Refused = 14,
    Set = 15,
    Explain = 16,
    Done = 17,
    Explained = 18,
    NotDone = 19,
    Goodbye = 20,
}

impl Kind {
    fn try_new(raw: u16) -> Option<Self> {
        use Kind::*;
        let all = [
            Hello,
            Welcome,
            Batch,
            BatchReply,
            Publish,
            Published,
            Report,
            StatsRequest,
            Stats,
            Segment,
            SegmentRetired,
            Index,
            Error,
            Refused,
            Set,
            Explain,
            Done,
            Explained,
            NotDone,
            Goodbye,
        ];
        all.into_iter().find(|kind| *kind as u16 == raw)
    }
}

/// Start of every record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    magic: u32,
    version: u16,
    kind: u16,
    /// Bytes of the whole record.
    len: u32,
    reserved: u32,
}

const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 16);

/// A record that breaks the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Too short, too long, or its length field lies.
    #[error("a message of {got} bytes, which does not fit its kind and counts")]
    Length {
        /// Bytes received.
        got: usize,
    },
    /// Not our protocol at all.
    #[error("the peer does not speak this protocol (magic {0:#x}): is the socket that of a vmm-dedup store?")]
    Magic(u32),
    /// Another release.
    #[error(
        "the peer speaks protocol version {0}, this side version {VERSION}: use one release on both sides"
    )]
    Version(u16),
    /// Unknown kind.
    #[error("unknown message kind {0}")]
    Kind(u16),
    /// A field outside its range.
    #[error("{field} is {value}, out of range")]
    Value {
        /// Which field.
        field: &'static str,
        /// What it was.
        value: u64,
    },
}

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
    /// Bytes of the index file.
    pub index_bytes: u64,
}

/// service → store: what happened since the last batch. Followed by sightings, withdrawals and ambiguous line keys
/// (`u64` keys each) and reference changes. Answered by a `BatchReply`: the indices (`u32`) of those sightings whose pages the service is
/// asked to publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct BatchHead {
    epoch: u64,
    sightings: u32,
    withdrawals: u32,
    refs: u32,
    ambiguous: u32,
}

/// A change of the number of a VM's pages that map a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RefDelta {
    /// The slot's number.
    pub slot: u32,
    /// Pages more (or less, if negative).
    pub delta: i32,
}

/// A parsed batch, viewed in place.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The index epoch that the service had seen before the lookups whose outcome this batch reports.
    pub epoch: u64,
    sightings: &'a [u64],
    withdrawals: &'a [u64],
    ambiguous: &'a [u64],
    refs: &'a [RefDelta],
}

impl<'a> Batch<'a> {
    /// Keys of pages that are new, and unique as far as the service knows.
    pub fn sightings(&self) -> impl ExactSizeIterator<Item = Result<Key, Malformed>> + 'a {
        self.sightings.iter().map(|raw| key(*raw))
    }

    /// Keys sighted earlier whose pages changed or went.
    pub fn withdrawals(&self) -> impl ExactSizeIterator<Item = Result<Key, Malformed>> + 'a {
        self.withdrawals.iter().map(|raw| key(*raw))
    }

    /// Line keys of pages that differ from the only slot that the index has for the key.
    pub fn ambiguous(&self) -> impl ExactSizeIterator<Item = Result<Key, Malformed>> + 'a {
        self.ambiguous.iter().map(|raw| key(*raw))
    }

    /// Reference changes.
    pub fn refs(&self) -> impl ExactSizeIterator<Item = Result<(Slot, i32), Malformed>> + 'a {
        self.refs.iter().map(|r| Ok((slot(r.slot)?, r.delta)))
    }
}

/// A page in the staging buffer, as a `Publish` lists it: its key, in the 15 bits above that the gap before it, and in
/// the top bit whether a series is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// What the service knows the page by: a line key or a whole-page key.
    pub key: Key,
    /// Guest pages between the page listed before and this one, if that is at most [`MAX_GAP`]; else 0. The store
    /// leaves as many slots between them, so that guests of the same layout can map both in one piece.
    pub gap: u16,
    /// The page is in a slot already, and in so many neighbours in the guest that a series of slots
    /// ([`SERIES`](crate::SERIES)) is worth its memory. The store need not make one.
    pub series: bool,
}

const GAP_SHIFT: u32 = 48;
const SERIES_BIT: u64 = 1 << 63;

impl Staged {
    /// Parses an item of a list.
    ///
    /// # Errors
    /// [`Malformed::Value`].
    pub fn try_new(raw: u64) -> Result<Self, Malformed> {
        let series = raw & SERIES_BIT != 0;
        let gap = ((raw & !SERIES_BIT) >> GAP_SHIFT) as u16;
        if gap > MAX_GAP {
            let (field, value) = ("gap", gap.into());
            return Err(Malformed::Value { field, value });
        }
        let key = key(raw & ((1 << GAP_SHIFT) - 1))?;
        Ok(Self { key, gap, series })
    }

    /// The item of a list.
    pub fn raw(self) -> u64 {
        let series = if self.series { SERIES_BIT } else { 0 };
        self.key.raw() | u64::from(self.gap) << GAP_SHIFT | series
    }
}

/// Asks for the statistics of the next VM of the store's list; the answer is a [`Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct StatsRequest {
    /// 0 for the first VM, then [`Stats::next`]. A number of the store's that stays a VM's while it is connected, not a
    /// position: VMs that come and go between two questions hide no other.
    pub from: u32,
    /// Zero.
    pub reserved: u32,
}

/// The store's own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct StoreStats {
    /// Slots in use (KSM: pages_shared).
    pub pages_shared: u64,
    /// Pages that map a slot, beyond the first of each slot (KSM: pages_sharing).
    pub pages_sharing: u64,
    /// Slots whose last reference went and which wait for the services' epochs.
    pub slots_limbo: u64,
    /// Slots the store may have.
    pub slots_max: u64,
    /// Bytes of slots that are resident, in use or not.
    pub resident_bytes: u64,
    /// Keys sighted once.
    pub sightings: u64,
    /// Line keys marked as ambiguous.
    pub marks: u64,
    /// Bytes of index, sightings, references and slot bookkeeping.
    pub metadata_bytes: u64,
    /// CPU nanoseconds of the store process, user and system.
    pub cpu_ns: u64,
    /// Publications refused since the store is full.
    pub refused_full_total: u64,
    /// Connections closed because of malformed messages.
    pub malformed_total: u64,
    /// Pages published.
    pub published_total: u64,
    /// Net bytes saved: what sharing and zero pages save, less all metadata of store and services and the kernel
    /// memory of the VMAs. Negative as two's complement.
    pub saved_net_bytes: u64,
    /// The current epoch.
    pub epoch: u64,
}

/// Answer to a [`StatsRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Stats {
    /// Number of VMs connected, refused ones among them.
    pub vms: u32,
    /// Where to ask for the next VM; 0 if there was none at or after the place asked for, and this is of no VM.
    pub next: u32,
    /// The store.
    pub store: StoreStats,
    /// The VM's name.
    pub name: Name,
    /// The VM's process.
    pub pid: u64,
    /// Why the VM is refused: the number of a [`crate::refusal::Reason`]; 0 if it is not.
    pub reason: u64,
    /// Net bytes that the VM saves: its part of the store's `saved_net_bytes`. Negative as two's complement.
    pub saved_net_bytes: u64,
    /// The VM, as it reported last.
    pub vm: ServiceStats,
}

/// A record, parsed.
#[derive(Debug)]
#[allow(missing_docs)] // each is described at its body
pub enum Message<'a> {
    Hello(Hello),
    Welcome(Welcome),
    Batch(Batch<'a>),
    /// Indices into the batch's sightings.
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
    /// A segment that has no slots in use any more: unmap it.
    SegmentRetired(u32),
    /// A new index file of that many bytes, with its descriptor.
    Index(u64),
    /// Why the store closes the connection.
    Error(&'a str),
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
}

/// In a `Published`: this page got no slot (the store is full, or its content did not have the announced key).
pub const NO_SLOT: u32 = u32::MAX;

fn key(raw: u64) -> Result<Key, Malformed> {
    Key::try_new(raw).ok_or(Malformed::Value {
        field: "key",
        value: raw,
    })
}

fn slot(raw: u32) -> Result<Slot, Malformed> {
    Slot::try_new(raw).ok_or(Malformed::Value {
        field: "slot",
        value: raw.into(),
    })
}

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
        Kind::Index => Message::Index(u64::read_from_bytes(body).map_err(|_| length())?),
        Kind::Error => Message::Error(std::str::from_utf8(body).unwrap_or("(unreadable)")),
        Kind::Refused => Message::Refused(Refused::parse(body, buffer.len())?),
        Kind::Set => Message::Set(Set::parse(body, buffer.len())?),
        Kind::Explain => Message::Explain(Explain::read_from_bytes(body).map_err(|_| length())?),
        Kind::Done => Message::Done(u64::read_from_bytes(body).map_err(|_| length())?),
        Kind::Explained => Message::Explained(Explained::parse(body, buffer.len())?),
        Kind::NotDone => Message::NotDone(NotDone::parse(body, buffer.len())?),
        Kind::Goodbye if body.is_empty() => Message::Goodbye,
        Kind::Goodbye => return Err(length()),
    })
}

fn segment(body: &[u8]) -> Option<u32> {
    let index = u32::read_from_bytes(body).ok()?;
    (index < MAX_SLOTS / crate::SLOTS_PER_SEGMENT).then_some(index)
}

fn list<T: FromBytes + KnownLayout + Immutable>(body: &[u8], max: usize) -> Option<&[T]> {
    let items = <[T]>::ref_from_bytes(body).ok()?;
    (items.len() <= max).then_some(items)
}

fn parse_batch(body: &[u8]) -> Option<Batch<'_>> {
    let (head, rest) = BatchHead::ref_from_prefix(body).ok()?;
    let counts = [head.sightings, head.withdrawals, head.refs, head.ambiguous].map(|n| n as usize);
    if counts.iter().any(|n| *n > MAX_BATCH) || counts[3] > MAX_AMBIGUOUS {
        return None;
    }
    let (sightings, rest) = <[u64]>::ref_from_prefix_with_elems(rest, counts[0]).ok()?;
    let (withdrawals, rest) = <[u64]>::ref_from_prefix_with_elems(rest, counts[1]).ok()?;
    let (ambiguous, rest) = <[u64]>::ref_from_prefix_with_elems(rest, counts[3]).ok()?;
    let refs = <[RefDelta]>::ref_from_bytes_with_elems(rest, counts[2]).ok()?;
    Some(Batch {
        epoch: head.epoch,
        sightings,
        withdrawals,
        ambiguous,
        refs,
    })
}

/// A receive buffer of [`MAX_MESSAGE`] bytes with the alignment that [`parse`] wants.
pub fn aligned_buffer() -> Vec<u64> {
    vec![0; MAX_MESSAGE / 8]
}

/// Builds one record of `kind` from the parts of its body.
pub fn encode(kind: Kind, parts: &[&[u8]]) -> Vec<u8> {
    let len = HEADER + parts.iter().map(|p| p.len()).sum::<usize>();
    assert!(len <= MAX_MESSAGE, "callers bound their lists");
    #[allow(clippy::cast_possible_truncation)] // <= MAX_MESSAGE
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        kind: kind as u16,
        len: len as u32,
        reserved: 0,
    };
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(header.as_bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

/// Builds a `Batch`. Each list holds at most [`MAX_BATCH`] items, `ambiguous` at most [`MAX_AMBIGUOUS`].
pub fn encode_batch(
    epoch: u64,
    sightings: &[u64],
    withdrawals: &[u64],
    ambiguous: &[u64],
    refs: &[RefDelta],
) -> Vec<u8> {
    #[allow(clippy::cast_possible_truncation)] // bounded by encode()
    let count = |n: usize| n as u32;
    let head = BatchHead {
        epoch,
        sightings: count(sightings.len()),
        withdrawals: count(withdrawals.len()),
        refs: count(refs.len()),
        ambiguous: count(ambiguous.len()),
    };
    let parts = [
        head.as_bytes(),
        sightings.as_bytes(),
        withdrawals.as_bytes(),
        ambiguous.as_bytes(),
        refs.as_bytes(),
    ];
    encode(Kind::Batch, &parts)
}

const _: () = assert!(HEADER + size_of::<BatchHead>() + 8 * (3 * MAX_BATCH + MAX_AMBIGUOUS) <= MAX_MESSAGE);
const _: () = assert!(HEADER + 8 * STAGING_PAGES <= MAX_MESSAGE);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Explanation, MAX_RESERVE, Settings, Switch};
    use crate::refusal::{MAX_TEXT, Reason, Refusal};
    use proptest::prelude::*;

    /// Copies into an aligned buffer, as a receiver has it.
    fn with_parsed<T>(bytes: &[u8], check: impl FnOnce(Result<Message<'_>, Malformed>) -> T) -> T {
        let mut buffer = aligned_buffer();
        let len = bytes.len().min(MAX_MESSAGE);
        buffer.as_mut_bytes()[..len].copy_from_slice(&bytes[..len]);
        check(parse(&buffer.as_bytes()[..len]))
    }

    #[test]
    fn a_batch_survives_the_wire() {
        let refs = [RefDelta { slot: 3, delta: -2 }];
        with_parsed(&encode_batch(9, &[1, 2], &[3], &[4], &refs), |message| {
            let Ok(Message::Batch(batch)) = message else {
                panic!("{message:?}")
            };
            assert_eq!(batch.epoch, 9);
            assert_eq!(
                batch.sightings().map(|k| k.unwrap().raw()).collect::<Vec<_>>(),
                [1, 2]
            );
            assert_eq!(batch.withdrawals().len(), 1);
            assert_eq!(batch.ambiguous().next().unwrap().unwrap().raw(), 4);
            assert_eq!(
                batch.refs().map(Result::unwrap).collect::<Vec<_>>(),
                [(Slot::try_new(3).unwrap(), -2)]
            );
        });
    }

    #[test]
    fn a_batch_that_lies_about_its_counts_is_refused() {
        let mut bytes = encode_batch(9, &[1, 2], &[3], &[], &[]);
        bytes[HEADER + 8] = 200;
        with_parsed(&bytes, |m| {
            assert_eq!(m.unwrap_err(), Malformed::Length { got: bytes.len() })
        });
    }

    #[test]
    fn other_versions_are_named() {
        let mut bytes = encode(Kind::Index, &[&7u64.to_le_bytes()]);
        bytes[4] = 99;
        with_parsed(&bytes, |m| assert_eq!(m.unwrap_err(), Malformed::Version(99)));
    }

    #[test]
    fn questions_and_answers_survive_the_wire() {
        let name = Name::new("web");
        let settings = Settings {
            switch: Some(Switch::OffUnmerge),
            cpu_percent: None,
            reserve_pages: Some(MAX_RESERVE),
        };
        let set = Set {
            serial: 7,
            name,
            settings,
        };
        with_parsed(&encode(Kind::Set, &[&set.body()]), |m| {
            assert!(matches!(m, Ok(Message::Set(got)) if got == set));
        });
        let explained = Explained {
            serial: u64::MAX,
            explanation: Explanation {
                foreign: 3,
                ..Explanation::default()
            },
            note: "n".repeat(MAX_TEXT),
        };
        with_parsed(&encode(Kind::Explained, &[&explained.body()]), |m| {
            assert!(matches!(m, Ok(Message::Explained(got)) if got == explained));
        });
        let not_done = NotDone {
            serial: 1,
            text: "no".into(),
        };
        with_parsed(&encode(Kind::NotDone, &[&not_done.body()]), |m| {
            assert!(matches!(m, Ok(Message::NotDone(got)) if got == not_done));
        });
        let refused = Refused {
            serial: 0,
            pages: 512,
            name,
            refusal: Refusal::new(Reason::Vfio, "device 0000:01:00.0", "detach it"),
        };
        with_parsed(&encode(Kind::Refused, &[&refused.body()]), |m| {
            assert!(matches!(m, Ok(Message::Refused(got)) if got == refused));
        });
    }

    #[test]
    fn a_goodbye_says_nothing_else() {
        with_parsed(&encode(Kind::Goodbye, &[]), |m| {
            assert!(matches!(m, Ok(Message::Goodbye)))
        });
        let more = encode(Kind::Goodbye, &[&[0]]);
        with_parsed(&more, |m| {
            assert_eq!(m.unwrap_err(), Malformed::Length { got: more.len() })
        });
    }

    #[test]
    fn settings_and_texts_out_of_range_are_refused() {
        let set = Set {
            serial: 7,
            name: Name::new("web"),
            settings: Settings {
                cpu_percent: Some(101),
                ..Settings::default()
            },
        };
        with_parsed(&encode(Kind::Set, &[&set.body()]), |m| {
            let expected = Malformed::Value {
                field: "cpu_percent",
                value: 101,
            };
            assert_eq!(m.unwrap_err(), expected);
        });
        let long = encode(Kind::NotDone, &[&[0; 8], &[b'x'; MAX_TEXT + 1]]);
        with_parsed(&long, |m| {
            assert_eq!(m.unwrap_err(), Malformed::Length { got: long.len() })
        });
    }

    proptest! {
        #[test]
        fn any_texts_of_a_refusal_are_taken_or_refused_by_length(
            lens in (0u16..1000, 0u16..1000), texts in proptest::collection::vec(any::<u8>(), 0..1100), reason in 0u32..20,
        ) {
            let refused = Refused {
                serial: 0, pages: 1, name: Name::new("x"), refusal: Refusal::new(Reason::Other, "", ""),
            };
            let mut body = refused.body();
            body[16..20].copy_from_slice(&reason.to_le_bytes());
            body[20..22].copy_from_slice(&lens.0.to_le_bytes());
            body[22..24].copy_from_slice(&lens.1.to_le_bytes());
            body.extend_from_slice(&texts);
            let fits = usize::from(lens.0) <= MAX_TEXT && usize::from(lens.1) <= MAX_TEXT
                && usize::from(lens.0) + usize::from(lens.1) == texts.len();
            let known = (1..16).contains(&reason);
            with_parsed(&encode(Kind::Refused, &[&body]), |m| {
                prop_assert_eq!(m.is_ok(), fits && known);
                Ok(())
            })?;
        }

        #[test]
        fn any_bytes_parse_or_fail_without_panic(body in proptest::collection::vec(any::<u8>(), 0..300), kind in 0u16..24) {
            let mut bytes = encode(Kind::Error, &[&body]);
            bytes[6..8].copy_from_slice(&kind.to_le_bytes());
            with_parsed(&bytes, |message| {
                if let Ok(Message::Batch(batch)) = message {
                    batch.sightings().for_each(|_| ());
                    batch.refs().for_each(|_| ());
                }
            });
        }

        #[test]
        fn any_header_parses_or_fails_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            with_parsed(&bytes, |_| ());
        }
    }
}
