//! Every page, packed by every codec, alone and with the nearest candidates: the lengths that come out.

use super::clock::{cpu, each_us};
use super::gather::Gathered;
use super::work::Work;
use crate::error::Error;
use crate::packing::{Search, Tried};
use std::ops::Range;
use std::time::Duration;
use vmm_dedup_packed::page::differing_lines;
use vmm_dedup_packed::search::{Counters, Proposal};
use vmm_dedup_packed::{
    Base, BaseSearch, Bases, Candidate, Codecs, Kind, LINES, Offer, Offers, Page, Position, Rule, Weights,
    ZERO_PAGE,
};
use vmm_dedup_packed::{Keeping, Kinds};
use vmm_dedup_protocol::PAGE_SIZE;

/// Candidates that a page is packed with, those with the fewest lines that differ.
const MOST_CANDIDATES: usize = 4;
/// Overlays are tried up to all lines; plans have limits.
#[allow(clippy::cast_possible_truncation)] // 64
const ALL_LINES: u32 = LINES as u32;

/// What came of a page's tries: 8 bytes for each.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// The base's number; see [`NO_BASE`] and [`ZERO_BASE`].
    base: u32,
    length: u16,
    kind: Kind,
}

const _: () = assert!(size_of::<Outcome>() == 8);

const NO_BASE: u32 = u32::MAX;
const ZERO_BASE: u32 = u32::MAX - 1;

/// What came of all tries.
pub(super) struct Tries {
    /// Page after page.
    outcomes: Vec<Outcome>,
    /// Of each page: where its outcomes end.
    ends: Vec<u32>,
    spent: [Spent; Kind::ALL.len()],
}

#[derive(Clone, Copy, Default)]
struct Spent {
    tries: u64,
    offers: u64,
    cpu: Duration,
}

impl Tries {
    /// The offers for a page.
    pub(super) fn offers(&self, pages: &Gathered<'_>, number: u32, offers: &mut Offers) {
        offers.all.clear();
        let begin = number
            .checked_sub(1)
            .map_or(0, |before| self.ends[before as usize]);
        let outcomes = &self.outcomes[begin as usize..self.ends[number as usize] as usize];
        offers.all.extend(outcomes.iter().filter_map(|outcome| {
            let base = match outcome.base {
                NO_BASE => Base::None,
                ZERO_BASE => Base::Zero,
                number => Base::At(pages.position(number)?),
            };
            Some(Offer {
                kind: outcome.kind,
                base,
                length: outcome.length,
            })
        }));
    }

    /// What each codec did.
    pub(super) fn tried(&self) -> Vec<Tried> {
        let kinds = Kind::ALL.iter().zip(&self.spent);
        let tried = kinds.map(|(kind, spent)| Tried {
            codec: kind.name(),
            tries: spent.tries,
            offers: spent.offers,
            pack_us: each_us(spent.cpu, spent.tries),
        });
        tried.collect()
    }
}

/// What a thread has.
struct Trier {
    codecs: Codecs,
    proposals: Vec<Proposal>,
    /// As many as are proposed at most, so that none is allocated for each page.
    candidates: Vec<(u32, Proposal, Box<Page>)>,
    offers: Offers,
}

/// What came of a piece.
struct Piece {
    outcomes: Vec<Outcome>,
    /// Of each page: how many outcomes it has.
    counts: Vec<u32>,
    spent: [Spent; Kind::ALL.len()],
    counters: Counters,
}

/// Tries all pages.
pub(super) fn all(work: &Work<'_>, bases: Bases) -> Result<(Tries, Search), Error> {
    let make = || {
        Ok(Trier {
            codecs: Codecs::try_new(ALL_LINES)?,
            proposals: Vec::new(),
            candidates: Vec::new(),
            offers: Offers::default(),
        })
    };
    let pieces = work.on_all(make, |trier, range| trier.piece(work.pages, bases, range))?;
    let mut tries = Tries {
        outcomes: Vec::new(),
        ends: Vec::with_capacity(work.pages.len()),
        spent: Default::default(),
    };
    let (mut counters, mut end) = (Counters::default(), 0);
    for piece in pieces {
        tries.outcomes.extend(piece.outcomes);
        for count in piece.counts {
            end += count;
            tries.ends.push(end);
        }
        for (sum, more) in tries.spent.iter_mut().zip(piece.spent) {
            sum.tries += more.tries;
            sum.offers += more.offers;
            sum.cpu += more.cpu;
        }
        counters.add(&piece.counters);
    }
    let search = Search {
        searched: counters.searched,
        proposed: counters.proposed,
        capped: counters.capped,
        pushed_out: work.pages.index().pushed_out(),
        zero: counters.found_zero,
        neighbour: counters.found_neighbour,
        line: counters.found_line,
    };
    Ok((tries, search))
}

impl Trier {
    fn piece(&mut self, pages: &Gathered<'_>, bases: Bases, range: Range<u32>) -> Result<Piece, Error> {
        let mut search = BaseSearch::new(bases);
        let mut piece = Piece {
            outcomes: Vec::new(),
            counts: Vec::new(),
            spent: Default::default(),
            counters: Counters::default(),
        };
        let mut page = ZERO_PAGE;
        for number in range {
            let before = piece.outcomes.len();
            if let Some(at) = pages.position(number)
                && pages.read(number, &mut page)?
            {
                self.find_candidates(pages, &mut search, at, &page)?;
                self.pack(pages, &page, &mut piece);
                self.tell(&mut search, at);
            }
            // A page has some two dozen outcomes.
            let count = u32::try_from(piece.outcomes.len() - before).unwrap_or(0);
            piece.counts.push(count);
        }
        piece.counters = search.counters();
        Ok(piece)
    }

    /// Reads what is proposed, and keeps those with the fewest lines that differ.
    fn find_candidates(
        &mut self,
        pages: &Gathered<'_>,
        search: &mut BaseSearch,
        at: Position,
        page: &Page,
    ) -> Result<(), Error> {
        let lines = Gathered::lines(page);
        search.propose(pages.index(), at, lines, &mut self.proposals);
        self.candidates.clear();
        let mut other = Box::new(ZERO_PAGE);
        for proposal in &self.proposals {
            // The neighbour's neighbour may have a twin.
            let Some(number) = pages.number(proposal.at) else {
                continue;
            };
            if pages.read(number, &mut other)? {
                let differing = differing_lines(page, &other).count_ones();
                self.candidates.push((differing, *proposal, other.clone()));
            }
        }
        self.candidates.sort_by_key(|(differing, ..)| *differing);
        self.candidates.truncate(MOST_CANDIDATES);
        Ok(())
    }

    /// Packs a page by every codec, each by itself for its CPU time.
    fn pack(&mut self, pages: &Gathered<'_>, page: &Page, piece: &mut Piece) {
        let candidates: Vec<Candidate<'_>> = self
            .candidates
            .iter()
            .map(|(_, proposal, page)| Candidate {
                at: proposal.at,
                page,
            })
            .collect();
        let mut all = Vec::new();
        for kind in Kind::ALL {
            let start = cpu();
            self.offers
                .collect(&mut self.codecs, Kinds::of(&[kind]), page, &candidates);
            let spent = &mut piece.spent[kind.number()];
            spent.cpu += cpu().saturating_sub(start);
            // Overlays are tried on the page of zeros as well.
            let alone = u64::from(!matches!(kind, Kind::Lz4Patch | Kind::ZstdPatch));
            spent.tries += alone
                + if kind.needs_base() {
                    candidates.len() as u64
                } else {
                    0
                };
            spent.offers += self.offers.all.len() as u64;
            all.append(&mut self.offers.all);
        }
        let outcomes = all.iter().filter_map(|offer| {
            let base = match offer.base {
                Base::None => NO_BASE,
                Base::Zero => ZERO_BASE,
                Base::At(at) => pages.number(at)?,
            };
            Some(Outcome {
                base,
                length: offer.length,
                kind: offer.kind,
            })
        });
        piece.outcomes.extend(outcomes);
        self.offers.all = all;
    }

    /// Tells the search which base is best, if only size counts and it were one already.
    fn tell(&self, search: &mut BaseSearch, at: Position) {
        let rule = Rule {
            kinds: Kinds::all(),
            weights: Weights::size_alone(),
            keeping: Keeping::Whole,
            most_lines: ALL_LINES,
        };
        let best = rule.choose(&self.offers, |_| u32::MAX);
        match best.map(|(offer, _)| offer.base) {
            Some(Base::Zero) => search.found_zero(),
            Some(Base::At(base)) => {
                if let Some((_, proposal, _)) = self.candidates.iter().find(|(_, p, _)| p.at == base) {
                    search.found(at, *proposal);
                }
            }
            Some(Base::None) | None => {}
        }
    }
}

const _: () = assert!(PAGE_SIZE <= u16::MAX as usize);
