//! PageCmp as a comparing backend of the engine.

use crate::{Account, CHIPS, Page, compare, compare_hybrid};
use std::cmp::Ordering;
use std::sync::atomic::Ordering as Memory;
use vmm_dedup::compare::{
    Account as Cost, Answer, Backend, CpuBackend, Error, KeyKind, PageId, Pages, Stopwatch,
    among_by_comparing, search_by_comparing,
};
use vmm_dedup_protocol::tree::TreeReader;

/// Compares in memory, always or from the second line on. Keys are KSM's, made by the CPU: PageCmp leaves them to KSM.
#[derive(Debug)]
pub struct PageCmpBackend {
    hybrid: bool,
    keys: CpuBackend,
    own: Cost,
    chips: Account,
}

impl PageCmpBackend {
    /// PageCmp, or PageCmp-Hybrid.
    pub fn new(hybrid: bool) -> Self {
        Self {
            hybrid,
            keys: CpuBackend::new(KeyKind::Jhash2),
            own: Cost::default(),
            chips: Account::default(),
        }
    }

    /// What was compared where, which gives the costs by the paper's constants.
    pub fn chips(&self) -> &Account {
        &self.chips
    }

    /// Compares a candidate with a page.
    fn order(&mut self, pages: &dyn Pages, candidate: &Page, other: PageId) -> Answer<Ordering> {
        let other = read(pages, other)?;
        self.own.comparisons += 1;
        Ok(if self.hybrid {
            compare_hybrid(candidate, &other, &mut self.chips)
        } else {
            compare(candidate, &other, &mut self.chips)
        })
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

impl Backend for PageCmpBackend {
    fn name(&self) -> &'static str {
        if self.hybrid { "pagecmp-hybrid" } else { "pagecmp" }
    }

    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        self.keys.keys(pages, of)
    }

    fn compare(&mut self, pages: &dyn Pages, pairs: &[(PageId, PageId)]) -> Vec<Answer<Ordering>> {
        pairs
            .iter()
            .map(|(a, b)| self.with(pages, *a, |this, a| this.order(pages, a, *b)))
            .collect()
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup::compare::{Arena, conformance};

    #[test]
    fn it_conforms() {
        conformance::check(&mut |_| Box::new(PageCmpBackend::new(false)));
    }

    #[test]
    fn hybrid_conforms() {
        conformance::check(&mut |_| Box::new(PageCmpBackend::new(true)));
    }

    #[test]
    fn a_comparison_moves_eight_bytes_and_hybrid_a_line_first() {
        let arena = Arena::new(2).unwrap();
        let bytes = [false, true].map(|hybrid| {
            let mut backend = PageCmpBackend::new(hybrid);
            backend.compare(&arena, &[(PageId(0), PageId(1))]);
            backend.account().bytes
        });
        assert_eq!(bytes, [8, 72]);
    }
}
