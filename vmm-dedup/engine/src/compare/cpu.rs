//! The CPU as an engine: what the others are measured against, and what takes their place.
#![allow(unsafe_code)] // the trait's submit() is unsafe; here it reads the pages at once

use super::{
    Account, Answer, Compared, Delta, Deltas, Engine, Error, Keys, Limits, PageId, PageView, Pages, Pair,
    PairAnswer, Stopwatch, TreeSearch, Verify, among_by_comparing, jhash2, search_by_comparing,
};
use std::cmp::Ordering;
use std::sync::atomic::Ordering as Memory;
use std::time::Duration;
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageWords, Salt, line_words};
use vmm_dedup_protocol::tree::TreeReader;

const LINE_WORDS: usize = 8;
const LINE_BYTES: u64 = 64;
const PAGE_LINES: usize = PAGE_WORDS / LINE_WORDS;
const KSM_SEED: u32 = 17;
const KSM_WORDS: usize = 128; // 1 KiB
/// Pairs that it verifies in a call: some ten microseconds.
const AT_ONCE: usize = 64;

/// Which keys the CPU makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// The engine's: four lines, 256 bytes, XXH3 to 47 bits.
    Lines(Salt),
    /// KSM's in the PageForge paper (section 2.1): jhash2 of the page's first KiB, 32 bits.
    Jhash2,
}

/// Does everything on the caller's CPU, at once.
#[derive(Debug)]
pub struct Cpu {
    kind: KeyKind,
    account: Account,
    line_counts: LineCounts,
    verified: Vec<PairAnswer>,
}

/// How many comparisons read n lines of each page, at n.
pub type LineCounts = [u64; PAGE_LINES + 1];

impl Cpu {
    /// An engine that makes such keys.
    pub fn new(kind: KeyKind) -> Self {
        Self {
            kind,
            account: Account::default(),
            line_counts: [0; PAGE_LINES + 1],
            verified: Vec::new(),
        }
    }

    /// How far comparisons had to read.
    pub fn line_counts(&self) -> &LineCounts {
        &self.line_counts
    }

    /// Compares a candidate with a page, and notes it.
    fn order(&mut self, pages: &dyn Pages, a: &PageView, b: PageId) -> Answer<Ordering> {
        let (order, lines) = compare_views(a, view_of(pages, b)?);
        self.note_comparison(lines);
        Ok(order)
    }

    fn note_comparison(&mut self, lines: usize) {
        self.line_counts[lines] += 1;
        self.account.comparisons += 1;
        self.account.lines += lines as u64 * 2;
        self.account.bytes += lines as u64 * 2 * LINE_BYTES;
    }

    fn key(&mut self, page: &PageView) -> u64 {
        let load = |word: usize| page[word].load(Memory::Relaxed);
        let (key, lines) = match self.kind {
            KeyKind::Lines(salt) => (Key::of_lines(&line_words(load), salt).raw(), 4),
            KeyKind::Jhash2 => {
                let halves = (0..KSM_WORDS).flat_map(|word| {
                    let bytes = load(word).to_ne_bytes();
                    [0, 4].map(|at| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i])))
                });
                let mut words = [0; KSM_WORDS * 2];
                words.iter_mut().zip(halves).for_each(|(to, from)| *to = from);
                (u64::from(jhash2(&words, KSM_SEED)), 16)
            }
        };
        self.account.lines += lines;
        self.account.bytes += lines * LINE_BYTES;
        key
    }
}

/// Compares two pages as `memcmp` does; returns the lines of each that were read, too.
pub(super) fn compare_views(a: &PageView, b: &PageView) -> (Ordering, usize) {
    let lines = a.chunks_exact(LINE_WORDS).zip(b.chunks_exact(LINE_WORDS));
    for (read, (a, b)) in (1..).zip(lines) {
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (a.load(Memory::Relaxed), b.load(Memory::Relaxed));
            if a != b {
                return (a.to_ne_bytes().cmp(&b.to_ne_bytes()), read);
            }
        }
    }
    (Ordering::Equal, PAGE_LINES)
}

/// The page, or the error that says it is missing.
pub(super) fn view_of(pages: &dyn Pages, page: PageId) -> Answer<&PageView> {
    pages.view(page).ok_or(Error::Fault(page))
}

impl Engine for Cpu {
    fn name(&self) -> &'static str {
        match self.kind {
            KeyKind::Lines(_) => "cpu",
            KeyKind::Jhash2 => "cpu-jhash2",
        }
    }

    fn account(&self) -> Account {
        self.account
    }
}

impl Keys for Cpu {
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        let watch = Stopwatch::start();
        self.account.pages += of.len() as u64;
        let keys = of
            .iter()
            .map(|page| Ok(self.key(view_of(pages, *page)?)))
            .collect();
        watch.stop(&mut self.account);
        keys
    }
}

/// [`super::Verifier`] asks it pair by pair, which is not in its account; batches are for callers that know engines only.
impl Verify for Cpu {
    fn limits(&self) -> Limits {
        Limits {
            at_once: AT_ONCE,
            zeros: true,
        }
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        let watch = Stopwatch::start();
        self.account.pages += pairs.len() as u64;
        for (place, pair) in pairs.iter().enumerate() {
            let number = first + place as u64;
            let compared = pair.compare();
            self.note_comparison(match compared {
                Compared::Different(Some(offset)) => usize::from(offset) / (LINE_WORDS * 8) + 1,
                _ => PAGE_LINES,
            });
            let answer = Ok(compared);
            self.verified.push(PairAnswer { number, answer });
        }
        watch.stop(&mut self.account);
        Ok(pairs.len())
    }

    /// Whether they are equal, and no more: to find out where they differ takes another look.
    #[inline]
    fn compare_now(&mut self, pair: &Pair<'_>) -> Option<Compared> {
        Some(match pair.equal() {
            true => Compared::Equal,
            false => Compared::Different(None),
        })
    }

    fn poll(&mut self, _wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        answers.append(&mut self.verified);
        Ok(())
    }

    fn abort(&mut self) {
        self.verified.clear();
    }
}

impl Deltas for Cpu {
    fn create_deltas(
        &mut self,
        pages: &dyn Pages,
        of: &[(PageId, PageId)],
        most: usize,
    ) -> Vec<Answer<Option<Delta>>> {
        let watch = Stopwatch::start();
        let mut create = |(base, changed): &(PageId, PageId)| {
            let base = words_of(view_of(pages, *base)?);
            let delta = Delta::between(&base, &words_of(view_of(pages, *changed)?));
            self.note_comparison(PAGE_LINES);
            Ok(Some(delta).filter(|delta| delta.len() <= most))
        };
        let deltas = of.iter().map(&mut create).collect();
        watch.stop(&mut self.account);
        deltas
    }

    fn apply_deltas(&mut self, pages: &dyn Pages, of: &[(PageId, &Delta)]) -> Vec<Answer<Box<PageWords>>> {
        let watch = Stopwatch::start();
        let apply = |(base, delta): &(PageId, &Delta)| {
            let mut page = Box::new(words_of(view_of(pages, *base)?));
            delta.apply(&mut page);
            Ok(page)
        };
        let applied = of.iter().map(apply).collect();
        watch.stop(&mut self.account);
        applied
    }
}

/// A copy of a page, torn if somebody writes it meanwhile.
fn words_of(page: &PageView) -> PageWords {
    std::array::from_fn(|word| page[word].load(Memory::Relaxed))
}

impl TreeSearch for Cpu {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        let watch = Stopwatch::start();
        self.account.pages += candidates.len() as u64;
        let twin = |candidate: &PageId| {
            let candidate = view_of(pages, *candidate)?;
            search_by_comparing(tree, |other| self.order(pages, candidate, other))
        };
        let twins = candidates.iter().map(twin).collect();
        watch.stop(&mut self.account);
        twins
    }

    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        let watch = Stopwatch::start();
        self.account.pages += 1;
        let twin = view_of(pages, candidate)
            .and_then(|candidate| among_by_comparing(set, |other| self.order(pages, candidate, other)));
        watch.stop(&mut self.account);
        twin
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Arena, conformance};

    #[test]
    fn it_conforms() {
        let cpu = || Cpu::new(KeyKind::Lines(Salt(7)));
        conformance::keys(&mut |_| Box::new(cpu()));
        conformance::tree_search(&mut |_| Box::new(cpu()));
        conformance::verify(&mut |_| Box::new(cpu()));
        conformance::deltas(&mut |_| Box::new(cpu()));
    }

    #[test]
    fn ksms_keys_conform() {
        conformance::keys(&mut |_| Box::new(Cpu::new(KeyKind::Jhash2)));
    }

    #[test]
    fn keys_read_256_bytes_and_ksms_a_kibibyte() {
        let arena = Arena::new(1).unwrap();
        let bytes = [KeyKind::Lines(Salt(7)), KeyKind::Jhash2].map(|kind| {
            let mut cpu = Cpu::new(kind);
            cpu.keys(&arena, &[PageId(0)]);
            cpu.account().bytes
        });
        assert_eq!(bytes, [256, 1024]);
    }
}
