//! The three ways to a base, in the order in which they are gone.

use super::index::{LineHashes, LineIndex, Position};
use crate::page::{Page, ZERO_PAGE, differing_lines};

/// Pages that are proposed for one page, at most.
pub const MOST_PROPOSALS: usize = 8;
/// Frames within which the neighbour's displacement is tried: between two pages of a text others have twins or are zero.
const NEIGHBOURHOOD: u64 = 16;

/// Whose pages may be bases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bases {
    /// Those of the same memory only, so that no page of a VM is published that nobody else had.
    #[default]
    Own,
    /// Those of all memories of the trust domain.
    Domain,
}

/// How a base was come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is the page of zeros.
    Zero,
    /// The neighbour's base has it as neighbour.
    Neighbour,
    /// The index knows one of the page's lines.
    Line,
}

/// A page that may be a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// Where it is.
    pub at: Position,
    /// How it was come by.
    pub way: Way,
    /// Of the four indexed lines, so many are the same as far as hashes tell; a neighbour may have none.
    pub lines: u8,
}

/// What a search did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pages that bases were searched for.
    pub searched: u64,
    /// Pages that were proposed.
    pub proposed: u64,
    /// Pages that were left out because too many were proposed.
    pub capped: u64,
    /// Pages whose base became the page of zeros.
    pub found_zero: u64,
    /// Pages whose base was the neighbour's neighbour.
    pub found_neighbour: u64,
    /// Pages whose base the index knew.
    pub found_line: u64,
}

impl Counters {
    /// Adds those of another search.
    pub fn add(&mut self, other: &Self) {
        self.searched += other.searched;
        self.proposed += other.proposed;
        self.capped += other.capped;
        self.found_zero += other.found_zero;
        self.found_neighbour += other.found_neighbour;
        self.found_line += other.found_line;
    }
}

/// A search through memories, page after page in the order of their frames.
#[derive(Debug)]
pub struct BaseSearch {
    bases: Bases,
    /// The page whose base was found last, and the base.
    last: Option<(Position, Position)>,
    counters: Counters,
}

impl BaseSearch {
    /// A search among those pages.
    #[must_use]
    pub fn new(bases: Bases) -> Self {
        Self {
            bases,
            last: None,
            counters: Counters::default(),
        }
    }

    /// How many lines of a page are not zero: what an overlay on the page of zeros would hold.
    #[must_use]
    pub fn lines_beside_zero(page: &Page) -> u32 {
        differing_lines(page, &ZERO_PAGE).count_ones()
    }

    /// Proposes pages for a page into `proposals`, the neighbour's neighbour first, then those with the most lines.
    pub fn propose(
        &mut self,
        index: &LineIndex,
        at: Position,
        lines: LineHashes,
        proposals: &mut Vec<Proposal>,
    ) {
        proposals.clear();
        self.counters.searched += 1;
        let may_be_base = |other: Position| {
            let allowed = self.bases == Bases::Domain || other.memory() == at.memory();
            allowed && other != at
        };
        for other in index.look_up(lines).filter(|other| may_be_base(*other)) {
            match proposals.iter_mut().find(|proposal| proposal.at == other) {
                Some(known) => known.lines += 1,
                None => proposals.push(Proposal {
                    at: other,
                    way: Way::Line,
                    lines: 1,
                }),
            }
        }
        if let Some(neighbour) = self.neighbour(at).filter(|other| may_be_base(*other)) {
            let known = proposals.iter().position(|proposal| proposal.at == neighbour);
            let lines = known.map_or(0, |known| proposals.remove(known).lines);
            let neighbour = Proposal {
                at: neighbour,
                way: Way::Neighbour,
                lines,
            };
            proposals.insert(0, neighbour);
        }
        proposals.sort_by_key(|proposal| (proposal.way != Way::Neighbour, std::cmp::Reverse(proposal.lines)));
        self.counters.capped += proposals.len().saturating_sub(MOST_PROPOSALS) as u64;
        proposals.truncate(MOST_PROPOSALS);
        self.counters.proposed += proposals.len() as u64;
    }

    fn neighbour(&self, at: Position) -> Option<Position> {
        let (last, base) = self.last?;
        let distance = at.frame().checked_sub(last.frame())?;
        let is_near = last.memory() == at.memory() && (1..=NEIGHBOURHOOD).contains(&distance);
        is_near.then(|| base.further(distance)).flatten()
    }

    /// A page's base was found: what was proposed is near to it.
    pub fn found(&mut self, at: Position, base: Proposal) {
        match base.way {
            Way::Zero => return self.found_zero(),
            Way::Neighbour => self.counters.found_neighbour += 1,
            Way::Line => self.counters.found_line += 1,
        }
        self.last = Some((at, base.at));
    }

    /// A page is packed on the page of zeros.
    pub fn found_zero(&mut self) {
        self.counters.found_zero += 1;
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{near_copy, random};
    use vmm_dedup_protocol::key::Salt;

    const SALT: Salt = Salt(1);

    fn at(memory: u32, frame: u64) -> Position {
        Position::try_new(memory, frame).unwrap()
    }

    fn proposed(search: &mut BaseSearch, index: &LineIndex, page: &Page, at: Position) -> Vec<Proposal> {
        let mut proposals = Vec::new();
        search.propose(index, at, LineHashes::of(page, SALT), &mut proposals);
        proposals
    }

    #[test]
    fn the_neighbour_shows_the_way_where_no_line_is_the_same() {
        let index = LineIndex::try_new(1).unwrap();
        let mut search = BaseSearch::new(Bases::Domain);
        let line = Proposal {
            at: at(1, 70),
            way: Way::Line,
            lines: 2,
        };
        search.found(at(0, 20), line);

        let near = proposed(&mut search, &index, &random(1), at(0, 23));
        let far = proposed(&mut search, &index, &random(1), at(0, 37));
        let elsewhere = proposed(&mut search, &index, &random(1), at(2, 21));

        assert_eq!(
            (near.len(), near[0].at, near[0].way),
            (1, at(1, 73), Way::Neighbour)
        );
        assert_eq!((far, elsewhere), (vec![], vec![]));
    }

    #[test]
    fn pages_with_more_lines_come_first_and_each_comes_once() {
        let mut index = LineIndex::try_new(100).unwrap();
        let page = random(5);
        // One of its four lines differs.
        index.enter(at(0, 1), LineHashes::of(&near_copy(&page, 30, 6), SALT));
        index.enter(at(0, 2), LineHashes::of(&page, SALT));
        index.enter(at(0, 3), LineHashes::of(&page, SALT));
        let mut search = BaseSearch::new(Bases::Own);

        let found = proposed(&mut search, &index, &page, at(0, 3));

        assert_eq!(found[0].at, at(0, 2));
        assert_eq!(found[0].lines, 4);
        assert!(
            found[1..].iter().all(|proposal| proposal.at == at(0, 1)),
            "{found:?}"
        );
        assert!(found.len() <= 2);
    }

    #[test]
    fn pages_of_other_memories_are_proposed_only_in_a_domain() {
        let mut index = LineIndex::try_new(10).unwrap();
        let page = random(5);
        index.enter(at(1, 1), LineHashes::of(&page, SALT));
        let found = |bases| proposed(&mut BaseSearch::new(bases), &index, &page, at(0, 3)).len();
        assert_eq!((found(Bases::Own), found(Bases::Domain)), (0, 1));
    }

    #[test]
    fn proposals_are_capped_and_counted() {
        let mut index = LineIndex::try_new(100).unwrap();
        let page = random(5);
        // Other pages, each with one of the four lines.
        for (n, offset) in (0..16).zip(vmm_dedup_protocol::key::line_offsets().into_iter().cycle()) {
            let mut other = random(100 + n);
            other[offset..][..64].copy_from_slice(&page[offset..][..64]);
            index.enter(at(0, n), LineHashes::of(&other, SALT));
        }
        let mut search = BaseSearch::new(Bases::Own);

        let found = proposed(&mut search, &index, &page, at(0, 99));

        let counters = search.counters();
        assert_eq!(found.len(), MOST_PROPOSALS);
        assert!(counters.capped > 0 && counters.capped <= 8);
        assert_eq!((counters.searched, counters.proposed), (1, MOST_PROPOSALS as u64));
    }
}
