//! What packing saves if pages arrive one after the other, as they do in an engine, beside `estimate --pack`, which decides for
//! all together.
//!
//! `cargo run --release -p vmm-dedup-estimate --example arriving -- FILE...`
//!
//! The images, each of one guest, are gone through in turn, 512 pages at a time. A page's candidates are pages that came before. One
//! that is a base already is used at once. Any other becomes one when two pages or more would gain and pay for it together; the
//! earlier ones are packed again then. Counted are size classes, bookkeeping and the index, without the segments' gaps.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use vmm_dedup_estimate::{Error, Inputs, Memory};
use vmm_dedup_packed::choice::{BASE_METADATA_BYTES, LEAST_GAINING};
use vmm_dedup_packed::{
    BaseSearch, Bases, Candidate, Codecs, Keeping, Kinds, LineHashes, LineIndex, Offers, Page, Position,
    Proposal, Rule, Weights, ZERO_PAGE,
};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PageHash, Salt};

const SALT: Salt = Salt(0);
/// Pages of one guest that are looked at before the next guest's.
const STRETCH: usize = 512;
/// Most lines of an overlay beside compression.
const MOST_LINES: u32 = 16;
const MOST_CANDIDATES: usize = 4;

/// How a page is kept, and what that costs in bytes.
#[derive(Clone, Copy, PartialEq)]
enum Kept {
    /// Without a base.
    Alone(u32),
    /// With a base.
    With(u32),
    /// Whole, as a base.
    Base,
}

impl Kept {
    fn cost(self) -> u32 {
        match self {
            Self::Alone(cost) | Self::With(cost) => cost,
            Self::Base => Rule::WHOLE + BASE_METADATA_BYTES,
        }
    }
}

/// All pages of all images, and which have no twin.
struct Images {
    pages: Vec<Vec<Box<Page>>>,
    count: HashMap<PageHash, u32>,
}

impl Images {
    fn read(memories: &[Memory]) -> Result<Self, Error> {
        let (mut pages, mut count) = (Vec::new(), HashMap::new());
        for memory in memories {
            let mut own = Vec::new();
            memory.each_page(|page| -> Result<(), Error> {
                *count.entry(PageHash::of_bytes(page, SALT)).or_default() += 1;
                let mut copy = Box::new(ZERO_PAGE);
                copy.copy_from_slice(page);
                own.push(copy);
                Ok(())
            })?;
            pages.push(own);
        }
        count.remove(&PageHash::of_bytes(&ZERO_PAGE, SALT));
        Ok(Self { pages, count })
    }

    fn page(&self, at: Position) -> Option<&Page> {
        let frame = usize::try_from(at.frame()).ok()?;
        Some(self.pages.get(at.memory() as usize)?.get(frame)?.as_ref())
    }

    /// The pages without a twin, in the order in which they arrive.
    fn arriving(&self) -> Vec<Position> {
        let longest = self.pages.iter().map(Vec::len).max().unwrap_or(0);
        let stretches = (0..longest).step_by(STRETCH);
        let places = stretches.flat_map(|first| {
            (0..).zip(&self.pages).flat_map(move |(memory, pages)| {
                let frames = first..pages.len().min(first + STRETCH);
                frames.filter_map(move |frame| Position::try_new(memory, frame as u64))
            })
        });
        let is_alone = |at: &Position| {
            let page = self.page(*at);
            page.is_some_and(|page| self.count.get(&PageHash::of_bytes(page, SALT)) == Some(&1))
        };
        places.filter(is_alone).collect()
    }
}

struct Packer<'a> {
    images: &'a Images,
    rule: Rule,
    codecs: Codecs,
    index: LineIndex,
    /// One for each image.
    searches: Vec<BaseSearch>,
    kept: HashMap<Position, Kept>,
    /// Of each page that is no base: which would gain if it were, and what they would cost.
    would_gain: HashMap<Position, Vec<(Position, u32)>>,
    packed_again: u64,
}

impl Packer<'_> {
    fn arrives(&mut self, at: Position, page: &Page) {
        let lines = LineHashes::of(page, SALT);
        let mut proposals = Vec::new();
        self.searches[at.memory() as usize].propose(&self.index, at, lines, &mut proposals);
        self.index.enter(at, lines);
        let (candidates, offers) = self.offers(page, &proposals);
        let alone = self
            .rule
            .choose(&offers, |_| 0)
            .map_or(Rule::WHOLE, |(_, cost)| cost);
        let mut gains: Vec<(u32, Position)> = self
            .rule
            .gains(&offers)
            .map(|(base, cost)| (cost, base))
            .collect();
        gains.sort_unstable();
        let nearest = gains
            .first()
            .and_then(|(_, base)| candidates.iter().find(|c| c.at == *base));
        if let Some(proposal) = nearest {
            self.searches[at.memory() as usize].found(at, *proposal);
        }
        self.kept.insert(at, Kept::Alone(alone));
        let is_base = |base: &Position| self.kept.get(base) == Some(&Kept::Base);
        if let Some((cost, _)) = gains.iter().find(|(_, base)| is_base(base)) {
            self.kept.insert(at, Kept::With(*cost));
            return;
        }
        for (cost, base) in gains {
            let waiting = self.would_gain.entry(base).or_default();
            if waiting.last().is_none_or(|(last, _)| *last != at) {
                waiting.push((at, cost));
            }
            if self.becomes_base(base) {
                return;
            }
        }
    }

    /// What codecs make of a page, alone and with the nearest of those proposed that have no base themselves.
    fn offers(&mut self, page: &Page, proposals: &[Proposal]) -> (Vec<Proposal>, Offers) {
        let may_be_base = |proposal: &&Proposal| {
            let kept = self.kept.get(&proposal.at);
            matches!(kept, Some(Kept::Alone(_) | Kept::Base))
        };
        let read = proposals.iter().filter(may_be_base);
        let mut read: Vec<(&Proposal, &Page)> = read
            .filter_map(|proposal| Some((proposal, self.images.page(proposal.at)?)))
            .collect();
        read.sort_by_key(|(_, other)| vmm_dedup_packed::page::differing_lines(page, other).count_ones());
        read.truncate(MOST_CANDIDATES);
        let candidates: Vec<Candidate<'_>> = read
            .iter()
            .map(|(proposal, page)| Candidate {
                at: proposal.at,
                page,
            })
            .collect();
        let mut offers = Offers::default();
        offers.collect(&mut self.codecs, self.rule.kinds, page, &candidates);
        (read.into_iter().map(|(proposal, _)| *proposal).collect(), offers)
    }

    /// Makes a page a base if those that gain pay for it, and packs them with it.
    fn becomes_base(&mut self, base: Position) -> bool {
        let (Some(Kept::Alone(now)), Some(waiting)) = (self.kept.get(&base), self.would_gain.get(&base))
        else {
            return false;
        };
        let gain = |(page, cost): &(Position, u32)| match self.kept.get(page) {
            Some(Kept::Alone(alone)) => alone.checked_sub(*cost),
            _ => None,
        };
        let gains: Vec<u32> = waiting.iter().filter_map(gain).collect();
        let keep = Kept::Base.cost() - now;
        if gains.len() < LEAST_GAINING as usize || gains.iter().sum::<u32>() <= keep {
            return false;
        }
        for (page, cost) in self.would_gain.remove(&base).unwrap_or_default() {
            if matches!(self.kept.get(&page), Some(Kept::Alone(_))) {
                self.kept.insert(page, Kept::With(cost));
                self.packed_again += 1;
            }
        }
        // All but the page that has just come.
        self.packed_again -= 1;
        self.kept.insert(base, Kept::Base);
        true
    }
}

fn run(files: Vec<PathBuf>) -> Result<(), Box<dyn std::error::Error>> {
    let inputs = Inputs {
        files,
        ..Inputs::default()
    };
    let images = Images::read(&inputs.open()?)?;
    let order = images.arriving();
    let mut packer = Packer {
        rule: Rule {
            kinds: Kinds::all(),
            weights: Weights::default(),
            keeping: Keeping::Whole,
            most_lines: MOST_LINES,
        },
        codecs: Codecs::try_new(MOST_LINES)?,
        index: LineIndex::try_new(order.len()).ok_or("no memory for the index")?,
        searches: images
            .pages
            .iter()
            .map(|_| BaseSearch::new(Bases::Domain))
            .collect(),
        kept: HashMap::new(),
        would_gain: HashMap::new(),
        packed_again: 0,
        images: &images,
    };
    for at in &order {
        if let Some(page) = images.page(*at) {
            packer.arrives(*at, page);
        }
    }
    let cost: u64 = packer.kept.values().map(|kept| u64::from(kept.cost())).sum();
    let count = |is: fn(&Kept) -> bool| packer.kept.values().filter(|kept| is(kept)).count();
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let taken = usize::try_from(cost)? + packer.index.bytes();
    println!(
        "{} pages without a twin: {:.1} MiB saved, {} bases, {} pages with one, {} of them packed a second time",
        order.len(),
        mib(order.len() * PAGE_SIZE) - mib(taken),
        count(|kept| *kept == Kept::Base),
        count(|kept| matches!(kept, Kept::With(_))),
        packer.packed_again
    );
    Ok(())
}

fn main() -> ExitCode {
    let files: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if files.is_empty() {
        eprintln!("arriving: give memory dumps or images");
        return ExitCode::from(2);
    }
    match run(files) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("arriving: {error}");
            ExitCode::FAILURE
        }
    }
}
