//! Plans: sets of codecs, and which page gets which base and codec by them.

use super::gather::Gathered;
use super::tries::Tries;
use vmm_dedup_packed::codec::Overlay;
use vmm_dedup_packed::stars::Link;
use vmm_dedup_packed::{Base, Keeping, Kind, Kinds, Offer, Offers, Rule, Stars, Weights};

/// A set of codecs with a name.
pub(super) struct Planned {
    pub(super) name: &'static str,
    pub(super) rule: Rule,
}

/// Each codec alone, those that go together, and all.
pub(super) fn all(weights: Weights) -> Vec<Planned> {
    use Kind::{Lz4, Lz4Patch, Overlay as Lines, Zstd, ZstdPatch};
    let plan = |name, kinds: &[Kind], keeping| Planned {
        name,
        rule: Rule {
            kinds: Kinds::of(kinds),
            weights,
            keeping,
            most_lines: match kinds {
                [Lines] => Overlay::MOST_LINES_ALONE,
                _ => Overlay::MOST_LINES_BESIDE_COMPRESSION,
            },
        },
    };
    vec![
        plan("overlay", &[Lines], Keeping::Whole),
        plan("lz4", &[Lz4], Keeping::Whole),
        plan("zstd", &[Zstd], Keeping::Whole),
        plan("zstd, overlay", &[Zstd, Lines], Keeping::Whole),
        plan("lz4, lz4-patch", &[Lz4, Lz4Patch], Keeping::Whole),
        plan("zstd, zstd-patch", &[Zstd, ZstdPatch], Keeping::Whole),
        plan("all", &Kind::ALL, Keeping::Whole),
        plan("all, bases packed", &Kind::ALL, Keeping::Packed),
    ]
}

/// A plan, worked out for all pages.
pub(super) struct Worked<'a> {
    rule: &'a Rule,
    stars: Stars,
}

impl<'a> Worked<'a> {
    /// Decides which pages are bases.
    pub(super) fn out(rule: &'a Rule, pages: &Gathered<'_>, tries: &Tries) -> Self {
        let numbers = 0..u32::try_from(pages.len()).unwrap_or(u32::MAX);
        let (mut offers, mut links, mut bases) = (Offers::default(), Vec::new(), Vec::new());
        let mut alone = Vec::with_capacity(pages.len());
        for page in numbers {
            tries.offers(pages, page, &mut offers);
            let cheapest = rule.choose(&offers, |_| 0);
            alone.push(cheapest.map_or(Rule::WHOLE, |(_, cost)| cost));
            let gains = rule.gains(&offers);
            let with = gains.filter_map(|(base, cost)| Some((pages.number(base)?, cost)));
            bases.extend(with);
            // Of each base the cheapest offer.
            bases.sort_unstable();
            bases.dedup_by_key(|(base, _)| *base);
            links.extend(bases.drain(..).map(|(base, cost)| Link { page, base, cost }));
        }
        let stars = Stars::choose(&alone, &links, rule.keeping);
        Self { rule, stars }
    }

    pub(super) fn bases(&self) -> u64 {
        self.stars.bases() as u64
    }

    /// How a page is kept, and the number of its base; `None`: whole.
    pub(super) fn choice(
        &self,
        pages: &Gathered<'_>,
        offers: &Offers,
        number: u32,
    ) -> Option<(Offer, Option<u32>)> {
        if self.stars.gaining(number) > 0 && self.rule.keeping == Keeping::Whole {
            return None;
        }
        let base = self.stars.base(number);
        let at = base.and_then(|base| pages.position(base));
        let gaining = |other| if Some(other) == at { u32::MAX } else { 0 };
        let (offer, _) = self.rule.choose(offers, gaining)?;
        let base = base.filter(|_| matches!(offer.base, Base::At(_)));
        Some((offer, base))
    }
}
