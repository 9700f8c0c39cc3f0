//! What every codec is.

use super::error::{PackError, RebuildError};
use super::kind::Kind;
use crate::page::Page;

/// A way to pack pages. The caller gives all memory that comes out.
///
/// Duties of a codec: what `pack` wrote, `rebuild` makes the same page of, given the same base. Bytes that it never wrote end
/// in an error or in some page; there is no panic, and nothing is written but the page. Whether a base is given beyond what
/// [`Kind::needs_base`] says makes no difference. The suite in `conformance` (feature `conformance`) holds codecs to that.
///
/// Duties of the caller: a base stays as it is for as long as pages are packed with it.
pub trait Codec: Send {
    /// Which one it is.
    fn kind(&self) -> Kind;

    /// Packs `page` into the front of `into`; returns the bytes written. The rest of `into` may be overwritten.
    ///
    /// # Errors
    /// [`PackError`]; `into` may be overwritten then.
    fn pack(&mut self, page: &Page, base: Option<&Page>, into: &mut [u8]) -> Result<usize, PackError>;

    /// Makes the page again of the very bytes that `pack` returned.
    ///
    /// # Errors
    /// [`RebuildError`]; what `page` holds is not defined then.
    fn rebuild(&mut self, packed: &[u8], base: Option<&Page>, page: &mut Page) -> Result<(), RebuildError>;
}
