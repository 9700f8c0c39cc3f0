//! LZ4 blocks, alone or with the base page as dictionary. A block has no header; its length is kept with its place.

use super::contract::Codec;
use super::error::{PackError, RebuildError};
use super::kind::Kind;
use crate::page::Page;
use lz4_flex::block::{
    CompressTable, compress_into_with_dict, compress_into_with_table, decompress_into,
    decompress_into_with_dict, get_maximum_output_size,
};
use vmm_dedup_protocol::PAGE_SIZE;

/// The codec.
pub struct Lz4 {
    kind: Kind,
    table: CompressTable,
    /// The library wants room for the worst case, whatever comes out.
    out: Box<[u8]>,
}

impl std::fmt::Debug for Lz4 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lz4")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl Lz4 {
    /// Pages by themselves.
    #[must_use]
    pub fn alone() -> Self {
        Self::of(Kind::Lz4)
    }

    /// Pages with a base as dictionary.
    #[must_use]
    pub fn patch() -> Self {
        Self::of(Kind::Lz4Patch)
    }

    fn of(kind: Kind) -> Self {
        Self {
            kind,
            table: CompressTable::small(),
            out: vec![0; get_maximum_output_size(PAGE_SIZE)].into(),
        }
    }
}

impl Codec for Lz4 {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn pack(&mut self, page: &Page, base: Option<&Page>, into: &mut [u8]) -> Result<usize, PackError> {
        let kind = self.kind;
        let length = match (kind.needs_base(), base) {
            (false, _) => compress_into_with_table(page, &mut self.out, &mut self.table),
            (true, Some(base)) => compress_into_with_dict(page, &mut self.out, base),
            (true, None) => return Err(PackError::NoBase { kind }),
        };
        let length = length.map_err(|error| PackError::Failed {
            kind,
            reason: error.to_string(),
        })?;
        let room = into.len();
        let packed = into.get_mut(..length).ok_or(PackError::TooLarge { kind, room })?;
        packed.copy_from_slice(&self.out[..length]);
        Ok(length)
    }

    fn rebuild(&mut self, packed: &[u8], base: Option<&Page>, page: &mut Page) -> Result<(), RebuildError> {
        let kind = self.kind;
        let written = match (kind.needs_base(), base) {
            (false, _) => decompress_into(packed, page),
            (true, Some(base)) => decompress_into_with_dict(packed, page, base),
            (true, None) => return Err(RebuildError::NoBase { kind }),
        };
        let reason = match written {
            Ok(PAGE_SIZE) => return Ok(()),
            Ok(written) => format!("they hold {written} bytes of a page"),
            Err(error) => error.to_string(),
        };
        Err(RebuildError::Malformed {
            kind,
            length: packed.len(),
            reason,
        })
    }
}
