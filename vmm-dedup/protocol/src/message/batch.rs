//! What a service tells the store of its pages.

use super::record::{HEADER, Kind, MAX_AMBIGUOUS, MAX_BATCH, MAX_GAP, MAX_MESSAGE, encode};
use crate::key::Key;
use crate::malformed::Malformed;
use crate::slot::Slot;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// service → store: what happened since the last batch. Followed by sightings, withdrawals and ambiguous line keys
/// (`u64` keys each) and reference changes. Answered by a `BatchReply`: an [`Ask`] (`u32`) for each sighting of which the store wants
/// something.
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

/// What a store wants of a page that was sighted, as a `BatchReply` lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Publish it: somebody else has sighted its key.
    Publish,
    /// Look its key up again: the index has it by now, or had it and the service overlooked it. The store does not remember the
    /// sighting.
    LookUp,
}

const LOOK_UP: u32 = 1 << 31;
const _: () = assert!(MAX_BATCH < LOOK_UP as usize);

impl Ask {
    /// The item of a list, for the sighting at this place in its batch (less than [`MAX_BATCH`]).
    pub fn of(self, at: u32) -> u32 {
        match self {
            Self::Publish => at,
            Self::LookUp => at | LOOK_UP,
        }
    }

    /// The place in the batch of the sighting that an item is of, which may be any number, and what is asked.
    pub fn parse(item: u32) -> (usize, Self) {
        let ask = if item & LOOK_UP == 0 {
            Self::Publish
        } else {
            Self::LookUp
        };
        ((item & !LOOK_UP) as usize, ask)
    }
}

/// A page in the staging buffer, as a `Publish` lists it: its key, in the 14 bits above that the gap before it, and in
/// the top two bits the [`Wish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// What the service knows the page by: a line key or a whole-page key.
    pub key: Key,
    /// Guest pages between the page listed before and this one, if that is at most [`MAX_GAP`]; else 0. The store
    /// leaves as many slots between them, so that guests of the same layout can map both in one piece.
    pub gap: u16,
    /// How the page should lie in the store.
    pub wish: Wish,
}

/// What a service would like for a page. The store need not do it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// A slot like others.
    #[default]
    Slot,
    /// The page is in a slot already, and in so many neighbours in the guest that a series of slots
    /// ([`SERIES`](crate::sizes::SERIES)) is worth its memory.
    Series,
    /// This page, the first of the message, and all others of it, [`HUGE_PAGES`](crate::sizes::HUGE_PAGES) in all and without
    /// gaps, are a huge page of the guest: they should be one of the store.
    HugePage,
}

const GAP_SHIFT: u32 = 48;
const WISH_SHIFT: u32 = 62;

impl Staged {
    /// Parses an item of a list.
    ///
    /// # Errors
    /// [`Malformed::Value`].
    pub fn try_new(raw: u64) -> Result<Self, Malformed> {
        let malformed = |field, value| Malformed::Value { field, value };
        let wish = match raw >> WISH_SHIFT {
            0 => Wish::Slot,
            1 => Wish::HugePage,
            2 => Wish::Series,
            other => return Err(malformed("wish", other)),
        };
        let gap = (raw << (u64::BITS - WISH_SHIFT) >> (u64::BITS - WISH_SHIFT + GAP_SHIFT)) as u16;
        if gap > MAX_GAP {
            return Err(malformed("gap", gap.into()));
        }
        let key = key(raw & ((1 << GAP_SHIFT) - 1))?;
        Ok(Self { key, gap, wish })
    }

    /// The item of a list.
    pub fn raw(self) -> u64 {
        let wish = match self.wish {
            Wish::Slot => 0,
            Wish::HugePage => 1,
            Wish::Series => 2,
        };
        self.key.raw() | u64::from(self.gap) << GAP_SHIFT | wish << WISH_SHIFT
    }
}

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

pub(super) fn parse_batch(body: &[u8]) -> Option<Batch<'_>> {
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
