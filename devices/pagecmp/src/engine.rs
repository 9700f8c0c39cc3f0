//! PageCmp as an engine of the service.
#![allow(unsafe_code)] // the trait's submit() is unsafe; here it reads the pages at once

use crate::controller::{compare, compare_hybrid};
use crate::cost::Account;
use crate::page::{CHIPS, Page};
use std::cmp::Ordering;
use std::sync::atomic::Ordering as Memory;
use std::time::Duration;
use vmm_dedup::compare::{
    Account as Cost, Answer, Compared, Cpu, Engine, Error, KeyKind, Keys, Limits, PageId, Pages, Pair,
    PairAnswer, Stopwatch, TreeSearch, Verify, With, among_by_comparing, search_by_comparing,
};
use vmm_dedup_protocol::tree::TreeReader;

/// Pairs that it verifies in a call: the model takes some microseconds for each.
const AT_ONCE: usize = 8;

/// Compares in memory, always or from the second line on. Keys are KSM's, made by the CPU: PageCmp leaves them to KSM.
#[derive(Debug)]
pub struct PageCmpEngine {
    hybrid: bool,
    keys: Cpu,
    own: Cost,
    chips: Account,
    verified: Vec<PairAnswer>,
}

impl PageCmpEngine {
    /// PageCmp, or PageCmp-Hybrid.
    pub fn new(hybrid: bool) -> Self {
        Self {
            hybrid,
            keys: Cpu::new(KeyKind::Jhash2),
            own: Cost::default(),
            chips: Account::default(),
            verified: Vec::new(),
        }
    }

    /// What was compared where, which gives the costs by the paper's constants.
    pub fn chips(&self) -> &Account {
        &self.chips
    }

    /// Compares a candidate with a page.
    fn order(&mut self, pages: &dyn Pages, candidate: &Page, other: PageId) -> Answer<Ordering> {
        let other = read(pages, other)?;
        Ok(self.compare(candidate, &other))
    }

    fn compare(&mut self, a: &Page, b: &Page) -> Ordering {
        self.own.comparisons += 1;
        if self.hybrid {
            compare_hybrid(a, b, &mut self.chips)
        } else {
            compare(a, b, &mut self.chips)
        }
    }

    /// Does something for a candidate, timed.
    fn with<T>(
        &mut self,
        pages: &dyn Pages,
        candidate: PageId,
        act: impl FnOnce(&mut Self, &Page) -> Answer<T>,
    ) -> Answer<T> {
        let watch = Stopwatch::start();
        self.own.pages += 1;
        let answer = read(pages, candidate).and_then(|candidate| act(self, &candidate));
        watch.stop(&mut self.own);
        answer
    }
}

fn read(pages: &dyn Pages, page: PageId) -> Answer<Page> {
    let view = pages.view(page).ok_or(Error::Fault(page))?;
    Ok(std::array::from_fn(|word| view[word].load(Memory::Relaxed)))
}

impl Engine for PageCmpEngine {
    fn name(&self) -> &'static str {
        if self.hybrid { "pagecmp-hybrid" } else { "pagecmp" }
    }

    /// Bytes are those that the memory channel would carry: 8 for a comparison in memory, a line of one page (the
    /// candidate is in the cache, as the paper assumes) for one by the CPU. The time is that of the model.
    fn account(&self) -> Cost {
        let keys = self.keys.account();
        let first_lines = self.chips.first_lines;
        Cost {
            pages: self.own.pages + keys.pages,
            comparisons: self.own.comparisons,
            lines: keys.lines + first_lines,
            bytes: keys.bytes + self.chips.in_memory * CHIPS as u64 + first_lines * 64,
            wall_ns: self.own.wall_ns + keys.wall_ns,
            cpu_ns: self.own.cpu_ns + keys.cpu_ns,
            device_cpu_ns: 0,
        }
    }
}

impl Keys for PageCmpEngine {
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        self.keys.keys(pages, of)
    }
}

impl TreeSearch for PageCmpEngine {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        let twin = |candidate: &PageId| {
            self.with(pages, *candidate, |this, page| {
                search_by_comparing(tree, |other| this.order(pages, page, other))
            })
        };
        candidates.iter().map(twin).collect()
    }

    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        self.with(pages, candidate, |this, page| {
            among_by_comparing(set, |other| this.order(pages, page, other))
        })
    }
}

/// The controller tells the order of two pages. It does not tell the byte that decides, nor does it compare a page with
/// anything that is not in memory.
impl Verify for PageCmpEngine {
    fn limits(&self) -> Limits {
        Limits {
            at_once: AT_ONCE,
            zeros: false,
        }
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        let watch = Stopwatch::start();
        self.own.pages += pairs.len() as u64;
        for (place, pair) in pairs.iter().enumerate() {
            let answer = match pair.with {
                With::Slot { page, .. } => match self.compare(pair.taken.words(), page.words()) {
                    Ordering::Equal => Ok(Compared::Equal),
                    Ordering::Less | Ordering::Greater => Ok(Compared::Different(None)),
                },
                With::Zeros => Err(Error::Address(pair.taken.address())),
            };
            let number = first + place as u64;
            self.verified.push(PairAnswer { number, answer });
        }
        watch.stop(&mut self.own);
        Ok(pairs.len())
    }

    fn poll(&mut self, _wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        answers.append(&mut self.verified);
        Ok(())
    }

    fn abort(&mut self) {
        self.verified.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup::compare::{Arena, conformance};

    #[test]
    fn it_conforms() {
        conformance::keys(&mut |_| Box::new(PageCmpEngine::new(false)));
        conformance::tree_search(&mut |_| Box::new(PageCmpEngine::new(false)));
        conformance::verify(&mut |_| Box::new(PageCmpEngine::new(false)));
    }

    #[test]
    fn hybrid_conforms() {
        conformance::tree_search(&mut |_| Box::new(PageCmpEngine::new(true)));
        conformance::verify(&mut |_| Box::new(PageCmpEngine::new(true)));
    }

    #[test]
    fn a_comparison_moves_eight_bytes_and_hybrid_a_line_first() {
        let arena = Arena::new(2).unwrap();
        let bytes = [false, true].map(|hybrid| {
            let mut engine = PageCmpEngine::new(hybrid);
            assert_eq!(engine.among(&arena, PageId(0), &[PageId(1)]), Ok(Some(0)));
            engine.account().bytes
        });
        assert_eq!(bytes, [8, 72]);
    }
}
