//! All codecs together.

use super::contract::Codec;
use super::error::PackError;
use super::kind::Kind;
use super::lz4::Lz4;
use super::overlay::Overlay;
use super::zstd::Zstd;

/// One codec of each kind, with its tables.
pub struct Codecs {
    /// By the kind's number.
    all: [Box<dyn Codec>; Kind::ALL.len()],
}

impl std::fmt::Debug for Codecs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Codecs").finish_non_exhaustive()
    }
}

impl Codecs {
    /// Makes them; overlays have at most `most_lines` lines.
    ///
    /// # Errors
    /// [`PackError::Failed`] if there is no memory for their tables.
    pub fn try_new(most_lines: u32) -> Result<Self, PackError> {
        Ok(Self {
            all: [
                Box::new(Overlay::new(most_lines)),
                Box::new(Lz4::alone()),
                Box::new(Zstd::alone()?),
                Box::new(Lz4::patch()),
                Box::new(Zstd::patch()?),
            ],
        })
    }

    /// The one of a kind.
    pub fn of(&mut self, kind: Kind) -> &mut dyn Codec {
        self.all[kind.number()].as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::RebuildError;
    use crate::conformance;
    use crate::page::Page;
    use crate::page::ZERO_PAGE;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use vmm_dedup_protocol::PAGE_SIZE;

    #[test]
    fn every_codec_conforms() {
        for kind in Kind::ALL {
            conformance::codec(&mut || Box::new(Among(Codecs::try_new(64).unwrap(), kind)));
        }
    }

    #[test]
    fn overlays_beside_compression_conform() {
        conformance::codec(&mut || Box::new(Overlay::new(Overlay::MOST_LINES_BESIDE_COMPRESSION)));
    }

    #[test]
    fn each_codec_stands_under_its_kind() {
        let mut codecs = Codecs::try_new(16).unwrap();
        for kind in Kind::ALL {
            assert_eq!(codecs.of(kind).kind(), kind);
        }
    }

    /// A page made of stretches of bytes, and a base of which it differs in some stretches.
    fn page_and_base() -> impl Strategy<Value = (Page, Page)> {
        let stretch = (0..PAGE_SIZE, 0..700usize, any::<u8>(), any::<u64>());
        let stretches = || vec(stretch.clone(), 0..12);
        (stretches(), stretches()).prop_map(|(common, own)| {
            let base = drawn(&ZERO_PAGE, &common);
            (drawn(&base, &own), base)
        })
    }

    /// Draws stretches over a page: of one byte, or of random ones if that byte is odd.
    fn drawn(under: &Page, stretches: &[(usize, usize, u8, u64)]) -> Page {
        let mut page = *under;
        for (at, length, byte, seed) in stretches {
            let random = conformance::random(*seed);
            for (i, to) in page.iter_mut().enumerate().skip(*at).take(*length) {
                *to = if byte % 2 == 0 { *byte } else { random[i] };
            }
        }
        page
    }

    proptest! {
        #[test]
        fn every_page_comes_back_from_every_codec((page, base) in page_and_base()) {
            let mut codecs = Codecs::try_new(64).unwrap();
            for kind in Kind::ALL {
                conformance::round_trip(codecs.of(kind), &page, Some(&base));
            }
        }

        #[test]
        fn bytes_of_anybody_end_in_a_page_or_an_error(
            (page, base) in page_and_base(),
            flips in vec((any::<usize>(), any::<u8>()), 1..8),
            cut in 0..64usize,
        ) {
            let mut codecs = Codecs::try_new(64).unwrap();
            for kind in Kind::ALL {
                let mut buffer = [0; PAGE_SIZE];
                let Ok(length) = codecs.of(kind).pack(&page, Some(&base), &mut buffer) else {
                    continue;
                };
                for (at, byte) in &flips {
                    buffer[at % length] ^= byte;
                }
                let mut rebuilt = [0; PAGE_SIZE];
                let kept = length.saturating_sub(cut);
                codecs.of(kind).rebuild(&buffer[..kept], Some(&base), &mut rebuilt).ok();
                codecs.of(kind).rebuild(&buffer[..length], Some(&page), &mut rebuilt).ok();
            }
        }
    }

    /// A codec among others.
    struct Among(Codecs, Kind);

    impl Codec for Among {
        fn kind(&self) -> Kind {
            self.1
        }

        fn pack(&mut self, page: &Page, base: Option<&Page>, into: &mut [u8]) -> Result<usize, PackError> {
            self.0.of(self.1).pack(page, base, into)
        }

        fn rebuild(
            &mut self,
            packed: &[u8],
            base: Option<&Page>,
            page: &mut Page,
        ) -> Result<(), RebuildError> {
            self.0.of(self.1).rebuild(packed, base, page)
        }
    }
}
