//! Why a page was not packed, or not rebuilt.

use super::kind::Kind;

/// Why a page was not packed. It is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// What comes out does not fit into the room that the caller gave.
    #[error("packed by {kind} the page does not fit into {room} bytes: keep it whole")]
    TooLarge {
        /// The codec.
        kind: Kind,
        /// Bytes of the caller's buffer.
        room: usize,
    },
    /// The page is too unlike its base.
    #[error("{differing} lines differ from the base, an overlay has at most {most}: take another codec")]
    TooManyLines {
        /// Lines that differ.
        differing: u32,
        /// The codec's limit.
        most: u32,
    },
    /// The codec packs against a base, and none was given.
    #[error("{kind} packs against a base page: give one")]
    NoBase {
        /// The codec.
        kind: Kind,
    },
    /// The page cannot be a base of this codec.
    #[error("{kind} would take the base page for a dictionary with a header: take another base or codec")]
    UnfitBase {
        /// The codec.
        kind: Kind,
    },
    /// The compressor refused.
    #[error("{kind} failed ({reason}): keep the page whole")]
    Failed {
        /// The codec.
        kind: Kind,
        /// What its library says.
        reason: String,
    },
}

/// Why packed bytes did not become a page. What the page for it holds then is not defined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RebuildError {
    /// The codec packs against a base, and none was given.
    #[error("{kind} rebuilds from a base page: give the one that the page was packed with")]
    NoBase {
        /// The codec.
        kind: Kind,
    },
    /// The base cannot have been that of the page.
    #[error("{kind} never packs against this base page: give the one that the page was packed with")]
    UnfitBase {
        /// The codec.
        kind: Kind,
    },
    /// The bytes are not what the codec writes.
    #[error("{length} bytes are no page packed by {kind} ({reason})")]
    Malformed {
        /// The codec.
        kind: Kind,
        /// How many bytes there were.
        length: usize,
        /// What is wrong with them.
        reason: String,
    },
}
