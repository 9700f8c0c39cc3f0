//! The choice: how a page is kept.
//!
//! Each codec's work on a page is an *offer*: the codec, the base, and the bytes that came out. A [`Rule`] says which codecs
//! are allowed and what an offer costs: the bytes of its size class, its bookkeeping, and, in bytes as well, the time that
//! rebuilding takes as often as the page is expected to be touched. A page is packed only if the cheapest offer costs less
//! than the page itself.
//!
//! A base must stay. So an offer with a base (the page of zeros apart) counts only if two pages or more gain from that base:
//! the page alone would have the base kept for nothing.

use crate::class::Class;
use crate::codec::{Codecs, Kind, Kinds};
use crate::page::{Page, ZERO_PAGE};
use crate::search::Position;
use crate::segments::{CELL_METADATA_BYTES, Place};
use vmm_dedup_protocol::PAGE_SIZE;

/// Pages that must gain from a base, so that it is one.
pub const LEAST_GAINING: u32 = 2;

/// What an owner keeps of a packed page, beside the segments' own bookkeeping.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Where its bytes are.
    pub place: Place,
    /// Its base; a number of the owner's.
    pub base: u32,
    /// Its codec.
    pub kind: Kind,
}

/// Bytes of bookkeeping for each packed page, all told.
pub const METADATA_BYTES: usize = size_of::<Record>() + CELL_METADATA_BYTES;
/// Bytes of bookkeeping for each base: which page it is, and how many were packed with it.
pub const BASE_METADATA_BYTES: u32 = 8;

/// What a page is packed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The codec needs none.
    None,
    /// The page of zeros.
    Zero,
    /// Another page.
    At(Position),
}

/// A page that may be a base.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Where it is.
    pub at: Position,
    /// Its bytes.
    pub page: &'a Page,
}

/// What a codec makes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The codec.
    pub kind: Kind,
    /// The base that it was packed with.
    pub base: Base,
    /// Bytes that came out; they have a class.
    pub length: u16,
}

/// Everything that codecs make of one page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offers {
    /// In no order.
    pub all: Vec<Offer>,
}

impl Offers {
    /// Packs a page with each of `kinds`: alone, with the page of zeros (overlays) and with each candidate. What does not
    /// fit into the largest class is no offer.
    pub fn collect(&mut self, codecs: &mut Codecs, kinds: Kinds, page: &Page, candidates: &[Candidate<'_>]) {
        self.all.clear();
        for kind in kinds.iter() {
            match kind {
                Kind::Lz4 | Kind::Zstd => self.add(codecs, kind, page, (Base::None, None)),
                // Compressors pack zeros well without a base.
                Kind::Overlay => self.add(codecs, kind, page, (Base::Zero, Some(&ZERO_PAGE))),
                Kind::Lz4Patch | Kind::ZstdPatch => {}
            }
            for candidate in candidates.iter().filter(|_| kind.needs_base()) {
                self.add(codecs, kind, page, (Base::At(candidate.at), Some(candidate.page)));
            }
        }
    }

    fn add(&mut self, codecs: &mut Codecs, kind: Kind, page: &Page, (base, bytes): (Base, Option<&Page>)) {
        let mut buffer = [0; Class::MOST_BYTES];
        let packed = codecs.of(kind).pack(page, bytes, &mut buffer);
        // A codec that fails on a page offers nothing.
        if let Some(length) = packed.ok().and_then(|length| u16::try_from(length).ok()) {
            self.all.push(Offer { kind, base, length });
        }
    }
}

/// What an offer costs beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// How often a page is expected to be rebuilt while it is packed.
    pub touches: f32,
    /// What a microsecond of rebuilding is worth, in bytes.
    pub bytes_for_us: f32,
    /// Microseconds that each codec takes to rebuild a page, by number.
    pub rebuild_us: [f32; Kind::ALL.len()],
}

impl Default for Weights {
    /// One page in ten is touched, and a microsecond is worth a line: then zstd must be some 26 bytes smaller than LZ4. The
    /// times are those of real guests' pages in docs/figures.md; whoever measures on the spot has better ones.
    fn default() -> Self {
        Self {
            touches: 0.1,
            bytes_for_us: 64.0,
            rebuild_us: [0.3, 1.8, 5.9, 0.7, 0.8],
        }
    }
}

impl Weights {
    /// Size alone counts.
    #[must_use]
    pub fn size_alone() -> Self {
        Self {
            touches: 0.0,
            ..Self::default()
        }
    }

    /// Bytes that a rebuild by this codec is worth.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is not negative
    fn bytes(&self, kind: Kind) -> u32 {
        (self.touches * self.bytes_for_us * self.rebuild_us[kind.number()]).round() as u32
    }
}

/// How bases are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeping {
    /// As whole pages: a rebuild takes one codec.
    #[default]
    Whole,
    /// Packed alone, without a base: a rebuild may have to rebuild the base first.
    Packed,
}

/// Which codecs there are, and what an offer costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// The codecs allowed.
    pub kinds: Kinds,
    /// What counts beside bytes.
    pub weights: Weights,
    /// How bases are kept.
    pub keeping: Keeping,
    /// Most lines of an overlay.
    pub most_lines: u32,
}

impl Rule {
    /// What a page costs that is not packed, in bytes.
    #[allow(clippy::cast_possible_truncation)] // 4096
    pub const WHOLE: u32 = PAGE_SIZE as u32;

    /// What an offer costs, in bytes; `None` if the rule does not allow it.
    #[must_use]
    pub fn cost(&self, offer: &Offer) -> Option<u32> {
        let lines = usize::from(offer.length).saturating_sub(8) / crate::page::LINE_BYTES;
        let too_many = offer.kind == Kind::Overlay && lines > self.most_lines as usize;
        if !self.kinds.contains(offer.kind) || too_many {
            return None;
        }
        let bytes = Class::holding(offer.length.into())?.bytes() + METADATA_BYTES;
        // A class has at most a page's bytes.
        let bytes = u32::try_from(bytes).unwrap_or(Self::WHOLE);
        let base = match (self.keeping, offer.base) {
            // The base is rebuilt as well, by whatever packs it.
            (Keeping::Packed, Base::At(_)) => self.alone_kind().map_or(0, |kind| self.weights.bytes(kind)),
            _ => 0,
        };
        Some(bytes + self.weights.bytes(offer.kind) + base)
    }

    /// The codec that packs most pages that stand alone.
    fn alone_kind(&self) -> Option<Kind> {
        [Kind::Zstd, Kind::Lz4]
            .into_iter()
            .find(|kind| self.kinds.contains(*kind))
    }

    /// The cheapest offer that costs less than a page, and its cost. `gaining` says how many pages gain from a base, the page
    /// itself among them; where fewer than [`LEAST_GAINING`] do, offers with it do not count.
    pub fn choose(&self, offers: &Offers, gaining: impl Fn(Position) -> u32) -> Option<(Offer, u32)> {
        let counts = |offer: &&Offer| match offer.base {
            Base::None | Base::Zero => true,
            Base::At(at) => gaining(at) >= LEAST_GAINING,
        };
        let costs = offers.all.iter().filter(counts);
        let costs = costs.filter_map(|offer| Some((*offer, self.cost(offer)?)));
        costs
            .filter(|(_, cost)| *cost < Self::WHOLE)
            .min_by_key(|(_, cost)| *cost)
    }

    /// The bases from which the page would gain, beyond what it has without any, and what it would cost with each.
    pub fn gains<'a>(&'a self, offers: &'a Offers) -> impl Iterator<Item = (Position, u32)> + 'a {
        let alone = self.choose(offers, |_| 0).map_or(Self::WHOLE, |(_, cost)| cost);
        offers.all.iter().filter_map(move |offer| match offer.base {
            Base::At(at) => self
                .cost(offer)
                .filter(|cost| *cost < alone)
                .map(|cost| (at, cost)),
            Base::None | Base::Zero => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{near_copy, random, text};

    fn at(frame: u64) -> Position {
        Position::try_new(0, frame).unwrap()
    }

    fn rule(kinds: Kinds) -> Rule {
        Rule {
            kinds,
            weights: Weights::size_alone(),
            keeping: Keeping::Whole,
            most_lines: 16,
        }
    }

    fn offers(page: &Page, candidates: &[Candidate<'_>]) -> Offers {
        let mut codecs = Codecs::try_new(64).unwrap();
        let mut offers = Offers::default();
        offers.collect(&mut codecs, Kinds::all(), page, candidates);
        offers
    }

    #[test]
    fn a_base_that_only_one_page_gains_from_is_none() {
        let base = random(1);
        let page = near_copy(&base, 3, 2);
        let offers = offers(
            &page,
            &[Candidate {
                at: at(7),
                page: &base,
            }],
        );
        let rule = rule(Kinds::all());

        assert_eq!(rule.choose(&offers, |_| 1), None);
        let (offer, cost) = rule.choose(&offers, |_| 2).unwrap();

        assert_eq!((offer.kind, offer.base), (Kind::Overlay, Base::At(at(7))));
        assert_eq!(cost as usize, 8 + 3 * 64 + METADATA_BYTES);
        assert!(rule.gains(&offers).any(|gain| gain == (at(7), cost)));
    }

    #[test]
    fn a_page_that_no_codec_makes_smaller_stays_whole() {
        let offers = offers(&random(1), &[]);
        assert_eq!(rule(Kinds::all()).choose(&offers, |_| 9), None);
    }

    #[test]
    fn a_nearly_empty_page_is_an_overlay_of_the_page_of_zeros() {
        let mut page = ZERO_PAGE;
        page[512..562].copy_from_slice(&random(1)[..50]);
        let offers = offers(&page, &[]);
        let overlays = rule(Kinds::of(&[Kind::Overlay]));
        let (offer, _) = overlays.choose(&offers, |_| 0).unwrap();
        assert_eq!((offer.base, offer.length), (Base::Zero, 8 + 64));
    }

    #[test]
    fn what_a_rebuild_costs_decides_between_sizes_that_are_close() {
        let (small, fast) = (Kind::Zstd, Kind::Lz4);
        let offer = |kind, length| Offer {
            kind,
            base: Base::None,
            length,
        };
        let offers = Offers {
            all: vec![offer(small, 1800), offer(fast, 1900)],
        };
        let chosen = |touches| {
            let weights = Weights {
                touches,
                ..Weights::default()
            };
            let rule = Rule {
                weights,
                ..rule(Kinds::all())
            };
            rule.choose(&offers, |_| 0).unwrap().0.kind
        };
        assert_eq!((chosen(0.0), chosen(0.1), chosen(10.0)), (small, small, fast));
    }

    #[test]
    fn overlays_beyond_the_rules_limit_do_not_count() {
        let base = random(1);
        let page = near_copy(&base, 20, 2);
        let offers = offers(
            &page,
            &[Candidate {
                at: at(7),
                page: &base,
            }],
        );
        let overlays = |most_lines| Rule {
            most_lines,
            ..rule(Kinds::of(&[Kind::Overlay]))
        };
        assert!(overlays(19).choose(&offers, |_| 2).is_none());
        assert!(overlays(20).choose(&offers, |_| 2).is_some());
    }

    #[test]
    fn a_base_that_is_packed_itself_makes_rebuilds_dearer() {
        let offers = offers(&text(2), &[]);
        let with_base = Offer {
            kind: Kind::ZstdPatch,
            base: Base::At(at(1)),
            length: 100,
        };
        let cost = |keeping| {
            let rule = Rule {
                keeping,
                weights: Weights::default(),
                ..rule(Kinds::all())
            };
            assert!(rule.choose(&offers, |_| 0).is_some());
            rule.cost(&with_base).unwrap()
        };
        assert!(cost(Keeping::Packed) > cost(Keeping::Whole));
    }
}
