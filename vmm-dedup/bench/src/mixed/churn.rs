//! Content that is replaced while the policies work: of the warm and the cold memory, as page caches of guests that read the
//! next file replace it. What repeats in a pair of huge pages is written in both, and repeats again.

use super::parts::Parts;
use crate::content::{Area, HUGE_PAGES, mix, words};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Pages of an extent: 256 KiB, as in `bench churn`.
const EXTENT_PAGES: usize = 64;
const EXTENTS: usize = HUGE_PAGES / EXTENT_PAGES;
/// One of so many extents is replaced in a round.
const TURNOVER: usize = 4;
/// How long a round lasts, in intervals of the monitor: what was written turns cold again in some places, and in others not.
const INTERVALS: u32 = 2;

/// What was replaced: the number of each page's content.
pub(super) type Replaced = BTreeMap<usize, usize>;

/// Replaces content for so many rounds.
pub(super) fn churn(area: &Area, parts: &Parts, rounds: u32, interval: Duration) -> Replaced {
    let mut replaced = Replaced::new();
    for round in 1..=rounds as usize {
        let next = Instant::now() + interval * INTERVALS;
        for (page, content) in of_round(parts, round) {
            area.overwrite(page, &words(content));
            replaced.insert(page, content);
        }
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    replaced
}

/// The pages that a round replaces, and what they hold then.
fn of_round(parts: &Parts, round: usize) -> impl Iterator<Item = (usize, usize)> {
    let pairs = parts.repetitive().step_by(2);
    let mut extents: Vec<(usize, usize)> = pairs
        .flat_map(|pair| (0..EXTENTS).map(move |extent| (pair, extent)))
        .collect();
    extents.sort_unstable_by_key(|(pair, extent)| mix(round << 32 | pair << 8 | extent));
    extents.truncate(extents.len() / TURNOVER);
    let pages = extents.into_iter().flat_map(|(pair, extent)| {
        let first = extent * EXTENT_PAGES;
        let of = move |chunk: usize| (first..first + EXTENT_PAGES).map(move |page| chunk * HUGE_PAGES + page);
        of(pair).chain(of(pair + 1))
    });
    let repeated = |page: usize| {
        parts
            .repeats(page)
            .then(|| (page, parts.content(page) | round << 41))
    };
    pages.filter_map(repeated).collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_replaces_a_quarter_of_what_repeats_and_what_it_writes_repeats_and_is_new() {
        let parts = Parts::of(64);
        let repeated = parts.repetitive().len() * HUGE_PAGES / 2;
        let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
        for round in 1..=3 {
            let written: Vec<(usize, usize)> = of_round(&parts, round).collect();
            assert_eq!(written.len(), repeated / TURNOVER);
            let mut copies: BTreeMap<usize, usize> = BTreeMap::new();
            for (page, content) in written {
                assert!(parts.repetitive().contains(&(page / HUGE_PAGES)));
                *copies.entry(content).or_default() += 1;
            }
            assert!(copies.values().all(|copies| *copies == 2));
            assert!(copies.keys().all(|content| !seen.contains_key(content)));
            seen.extend(copies);
        }
    }
}
