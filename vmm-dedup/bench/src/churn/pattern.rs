//! What a guest's memory holds, round by round: the books by which pages are written, checked and counted.

use super::cache::Cache;
use super::files::Files;
use crate::content::{mix, words};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use vmm_dedup_protocol::key::PageWords;

/// What is replaced in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// A quarter of the common 256 KiB extents, at random, by new content.
    Extents,
    /// A quarter of the common pages, at random, by new content.
    Pages,
    /// The oldest quarter of a page cache, by the next of real files.
    Files,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Extents, Self::Pages, Self::Files];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Extents => "extents",
            Kind::Pages => "pages",
            Kind::Files => "files",
        })
    }
}

/// Pages of an extent: 256 KiB.
const EXTENT_PAGES: usize = 64;
/// One of so many common pages is replaced in a round.
pub(super) const TURNOVER: usize = 4;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// A guest's own.
    Private { guest: usize, page: usize },
    /// The same in all guests.
    Common { round: usize, page: usize },
    /// A page of the files.
    File(usize),
}

impl Content {
    /// Its bytes.
    pub(super) fn words(self, files: &mut Files) -> Result<PageWords, vmm_dedup_host::Failure> {
        match self {
            Content::Private { guest, page } => Ok(words(1 << 62 | guest << 40 | page)),
            Content::Common { round, page } => Ok(words(1 << 61 | round << 40 | page)),
            Content::File(page) => files.read(page),
        }
    }
}

/// The memory of one guest.
#[derive(Debug)]
pub(super) struct Pattern {
    contents: Vec<Content>,
    turnover: Turnover,
}

/// What becomes of the common half.
#[derive(Debug)]
enum Turnover {
    /// Units of so many pages are replaced at random.
    Units(usize),
    /// Files come and go.
    Cache(Cache),
}

impl Pattern {
    /// Before the first round. The first half is common, as far as it is filled.
    pub(super) fn new(kind: Kind, guest: usize, pages: usize, files: &Files) -> Self {
        let half = pages / 2;
        let private = (0..pages).map(|page| Content::Private { guest, page });
        let mut pattern = Self {
            contents: private.collect(),
            turnover: match kind {
                Kind::Extents => Turnover::Units(EXTENT_PAGES),
                Kind::Pages => Turnover::Units(1),
                Kind::Files => Turnover::Cache(Cache::new(guest, half)),
            },
        };
        match &mut pattern.turnover {
            Turnover::Units(_) => {
                let common = (0..half).map(|page| Content::Common { round: 0, page });
                pattern.contents.splice(..half, common);
            }
            Turnover::Cache(cache) => {
                for (block, page) in cache.read_next(files, half) {
                    pattern.contents[block] = Content::File(page);
                }
            }
        }
        pattern
    }

    /// What each page holds now.
    pub(super) fn contents(&self) -> &[Content] {
        &self.contents
    }

    /// The next round, numbered from 1: the pages that are written, in their order; what they hold then is in
    /// [`Self::contents`].
    pub(super) fn advance(&mut self, round: usize, files: &Files) -> Vec<usize> {
        let half = self.contents.len() / 2;
        match &mut self.turnover {
            Turnover::Units(unit) => {
                let unit = *unit;
                let mut units: Vec<usize> = (0..half / unit).collect();
                units.sort_unstable_by_key(|number| mix(round << 32 | number));
                units.truncate(half / unit / TURNOVER);
                let pages: Vec<usize> = units.iter().flat_map(|n| n * unit..(n + 1) * unit).collect();
                for page in &pages {
                    self.contents[*page] = Content::Common { round, page: *page };
                }
                pages
            }
            Turnover::Cache(cache) => {
                cache.use_some_again(round);
                let written = cache.read_next(files, half / TURNOVER);
                for (block, page) in &written {
                    self.contents[*block] = Content::File(*page);
                }
                written.into_iter().map(|(block, _)| block).collect()
            }
        }
    }
}

/// Pages that sharing can save: those of all guests beyond the first of each content.
pub(super) fn common_pages<'a>(patterns: impl Iterator<Item = &'a Pattern>, files: &Files) -> u64 {
    let mut seen: HashMap<Content, u64> = HashMap::new();
    for content in patterns.flat_map(Pattern::contents) {
        let content = match content {
            Content::File(page) => Content::File(files.first_equal(*page)),
            other => *other,
        };
        *seen.entry(content).or_default() += 1;
    }
    seen.values().map(|copies| copies - 1).sum()
}

/// Stretches of the guests' memory that hold consecutive pages of one file, or of one round's content: mappings that show all of it
/// from a store whose slots follow each other in that order. In another order a few stretches less may do, since slots of two
/// files may lie together, in one order only.
pub(super) fn common_runs<'a>(patterns: impl Iterator<Item = &'a Pattern>) -> u64 {
    let goes_on = |before: Content, content: Content| match (before, content) {
        (Content::File(before), Content::File(page)) => page == before + 1,
        (
            Content::Common {
                round: a,
                page: before,
            },
            Content::Common { round: b, page },
        ) => a == b && page == before + 1,
        _ => false,
    };
    let is_common = |content: Content| !matches!(content, Content::Private { .. });
    let runs = |pattern: &Pattern| {
        let contents = &pattern.contents;
        let begins = |at: &usize| {
            let before = at.checked_sub(1).map(|before| contents[before]);
            is_common(contents[*at]) && !before.is_some_and(|before| goes_on(before, contents[*at]))
        };
        (0..contents.len()).filter(begins).count() as u64
    };
    patterns.map(runs).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 4096;
    const GUESTS: usize = 3;

    fn guests(kind: Kind, files: &Files) -> Vec<Pattern> {
        (0..GUESTS)
            .map(|guest| Pattern::new(kind, guest, PAGES, files))
            .collect()
    }

    #[test]
    fn half_of_the_memory_is_common_before_and_after_each_round() {
        for kind in [Kind::Extents, Kind::Pages] {
            let files = Files::none();
            let mut guests = guests(kind, &files);
            for round in 1..=5 {
                assert_eq!(
                    common_pages(guests.iter(), &files),
                    (PAGES / 2 * (GUESTS - 1)) as u64
                );
                for guest in &mut guests {
                    assert_eq!(guest.advance(round, &files).len(), PAGES / 2 / TURNOVER);
                }
            }
        }
    }

    #[test]
    fn a_round_replaces_other_pages_than_the_round_before_by_content_that_was_not_there() {
        for kind in [Kind::Extents, Kind::Pages] {
            let files = Files::none();
            let mut guest = Pattern::new(kind, 0, PAGES, &files);
            let before = guest.contents().to_vec();
            let first = guest.advance(1, &files);
            let changed: Vec<usize> = (0..PAGES)
                .filter(|page| guest.contents()[*page] != before[*page])
                .collect();
            let mut sorted = first.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, changed);
            assert!(
                changed
                    .iter()
                    .all(|page| !before.contains(&guest.contents()[*page]))
            );
            assert_ne!(guest.advance(2, &files), first);
        }
    }

    #[test]
    fn extents_are_written_as_a_whole() {
        let files = Files::none();
        let mut guest = Pattern::new(Kind::Extents, 0, PAGES, &files);
        for extent in guest.advance(1, &files).chunks(EXTENT_PAGES) {
            assert!(extent[0].is_multiple_of(EXTENT_PAGES));
            assert!(extent.windows(2).all(|two| two[1] == two[0] + 1));
        }
    }

    #[test]
    fn content_under_different_names_differs() {
        let mut files = Files::none();
        let contents = [
            Content::Private { guest: 0, page: 1 },
            Content::Private { guest: 1, page: 1 },
            Content::Common { round: 0, page: 1 },
            Content::Common { round: 1, page: 1 },
        ];
        let mut words: Vec<PageWords> = contents
            .iter()
            .map(|content| content.words(&mut files).unwrap())
            .collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), contents.len());
    }

    #[test]
    fn guests_that_read_the_same_files_have_most_of_the_cache_in_common_in_different_places() {
        let files = Files::of_lengths(&[50, 3, 64, 17, 64, 9, 31, 64, 1, 22].repeat(40));
        let mut guests = guests(Kind::Files, &files);
        let full = (PAGES / 2 * (GUESTS - 1)) as u64;
        assert!(common_pages(guests.iter(), &files) > full * 9 / 10);
        for round in 1..=12 {
            for guest in &mut guests {
                let written = guest.advance(round, &files).len();
                assert!((PAGES / 2 / TURNOVER).abs_diff(written) <= 64, "{written}");
            }
            let common = common_pages(guests.iter(), &files);
            assert!((full * 8 / 10..=full).contains(&common), "{common} of {full}");
        }
        let same_place = guests[0]
            .contents()
            .iter()
            .zip(guests[1].contents())
            .filter(|(a, b)| a == b);
        assert!(same_place.count() < PAGES / 4);
    }

    #[test]
    fn runs_end_where_another_round_or_file_begins() {
        let files = Files::of_lengths(&[4; 2 * PAGES / 4]);
        let mut guest = Pattern::new(Kind::Extents, 0, PAGES, &files);
        assert_eq!(common_runs([&guest].into_iter()), 1);
        let written = guest.advance(1, &files);
        let edges: Vec<usize> = (1..PAGES / 2)
            .filter(|page| written.contains(page) != written.contains(&(page - 1)))
            .collect();
        assert_eq!(common_runs([&guest].into_iter()), 1 + edges.len() as u64);
        let cache = [0, 1].map(|guest| Pattern::new(Kind::Files, guest, PAGES, &files));
        let most = 2 * (PAGES / 2 / 4) as u64;
        let runs = common_runs(cache.iter());
        assert!((2..=most).contains(&runs), "{runs}");
    }
}
