//! Which pages become bases: many pages decide together.
//!
//! A base stays (as it is, or packed alone), so what counts is a star: one base and all the pages that gain from it. A page
//! that is a base is not packed with another, and a rebuild needs one base at most. The best choice of stars is a set cover
//! with costs, which is hard; the greedy one takes the base with the greatest gain, again and again. A page has few
//! candidates, so this takes little more than sorting.

use crate::choice::{BASE_METADATA_BYTES, Keeping, LEAST_GAINING, Rule};
use std::collections::BinaryHeap;

/// What a page would cost with a base. Pages are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The page.
    pub page: u32,
    /// The base.
    pub base: u32,
    /// The page's cost then, in bytes.
    pub cost: u32,
}

/// The choice: of each page, its base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stars {
    /// By page; `NONE`: without a base.
    base: Vec<u32>,
    /// By page: how many pages have it as base.
    gaining: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Stars {
    /// Chooses bases. `alone` has what each page costs without one, at most [`Rule::WHOLE`]; links whose page or base has no
    /// number there are left out, and so are those from a page to itself.
    #[must_use]
    pub fn choose(alone: &[u32], links: &[Link], keeping: Keeping) -> Self {
        let mut choosing = Choosing::new(alone, links, keeping);
        choosing.take_bases();
        choosing.drop_bases();
        choosing.stars
    }

    /// A page's base.
    #[must_use]
    pub fn base(&self, page: u32) -> Option<u32> {
        let base = self.base.get(page as usize).copied();
        base.filter(|base| *base != NONE)
    }

    /// How many pages have a page as base; 0: it is none, else at least [`LEAST_GAINING`].
    #[must_use]
    pub fn gaining(&self, page: u32) -> u32 {
        self.gaining.get(page as usize).copied().unwrap_or(0)
    }

    /// How many pages are bases.
    #[must_use]
    pub fn bases(&self) -> usize {
        self.gaining.iter().filter(|gaining| **gaining > 0).count()
    }
}

struct Choosing<'a> {
    alone: &'a [u32],
    /// In the order of their bases.
    links: Vec<Link>,
    /// Of each base: where its links begin; one more for the end.
    begins: Vec<u32>,
    /// The numbers of the links, in the order of their pages.
    by_page: Vec<u32>,
    keeping: Keeping,
    /// What each page costs now.
    cost: Vec<u32>,
    stars: Stars,
}

impl<'a> Choosing<'a> {
    fn new(alone: &'a [u32], links: &[Link], keeping: Keeping) -> Self {
        let count = alone.len();
        let fits = |link: &&Link| {
            (link.page as usize) < count && (link.base as usize) < count && link.page != link.base
        };
        let mut links: Vec<Link> = links.iter().filter(fits).copied().collect();
        links.sort_unstable_by_key(|link| (link.base, link.page, link.cost));
        links.dedup_by_key(|link| (link.base, link.page));
        let mut begins = vec![0; count + 1];
        for link in &links {
            begins[link.base as usize + 1] += 1;
        }
        for i in 1..begins.len() {
            begins[i] += begins[i - 1];
        }
        let mut by_page: Vec<u32> = (0..).take(links.len()).collect();
        by_page.sort_unstable_by_key(|i| links[*i as usize].page);
        Self {
            alone,
            links,
            begins,
            by_page,
            keeping,
            cost: alone.to_vec(),
            stars: Stars {
                base: vec![NONE; count],
                gaining: vec![0; count],
            },
        }
    }

    fn links_to(&self, base: u32) -> std::ops::Range<usize> {
        self.begins[base as usize] as usize..self.begins[base as usize + 1] as usize
    }

    /// What a page costs as a base, beyond what it costs now.
    fn keep(&self, base: u32) -> i64 {
        let kept = match self.keeping {
            Keeping::Whole => Rule::WHOLE,
            Keeping::Packed => self.alone[base as usize],
        };
        i64::from(kept) + i64::from(BASE_METADATA_BYTES) - i64::from(self.cost[base as usize])
    }

    /// Whether a page would gain by a link, as things are.
    fn gains(&self, link: &Link) -> bool {
        self.stars.gaining[link.page as usize] == 0 && link.cost < self.cost[link.page as usize]
    }

    /// What would be gained if a page were a base; `None` if it is one, or if too few pages gain.
    fn gain(&self, base: u32) -> Option<i64> {
        if self.stars.gaining[base as usize] > 0 {
            return None;
        }
        let gaining = || {
            self.links[self.links_to(base)]
                .iter()
                .filter(|link| self.gains(link))
        };
        let sum: i64 = gaining()
            .map(|link| i64::from(self.cost[link.page as usize] - link.cost))
            .sum();
        let gain = sum - self.keep(base);
        (gaining().count() >= LEAST_GAINING as usize && gain > 0).then_some(gain)
    }

    /// Takes the base with the greatest gain until none has any. Gains only fall, so one that is still the greatest when it
    /// is counted anew is the greatest.
    fn take_bases(&mut self) {
        let numbers = 0..u32::try_from(self.alone.len()).unwrap_or(NONE);
        let mut waiting: BinaryHeap<(i64, u32)> = numbers
            .filter_map(|base| Some((self.gain(base)?, base)))
            .collect();
        while let Some((_, base)) = waiting.pop() {
            let Some(gain) = self.gain(base) else {
                continue;
            };
            if waiting.peek().is_some_and(|(next, _)| *next > gain) {
                waiting.push((gain, base));
                continue;
            }
            self.take(base);
        }
    }

    fn take(&mut self, base: u32) {
        self.leave(base);
        for i in self.links_to(base) {
            let link = self.links[i];
            if self.gains(&link) {
                self.leave(link.page);
                self.join(link);
            }
        }
    }

    /// A page is packed with a base from now on.
    fn join(&mut self, link: Link) {
        self.stars.base[link.page as usize] = link.base;
        self.stars.gaining[link.base as usize] += 1;
        self.cost[link.page as usize] = link.cost;
    }

    /// A page has no base any more.
    fn leave(&mut self, page: u32) {
        let base = std::mem::replace(&mut self.stars.base[page as usize], NONE);
        if let Some(gaining) = self.stars.gaining.get_mut(base as usize) {
            *gaining -= 1;
        }
        self.cost[page as usize] = self.alone[page as usize];
    }

    /// Gives up bases that later ones have taken too many pages from, the worst first. Pages that lose their base go to the
    /// best of those that are left, which only gain by that.
    fn drop_bases(&mut self) {
        let numbers = 0..u32::try_from(self.alone.len()).unwrap_or(NONE);
        let bases = numbers.filter(|base| self.stars.gaining[*base as usize] > 0);
        let mut bad: Vec<(i64, u32)> = bases.map(|base| (self.balance(base), base)).collect();
        bad.retain(|(_, base)| !self.is_worth_it(*base));
        bad.sort_unstable();
        for (_, base) in bad {
            if !self.is_worth_it(base) {
                self.drop_base(base);
            }
        }
    }

    /// What a base brings, all told.
    fn balance(&self, base: u32) -> i64 {
        let links = self.links[self.links_to(base)].iter();
        let of_it = links.filter(|link| self.stars.base[link.page as usize] == base);
        let gains = of_it.map(|link| i64::from(self.alone[link.page as usize]) - i64::from(link.cost));
        gains.sum::<i64>() - self.keep(base)
    }

    fn is_worth_it(&self, base: u32) -> bool {
        self.stars.gaining[base as usize] >= LEAST_GAINING && self.balance(base) > 0
    }

    fn drop_base(&mut self, base: u32) {
        for i in self.links_to(base) {
            let page = self.links[i].page;
            if self.stars.base[page as usize] == base {
                self.leave(page);
                let from = self
                    .by_page
                    .partition_point(|i| self.links[*i as usize].page < page);
                let own = self.by_page[from..].iter().map(|i| self.links[*i as usize]);
                let own = own.take_while(|link| link.page == page);
                let to = own.filter(|link| link.base != base && self.stars.gaining[link.base as usize] > 0);
                let best = to.min_by_key(|link| link.cost);
                if let Some(best) = best.filter(|link| self.gains(link)) {
                    self.join(best);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn link(page: u32, base: u32, cost: u32) -> Link {
        Link { page, base, cost }
    }

    fn total(stars: &Stars, alone: &[u32], links: &[Link], keeping: Keeping) -> u64 {
        let cost = |page: u32| match (stars.base(page), stars.gaining(page), keeping) {
            (Some(base), ..) => {
                let of_it = links.iter().filter(|link| link.page == page && link.base == base);
                of_it.map(|link| link.cost).min().unwrap()
            }
            (None, 0, _) => alone[page as usize],
            (None, _, Keeping::Whole) => Rule::WHOLE + BASE_METADATA_BYTES,
            (None, _, Keeping::Packed) => alone[page as usize] + BASE_METADATA_BYTES,
        };
        (0..u32::try_from(alone.len()).unwrap())
            .map(|page| u64::from(cost(page)))
            .sum()
    }

    #[test]
    fn a_base_is_taken_if_its_pages_pay_for_it() {
        // Kept whole, page 0 costs 2104 more than packed; its pages gain 1900 each.
        let alone = [2000, 2000, 2000, 2000];
        let one = [link(1, 0, 100)];
        let two = [link(1, 0, 100), link(2, 0, 100)];
        let stars = |links: &[Link]| Stars::choose(&alone, links, Keeping::Whole);
        assert_eq!(stars(&one).bases(), 0);
        assert_eq!((stars(&two).base(1), stars(&two).base(2)), (Some(0), Some(0)));
        assert_eq!(stars(&two).gaining(0), 2);
    }

    #[test]
    fn one_page_that_gains_makes_no_base_even_if_the_base_is_packed() {
        let stars = Stars::choose(&[2000, 2000], &[link(1, 0, 10)], Keeping::Packed);
        assert_eq!(stars.bases(), 0);
    }

    #[test]
    fn a_base_has_no_base() {
        let alone = [3000; 6];
        let links = [
            link(1, 0, 50),
            link(2, 0, 50),
            link(0, 1, 50),
            link(3, 1, 50),
            link(4, 1, 60),
            link(5, 1, 60),
        ];
        let stars = Stars::choose(&alone, &links, Keeping::Whole);
        for page in 0..6 {
            let base = stars.base(page);
            assert!(base.is_none_or(|base| stars.base(base).is_none()));
        }
        assert_eq!(stars.gaining(1), 4);
    }

    fn problem() -> impl Strategy<Value = (Vec<u32>, Vec<Link>)> {
        (2..12u32).prop_flat_map(|count| {
            let link = (0..count, 0..count, 20..4000u32);
            let links = vec(
                link.prop_map(|(page, base, cost)| Link { page, base, cost }),
                0..40,
            );
            (vec(300..=Rule::WHOLE, count as usize), links)
        })
    }

    /// The cheapest of all sets of bases, each page taking the best of them.
    fn best(alone: &[u32], links: &[Link], keeping: Keeping) -> u64 {
        let count = u32::try_from(alone.len()).unwrap();
        let cost = |set: u32| -> u64 {
            let of_page = |page: u32| {
                let kept = match keeping {
                    Keeping::Whole => Rule::WHOLE,
                    Keeping::Packed => alone[page as usize],
                };
                if set >> page & 1 != 0 {
                    return kept + BASE_METADATA_BYTES;
                }
                let usable = links
                    .iter()
                    .filter(|l| l.page == page && l.base != page && set >> l.base & 1 != 0);
                usable.map(|link| link.cost).fold(alone[page as usize], u32::min)
            };
            (0..count).map(|page| u64::from(of_page(page))).sum()
        };
        (0..1 << count).map(cost).min().unwrap()
    }

    proptest! {
        #[test]
        fn stars_are_stars_and_cost_no_more_than_none((alone, links) in problem(), whole in any::<bool>()) {
            let keeping = if whole { Keeping::Whole } else { Keeping::Packed };
            let stars = Stars::choose(&alone, &links, keeping);
            let none: u64 = alone.iter().map(|cost| u64::from(*cost)).sum();
            let total = total(&stars, &alone, &links, keeping);
            prop_assert!(total <= none);
            prop_assert!(total >= best(&alone, &links, keeping));
            let count = u32::try_from(alone.len()).unwrap();
            for page in 0..count {
                let gaining = (0..count).filter(|other| stars.base(*other) == Some(page)).count();
                prop_assert_eq!(gaining, stars.gaining(page) as usize);
                prop_assert!(gaining != 1, "a base of one page");
                prop_assert!(gaining == 0 || stars.base(page).is_none(), "a base with a base");
            }
        }
    }
}
