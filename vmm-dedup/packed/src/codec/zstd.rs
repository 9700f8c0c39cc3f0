//! zstd frames at level 1, alone or with the base page as dictionary. A frame tells its content's size and has no checksum.

use super::contract::Codec;
use super::error::{PackError, RebuildError};
use super::kind::Kind;
use crate::page::Page;
use vmm_dedup_protocol::PAGE_SIZE;
use zstd_safe::{CCtx, CompressionLevel, DCtx, ErrorCode, get_error_name};

/// The fastest level whose tables suit a page; higher ones gain little on 4 KiB.
const LEVEL: CompressionLevel = 1;
/// What a dictionary with tables begins with (RFC 8878, section 5). A page that begins so would be read as one.
const DICTIONARY_MAGIC: [u8; 4] = 0xEC30_A437_u32.to_le_bytes();
/// What the library says if the buffer is too small (`ZSTD_error_dstSize_tooSmall`), negated as sizes are.
const TOO_SMALL: ErrorCode = 70usize.wrapping_neg();

/// The codec.
pub struct Zstd {
    kind: Kind,
    compressor: CCtx<'static>,
    decompressor: DCtx<'static>,
}

impl std::fmt::Debug for Zstd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Zstd")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl Zstd {
    /// Pages by themselves.
    ///
    /// # Errors
    /// [`PackError::Failed`] without memory for its tables.
    pub fn alone() -> Result<Self, PackError> {
        Self::of(Kind::Zstd)
    }

    /// Pages with a base as dictionary.
    ///
    /// # Errors
    /// [`PackError::Failed`] without memory for its tables.
    pub fn patch() -> Result<Self, PackError> {
        Self::of(Kind::ZstdPatch)
    }

    fn of(kind: Kind) -> Result<Self, PackError> {
        let no_memory = || PackError::Failed {
            kind,
            reason: "no memory for its tables".to_owned(),
        };
        Ok(Self {
            kind,
            compressor: CCtx::try_create().ok_or_else(no_memory)?,
            decompressor: DCtx::try_create().ok_or_else(no_memory)?,
        })
    }
}

fn is_fit(base: &Page) -> bool {
    base[..DICTIONARY_MAGIC.len()] != DICTIONARY_MAGIC
}

impl Codec for Zstd {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn pack(&mut self, page: &Page, base: Option<&Page>, into: &mut [u8]) -> Result<usize, PackError> {
        let kind = self.kind;
        let packed = match (kind.needs_base(), base) {
            (false, _) => self.compressor.compress(into, page, LEVEL),
            (true, Some(base)) if is_fit(base) => {
                self.compressor.compress_using_dict(into, page, base, LEVEL)
            }
            (true, Some(_)) => return Err(PackError::UnfitBase { kind }),
            (true, None) => return Err(PackError::NoBase { kind }),
        };
        packed.map_err(|code| match code {
            TOO_SMALL => PackError::TooLarge {
                kind,
                room: into.len(),
            },
            code => PackError::Failed {
                kind,
                reason: get_error_name(code).to_owned(),
            },
        })
    }

    fn rebuild(&mut self, packed: &[u8], base: Option<&Page>, page: &mut Page) -> Result<(), RebuildError> {
        let kind = self.kind;
        let written = match (kind.needs_base(), base) {
            (false, _) => self.decompressor.decompress(page.as_mut_slice(), packed),
            (true, Some(base)) if is_fit(base) => {
                self.decompressor
                    .decompress_using_dict(page.as_mut_slice(), packed, base)
            }
            (true, Some(_)) => return Err(RebuildError::UnfitBase { kind }),
            (true, None) => return Err(RebuildError::NoBase { kind }),
        };
        let reason = match written {
            Ok(PAGE_SIZE) => return Ok(()),
            Ok(written) => format!("they hold {written} bytes of a page"),
            Err(code) => get_error_name(code).to_owned(),
        };
        Err(RebuildError::Malformed {
            kind,
            length: packed.len(),
            reason,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_that_looks_like_a_dictionary_with_tables_is_refused() {
        let mut base = [7; PAGE_SIZE];
        base[..4].copy_from_slice(&DICTIONARY_MAGIC);
        let mut patch = Zstd::patch().unwrap();
        let kind = Kind::ZstdPatch;
        let packed = patch.pack(&[7; PAGE_SIZE], Some(&base), &mut [0; 4096]);
        assert_eq!(packed, Err(PackError::UnfitBase { kind }));
        let rebuilt = patch.rebuild(&[0; 9], Some(&base), &mut [0; PAGE_SIZE]);
        assert_eq!(rebuilt, Err(RebuildError::UnfitBase { kind }));
    }

    #[test]
    fn a_buffer_that_is_too_small_is_told_from_other_failures() {
        let page: Page = std::array::from_fn(|i| ((i * i) >> 3).to_le_bytes()[0]);
        let packed = Zstd::alone().unwrap().pack(&page, None, &mut [0; 16]);
        assert_eq!(
            packed,
            Err(PackError::TooLarge {
                kind: Kind::Zstd,
                room: 16
            })
        );
    }
}
