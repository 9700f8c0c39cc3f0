//! Searching trees by comparisons, for many candidates at once (Para-ksm's two ways of filling a batch: many candidates,
//! and for each of them the next levels of the tree, of which only one page in each will turn out to be needed).
//!
//! *Keys.* The caller wants the keys of candidates without a twin. They are made in the same round as the comparisons of
//! the candidates that are still on their way: one wait for both.

use super::DsaEngine;
use super::page::PAGE;
use crate::channel::Channel;
use crate::instructions::fetch;
use std::cmp::Ordering;
use std::sync::atomic::Ordering as Memory;
use vmm_dedup::compare::{Answer, Error, Meanwhile, PageId, PageView, Pages, Searched, TreeSearch};
use vmm_dedup_dsa_abi::{Comparison, CompletionRecord, Descriptor};
use vmm_dedup_protocol::tree::{MAX_STEPS, Node, TreeReader};

const LINE_WORDS: usize = 8;
/// Walks that the CPU leads down side by side: while one of them waits for a line of memory, the others go on.
const ABREAST: usize = 16;

/// A page by its number, and as the CPU sees it.
type Seen<'p> = (PageId, &'p PageView);

/// A page of the tree, and the children of its node: of smaller content, and of greater.
type There<'p> = (&'p PageView, (Option<Node>, Option<Node>));

/// A candidate on its way down.
struct Walk<'p> {
    /// Its place in the question.
    at: usize,
    page: PageId,
    view: &'p PageView,
    node: Node,
    steps: usize,
    /// It is at its end, and what it found is known.
    over: bool,
}

/// Compares the words of two pages from one of these on; those of `words` only.
fn order_of_words(a: &PageView, b: &PageView, words: std::ops::Range<usize>) -> Ordering {
    for word in words {
        let (a, b) = (a[word].load(Memory::Relaxed), b[word].load(Memory::Relaxed));
        if a != b {
            return a.to_ne_bytes().cmp(&b.to_ne_bytes());
        }
    }
    Ordering::Equal
}

/// The order of two pages, of which the device has found the first byte that differs.
fn order_at(a: &PageView, b: &PageView, found: Comparison) -> Option<Ordering> {
    let offset = match found {
        Comparison::Equal => return Some(Ordering::Equal),
        Comparison::DiffersAt(offset) => usize::try_from(offset).ok()?,
    };
    let byte = |view: &PageView| Some(view.get(offset / 8)?.load(Memory::Relaxed).to_ne_bytes()[offset % 8]);
    // Equal bytes: somebody has written one of the pages meanwhile.
    Some(byte(a)?.cmp(&byte(b)?)).filter(|order| order.is_ne())
}

/// What the device says: of a pair, or of a page.
#[derive(Clone, Copy)]
enum Found {
    Order(Comparison),
    Key(u32),
}

impl DsaEngine {
    /// Compares pairs of pages: the order of each. What the device does not tell the CPU finds out.
    fn orders(&mut self, pairs: &[(Seen<'_>, Seen<'_>)]) -> Vec<Answer<Ordering>> {
        self.orders_and_keys(pairs, &[], &mut Meanwhile::nothing()).0
    }

    /// The same, and the keys of other pages, as far as the device makes them.
    fn orders_and_keys(
        &mut self,
        pairs: &[(Seen<'_>, Seen<'_>)],
        to_key: &[Seen<'_>],
        meanwhile: &mut Meanwhile<'_>,
    ) -> (Vec<Answer<Ordering>>, Vec<Option<u64>>) {
        let make = |engine: &Self, queue: usize, job: usize| {
            let Some(((a, a_view), (b, b_view))) = pairs.get(job).copied() else {
                let (page, view) = to_key[job - pairs.len()];
                return Descriptor::crc(engine.address(queue, page, view)?, PAGE, 0).ok();
            };
            let (a, b) = (
                engine.address(queue, a, a_view)?,
                engine.address(queue, b, b_view)?,
            );
            Descriptor::compare(a, b, PAGE).ok()
        };
        let read = |job: usize, record: &CompletionRecord| {
            if job < pairs.len() {
                record.comparison().map(Found::Order)
            } else {
                record.crc().map(Found::Key)
            }
        };
        let mut found = self.run_meanwhile(pairs.len() + to_key.len(), make, read, meanwhile);
        let key = |found| match found {
            Some(Found::Key(key)) => Some(key.into()),
            _ => None,
        };
        let keys = found.drain(pairs.len()..).map(key).collect();
        let lines = to_key.len() as u64 * (u64::from(PAGE) / 64);
        self.account.lines += lines;
        self.account.bytes += lines * 64;
        self.account.comparisons += pairs.len() as u64;
        let mut orders = Vec::with_capacity(pairs.len());
        for (((a, a_view), (b, b_view)), found) in pairs.iter().zip(found) {
            let found = match found {
                Some(Found::Order(found)) => Some(found),
                _ => None,
            };
            let lines = match found {
                Some(Comparison::DiffersAt(offset)) => u64::from(offset) / 64 + 1,
                _ => u64::from(PAGE) / 64,
            };
            self.account.lines += 2 * lines;
            self.account.bytes += 2 * lines * 64;
            let by_device = found.and_then(|found| order_at(a_view, b_view, found));
            orders.push(match by_device {
                Some(order) => Ok(order),
                None if !self.may_read(*a) => Err(Error::Fault(*a)),
                None if !self.may_read(*b) => Err(Error::Fault(*b)),
                None => {
                    self.past.cpu_instead += u64::from(found.is_none());
                    Ok(order_of_words(a_view, b_view, 0..a_view.len()))
                }
            });
        }
        (orders, keys)
    }

    /// Walks as far as the first lines tell the order, [`ABREAST`] walks side by side. `ended` is told of those that have come
    /// to their end without a twin, or to a page that there is not; the others are at nodes whose first lines are equal.
    fn walk_by_first_lines<'p>(
        &mut self,
        walks: &mut [Walk<'p>],
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        mut ended: impl FnMut(&Walk<'p>, Answer<()>),
    ) {
        let mut end = |walk: &mut Walk<'p>, answer: Answer<()>| {
            walk.over = true;
            ended(walk, answer);
        };
        if !self.options.hybrid {
            let late = |walk: &&mut Walk<'_>| walk.steps >= MAX_STEPS;
            walks.iter_mut().filter(late).for_each(|walk| end(walk, Ok(())));
            return;
        }
        let direct = self.live().all(Channel::uses_process_addresses);
        let mut compared = 0;
        for group in walks.chunks_mut(ABREAST) {
            let mut there: [Option<There<'_>>; ABREAST] = [None; ABREAST];
            for (walk, there) in group.iter_mut().zip(&mut there) {
                match self.arrive(walk, pages, tree, direct) {
                    Ok(at) => *there = Some(at),
                    Err(error) => end(walk, Err(error)),
                }
            }
            let mut any = true;
            while std::mem::take(&mut any) {
                for (walk, there) in group.iter_mut().zip(&mut there) {
                    let Some((page, (less, more))) = there.take() else {
                        continue;
                    };
                    let next = match order_of_words(walk.view, page, 0..LINE_WORDS) {
                        Ordering::Equal => continue,
                        Ordering::Less => less,
                        Ordering::Greater => more,
                    };
                    compared += 1;
                    let Some(node) = next.filter(|_| walk.steps + 1 < MAX_STEPS) else {
                        end(walk, Ok(()));
                        continue;
                    };
                    (walk.node, walk.steps) = (node, walk.steps + 1);
                    match self.arrive(walk, pages, tree, direct) {
                        Ok(at) => (*there, any) = (Some(at), true),
                        Err(error) => end(walk, Err(error)),
                    }
                }
            }
        }
        self.account.comparisons += compared;
        self.account.lines += 2 * compared;
        self.account.bytes += 128 * compared;
    }

    /// The page of the node that a walk has come to, which is then on its way from memory, and the node's children.
    fn arrive<'v>(
        &self,
        walk: &Walk<'_>,
        pages: &'v dyn Pages,
        tree: TreeReader<'_>,
        direct: bool,
    ) -> Answer<There<'v>> {
        let id = PageId::of_node(walk.node);
        let page = pages.view(id).filter(|_| direct || self.may_read(id));
        let page = page.ok_or(Error::Fault(id))?;
        fetch(page);
        Ok((page, tree.children(walk.node)))
    }

    /// Adds the nodes that a walk may come to next: its own, and those below it. With first lines looked at, guesses below
    /// would be wasted: most of them those lines would have decided.
    fn guess(&self, walk: &Walk<'_>, tree: TreeReader<'_>, nodes: &mut Vec<Node>) {
        let levels = if self.options.hybrid {
            1
        } else {
            self.options.levels.clamp(1, 4)
        };
        let mut level = nodes.len()..nodes.len() + 1;
        nodes.push(walk.node);
        for _ in 1..levels {
            for at in level.clone() {
                let (less, more) = tree.children(nodes[at]);
                nodes.extend([less, more].into_iter().flatten());
            }
            level = level.end..nodes.len();
        }
    }

    /// Walks all candidates down the tree together. Those without a twin are keyed on the way if they are to be.
    fn walk(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        keyed: bool,
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        let mut answers: Vec<Answer<Searched>> = Vec::with_capacity(candidates.len());
        // Candidates that have come to an end without a twin, by their places.
        let mut to_key: Vec<(usize, Seen<'_>)> = Vec::new();
        let mut walks = Vec::with_capacity(candidates.len());
        let root = tree.root();
        for (at, page) in candidates.iter().copied().enumerate() {
            let view = pages.view(page).filter(|_| self.may_read(page));
            answers.push(if view.is_some() {
                Ok(Searched::default())
            } else {
                Err(Error::Fault(page))
            });
            if let (Some(view), None) = (view, root) {
                to_key.push((at, (page, view)));
            }
            if let (Some(view), Some(node)) = (view, root) {
                walks.push(Walk {
                    at,
                    page,
                    view,
                    node,
                    steps: 0,
                    over: false,
                });
            }
        }
        while !walks.is_empty() {
            self.walk_by_first_lines(&mut walks, pages, tree, |walk, end| match end {
                Ok(()) => to_key.push((walk.at, (walk.page, walk.view))),
                Err(error) => answers[walk.at] = Err(error),
            });
            walks.retain(|walk| !walk.over);
            // Those of each walk, one after the other; and where they end.
            let (mut nodes, mut ends) = (Vec::with_capacity(walks.len()), Vec::with_capacity(walks.len()));
            for walk in &walks {
                self.guess(walk, tree, &mut nodes);
                ends.push(nodes.len());
            }
            let of = |walk: usize| if walk == 0 { 0 } else { ends[walk - 1] }..ends[walk];
            let mut pairs = Vec::with_capacity(nodes.len());
            for (at, walk) in walks.iter().enumerate() {
                let others = nodes[of(at)].iter().filter_map(|node| {
                    let id = PageId::of_node(*node);
                    Some((id, pages.view(id)?))
                });
                pairs.extend(others.map(|other| ((walk.page, walk.view), other)));
            }
            let now: Vec<(usize, Seen<'_>)> = if keyed {
                std::mem::take(&mut to_key)
            } else {
                Vec::new()
            };
            let pages_to_key: Vec<Seen<'_>> = now.iter().map(|(_, seen)| *seen).collect();
            let (orders, keys) = self.orders_and_keys(&pairs, &pages_to_key, meanwhile);
            for ((at, _), key) in now.into_iter().zip(keys) {
                answers[at] = Ok(Searched { twin: None, key });
            }
            let mut orders = pairs.iter().map(|(_, (id, _))| *id).zip(orders);
            let mut of_walk = Vec::new();
            let mut each = 0..walks.len();
            walks.retain_mut(|walk| {
                let nodes = each.next().map_or(&[][..], |at| &nodes[of(at)]);
                let there = |node: &&Node| pages.view(PageId::of_node(**node)).is_some();
                of_walk.clear();
                of_walk.extend(orders.by_ref().take(nodes.iter().filter(there).count()));
                let known = |node: Node| of_walk.iter().find(|(id, _)| *id == PageId::of_node(node));
                loop {
                    let id = PageId::of_node(walk.node);
                    let Some((_, order)) = known(walk.node) else {
                        // Beyond the guesses; or a page that there is not, if it is the first of them.
                        let first = nodes.first() == Some(&walk.node);
                        if first {
                            answers[walk.at] = Err(Error::Fault(id));
                        }
                        return !first;
                    };
                    match order {
                        Err(error) => answers[walk.at] = Err(error.clone()),
                        Ok(Ordering::Equal) => {
                            answers[walk.at] = Ok(Searched {
                                twin: Some(id),
                                key: None,
                            });
                        }
                        Ok(order) => {
                            walk.steps += 1;
                            if let Some(next) =
                                step(tree, walk.node, *order).filter(|_| walk.steps < MAX_STEPS)
                            {
                                // A tree that changes can lead back.
                                let again = next == walk.node;
                                walk.node = next;
                                if again {
                                    return true;
                                }
                                continue;
                            }
                            to_key.push((walk.at, (walk.page, walk.view)));
                        }
                    }
                    return false;
                }
            });
        }
        answers
    }
}

impl DsaEngine {
    fn walk_timed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        keyed: bool,
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        let watch = self.watch();
        self.account.pages += candidates.len() as u64;
        let answers = self.walk(pages, tree, candidates, keyed, meanwhile);
        self.stop(&watch);
        meanwhile.leave_out(&mut self.account);
        answers
    }
}

/// Where a search goes on.
fn step(tree: TreeReader<'_>, node: Node, order: Ordering) -> Option<Node> {
    let (less, more) = tree.children(node);
    match order {
        Ordering::Less => less,
        Ordering::Greater => more,
        Ordering::Equal => None,
    }
}

impl TreeSearch for DsaEngine {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        if let Err(error) = self.alive() {
            return candidates.iter().map(|_| Err(error.clone())).collect();
        }
        let nothing = &mut Meanwhile::nothing();
        let twins = self.walk_timed(pages, tree, candidates, false, nothing);
        twins
            .into_iter()
            .map(|answer| answer.map(|found| found.twin))
            .collect()
    }

    fn search_keyed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        if let Err(error) = self.alive() {
            return candidates.iter().map(|_| Err(error.clone())).collect();
        }
        self.walk_timed(pages, tree, candidates, true, meanwhile)
    }

    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        self.alive()?;
        let watch = self.watch();
        self.account.pages += 1;
        let view = |id: PageId| pages.view(id).ok_or(Error::Fault(id));
        let own = (candidate, view(candidate)?);
        let mut pairs = Vec::with_capacity(set.len());
        for id in set {
            pairs.push((own, (*id, view(*id)?)));
        }
        let orders = self.orders(&pairs);
        self.stop(&watch);
        for (at, order) in orders.into_iter().enumerate() {
            if order?.is_eq() {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}
