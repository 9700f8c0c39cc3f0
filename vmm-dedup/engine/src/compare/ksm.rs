//! The kernel's KSM, as the papers describe it (PageForge, algorithm 1 and section 3.4): the baseline that they measure
//! against, with any engine to make its keys and search its trees.
//!
//! A pass takes every page that is not merged yet. A page that has a twin in the *stable* tree is merged with it. Else
//! its key is compared with that of the pass before: if it changed, or is the first, the page is left alone until the
//! next pass. If not, its twin is looked for in the *unstable* tree, which is made anew in each pass: if there is one,
//! both become one page, in the stable tree; if not, the page goes into the unstable tree.
//!
//! Pages are taken in batches, as KSM's `pages_to_scan` are, and an engine answers for a batch at once. What the pages
//! of one batch change in the trees is then found by the CPU, so that the outcome is that of taking them one by
//! one: a page of the batch that has just come into the stable tree is found by its key. Where KSM has red-black trees
//! these are AVL trees; both keep the same pages in the same order.
//!
//! This decides which pages are to be merged and keeps the account; it does not touch a guest. A page must stay as it
//! is once it was merged, as copy-on-write makes sure; pages in the unstable tree may change, and then may be missed or
//! be in the way of others, as in KSM.

use super::cpu::{compare_views, view_of};
use super::{Answer, PageId, Pages, TreeSearch};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use vmm_dedup_protocol::tree::{MAX_NODES, Node, TreeReader, TreeWriter, words};

/// Pages in a batch: `pages_to_scan` in the paper's table 2.
pub const PAGES_TO_SCAN: usize = 400;

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "settings", derive(serde::Serialize))]
pub struct Pass {
    /// Pages that were looked at.
    pub candidates: u64,
    /// Of these, merged with a page of the stable tree.
    pub stable_merges: u64,
    /// Merged with one of the unstable tree.
    pub unstable_merges: u64,
    /// Left alone: looked at for the first time.
    pub first_seen: u64,
    /// Left alone, since their keys had changed.
    pub key_mismatches: u64,
    /// Taken for unchanged, since their keys had not.
    pub key_matches: u64,
    /// Comparisons by the CPU, for what a batch had changed in the trees.
    pub own_comparisons: u64,
}

/// Pages that came into the stable tree with a batch, by their keys.
type Fresh = BTreeSet<(u64, Node)>;

/// KSM's memory of a set of pages, numbered from 0 on.
#[derive(Debug)]
pub struct Ksm {
    stable: Vec<AtomicU64>,
    unstable: Vec<AtomicU64>,
    keys: Vec<Option<u64>>,
    /// The page of the stable tree that a page was merged with. Those of the tree name themselves.
    merged: Vec<Option<Node>>,
}

impl Ksm {
    /// For so many pages, none of which was looked at.
    ///
    /// # Panics
    /// If there are more than a tree can hold.
    pub fn new(pages: usize) -> Self {
        assert!(
            pages <= MAX_NODES as usize,
            "a tree has at most {MAX_NODES} nodes"
        );
        let tree = || (0..words(pages)).map(|_| AtomicU64::new(0)).collect();
        Self {
            stable: tree(),
            unstable: tree(),
            keys: vec![None; pages],
            merged: vec![None; pages],
        }
    }

    /// The page that a page shares its memory with; itself, if it was the first of several.
    pub fn merged_with(&self, page: PageId) -> Option<PageId> {
        let at = usize::try_from(page.0).ok()?;
        self.merged.get(at).copied().flatten().map(PageId::of_node)
    }

    /// Looks at all pages once.
    ///
    /// # Errors
    /// If the engine failed, or a page is not there. What was merged until then is.
    pub fn pass(&mut self, engine: &mut dyn TreeSearch, pages: &dyn Pages) -> Answer<Pass> {
        let mut pass = Pass::default();
        let nodes: Vec<Node> = (0..)
            .zip(&self.merged)
            .filter(|(_, merged)| merged.is_none())
            .map(|(node, _)| node)
            .collect();
        for batch in nodes.chunks(PAGES_TO_SCAN) {
            // Those that were merged as the twin of one before them.
            let batch: Vec<Node> = batch
                .iter()
                .copied()
                .filter(|n| self.merged[*n as usize].is_none())
                .collect();
            self.batch(engine, pages, &batch, &mut pass)?;
        }
        TreeWriter::new(&self.unstable).clear();
        Ok(pass)
    }

    fn batch(
        &mut self,
        engine: &mut dyn TreeSearch,
        pages: &dyn Pages,
        batch: &[Node],
        pass: &mut Pass,
    ) -> Answer<()> {
        let ids = |nodes: &[Node]| -> Vec<PageId> { nodes.iter().copied().map(PageId::of_node).collect() };
        let stable = engine.search(pages, TreeReader::new(&self.stable), &ids(batch));
        let mut rest = Vec::with_capacity(batch.len());
        for (node, twin) in batch.iter().zip(stable) {
            pass.candidates += 1;
            match twin? {
                Some(twin) => {
                    self.merge(*node, twin);
                    pass.stable_merges += 1;
                }
                None => rest.push(*node),
            }
        }
        let keys = engine.keys(pages, &ids(&rest));
        let mut unchanged = Vec::with_capacity(rest.len());
        for (node, key) in rest.into_iter().zip(keys) {
            let key = Some(key?);
            match std::mem::replace(&mut self.keys[node as usize], key) {
                None => pass.first_seen += 1,
                before if before != key => pass.key_mismatches += 1,
                _ => {
                    pass.key_matches += 1;
                    unchanged.push(node);
                }
            }
        }
        let mut fresh = Fresh::new();
        let unstable = engine.search(pages, TreeReader::new(&self.unstable), &ids(&unchanged));
        for (node, twin) in unchanged.into_iter().zip(unstable) {
            self.place(pages, node, twin?, &mut fresh, pass)?;
        }
        Ok(())
    }

    /// Merges a page with its twin, or enters it into the unstable tree. `fresh`: what came into the stable tree after it was
    /// searched.
    fn place(
        &mut self,
        pages: &dyn Pages,
        node: Node,
        twin: Option<PageId>,
        fresh: &mut Fresh,
        pass: &mut Pass,
    ) -> Answer<()> {
        if self.merged[node as usize].is_some() {
            return Ok(()); // as the twin of a page before it
        }
        let page = view_of(pages, PageId::of_node(node))?;
        let mut compare = |other: Node| {
            pass.own_comparisons += 1;
            // A page that is gone meanwhile is greater than any: the tree is left without it.
            let other = pages.view(PageId::of_node(other));
            other.map_or(std::cmp::Ordering::Less, |other| compare_views(page, other).0)
        };
        let key = self.keys[node as usize].unwrap_or_default();
        let mut alike = fresh.range((key, Node::MIN)..=(key, Node::MAX));
        if let Some((_, twin)) = alike.find(|(_, other)| compare(*other).is_eq()) {
            self.merged[node as usize] = Some(*twin);
            pass.stable_merges += 1;
            return Ok(());
        }
        let found = twin.and_then(|twin| Node::try_from(twin.0).ok());
        let twin = found.or_else(|| TreeWriter::new(&self.unstable).insert(node, &mut compare));
        if let Some(twin) = twin {
            TreeWriter::new(&self.unstable).remove(twin, &mut compare);
            TreeWriter::new(&self.stable).insert(twin, &mut compare);
            fresh.insert((key, twin));
            self.merged[twin as usize] = Some(twin);
            self.merged[node as usize] = Some(twin);
            pass.unstable_merges += 1;
        }
        Ok(())
    }

    fn merge(&mut self, node: Node, twin: PageId) {
        self.merged[node as usize] = Node::try_from(twin.0).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Arena, Cpu, KeyKind};
    use proptest::prelude::*;
    use std::collections::HashMap;
    use vmm_dedup_protocol::key::PAGE_WORDS;

    fn arena(contents: &[u64]) -> Arena {
        let arena = Arena::new(contents.len()).unwrap();
        for (at, content) in contents.iter().enumerate() {
            arena.write(at, &[*content; PAGE_WORDS]);
        }
        arena
    }

    fn ksms() -> Cpu {
        Cpu::new(KeyKind::Jhash2)
    }

    fn merged(ksm: &Ksm, pages: usize) -> Vec<Option<u64>> {
        (0..pages as u64)
            .map(|page| ksm.merged_with(PageId(page)).map(|twin| twin.0))
            .collect()
    }

    #[test]
    fn twins_are_merged_in_the_second_pass_and_strangers_never() {
        let arena = arena(&[1, 2, 1, 3, 2, 1]);
        let (mut ksm, mut cpu) = (Ksm::new(6), ksms());
        let first = ksm.pass(&mut cpu, &arena).unwrap();
        assert_eq!((first.candidates, first.first_seen), (6, 6));
        let second = ksm.pass(&mut cpu, &arena).unwrap();
        assert_eq!(
            merged(&ksm, 6),
            [Some(0), Some(1), Some(0), None, Some(1), Some(0)]
        );
        assert_eq!((second.unstable_merges, second.stable_merges), (2, 1));
        let third = ksm.pass(&mut cpu, &arena).unwrap();
        assert_eq!((third.candidates, third.key_matches), (1, 1));
    }

    #[test]
    fn a_page_that_changes_is_left_alone() {
        let arena = arena(&[1, 1, 1]);
        let (mut ksm, mut cpu) = (Ksm::new(3), ksms());
        ksm.pass(&mut cpu, &arena).unwrap();
        arena.write(2, &[9; PAGE_WORDS]);
        let pass = ksm.pass(&mut cpu, &arena).unwrap();
        assert_eq!((pass.key_mismatches, pass.unstable_merges), (1, 1));
        assert_eq!(merged(&ksm, 3), [Some(0), Some(0), None]);
    }

    #[test]
    fn a_page_that_comes_later_joins_the_stable_tree() {
        let arena = arena(&[1, 1, 5]);
        let (mut ksm, mut cpu) = (Ksm::new(3), ksms());
        ksm.pass(&mut cpu, &arena).unwrap();
        ksm.pass(&mut cpu, &arena).unwrap();
        arena.write(2, &[1; PAGE_WORDS]);
        let pass = ksm.pass(&mut cpu, &arena).unwrap();
        assert_eq!((pass.stable_merges, pass.key_mismatches), (1, 0));
        assert_eq!(merged(&ksm, 3), [Some(0); 3]);
    }

    /// Algorithm 1, page by page, with lists for trees.
    fn reference(contents: &[u64], passes: usize) -> Vec<Option<u64>> {
        let mut merged = vec![None; contents.len()];
        let mut stable: HashMap<u64, u64> = HashMap::new();
        for pass in 0..passes {
            let mut unstable: HashMap<u64, u64> = HashMap::new();
            for (page, content) in (0u64..).zip(contents) {
                let at = usize::try_from(page).unwrap();
                if merged[at].is_some() {
                    continue;
                }
                if let Some(twin) = stable.get(content) {
                    merged[at] = Some(*twin);
                } else if pass > 0 {
                    if let Some(twin) = unstable.remove(content) {
                        stable.insert(*content, twin);
                        merged[usize::try_from(twin).unwrap()] = Some(twin);
                        merged[at] = Some(twin);
                    } else {
                        unstable.insert(*content, page);
                    }
                }
            }
        }
        merged
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// With more pages than a batch has, so that twins lie in one batch and in several.
        #[test]
        fn batches_merge_what_page_by_page_is_merged(
            contents in proptest::collection::vec(0..300u64, 1..1000),
            passes in 1..4usize,
        ) {
            let arena = arena(&contents);
            let (mut ksm, mut cpu) = (Ksm::new(contents.len()), ksms());
            for _ in 0..passes {
                ksm.pass(&mut cpu, &arena).unwrap();
            }
            prop_assert_eq!(merged(&ksm, contents.len()), reference(&contents, passes));
        }
    }
}
