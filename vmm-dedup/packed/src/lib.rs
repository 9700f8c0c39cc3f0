//! Pages that are kept packed: the parts that need no kernel.
//!
//! A page that rests and has no twin need not be kept whole. It may be kept as the 64-byte lines in which it differs from a
//! *base* page (page overlays, ISCA'15, section 4), compressed, or compressed with a base as the compressor's dictionary. The actors:
//!
//! - [`Codec`]s pack a page into a buffer of the caller's and rebuild it into a page of the caller's ([`codec`]);
//! - a [`LineIndex`] and a [`BaseSearch`] find pages that may serve as bases ([`search`]);
//! - [`Offers`] says what each codec makes of a page, and [`Rule`] which of that is best, by size and by what a rebuild costs
//!   ([`choice`]); [`Stars`] decides for many pages which of them become bases ([`stars`]);
//! - [`Segments`] keeps what was packed ([`segments`]).
//!
//! The way of a page: candidates are searched, the page is packed with each of them and without, the best offer is taken, its
//! bytes are put into a segment, the page is rebuilt from there and compared, and only then does its owner give up the original.
//!
//! Packed bytes count as hostile: whatever they are, a rebuild ends with a page or an error, and writes nothing but that page.
//!
//! Holes, known and accepted: packed bytes have no checksum of their own, so a flipped bit may rebuild another page, as it
//! would be another page in plain memory. A base is the caller's: who changes it changes all pages that were packed with it.

pub mod choice;
pub mod class;
pub mod codec;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod page;
pub mod search;
pub mod segments;
pub mod stars;

pub use choice::{Base, Candidate, Keeping, Offer, Offers, Rule, Weights};
pub use class::Class;
pub use codec::{Codec, Codecs, Kind, Kinds, PackError, RebuildError};
pub use page::{LINE_BYTES, LINES, Page, ZERO_PAGE};
pub use search::{BaseSearch, Bases, LineHashes, LineIndex, Position, Proposal, Way};
pub use segments::{Accounts, Heap, Place, SegmentBytes, Segments};
pub use stars::Stars;
