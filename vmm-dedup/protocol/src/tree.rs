//! A search tree of pages in the order of their content, in 64-bit words that may be shared memory.
//!
//! One writer, many readers, no locks. Nodes are numbered (by slot, where slots are the nodes), and a node is one word:
//! both children and its height, so a reader sees a node as it was or as it is. The tree is an AVL tree: a search
//! compares with at most 1.44 log2(n) pages, 24 of 100,000. (KSM uses red-black trees, which may be higher by a third.)
//!
//! A reader that races with the writer may be led past a page that is there: it finds it the next time. It may sleep
//! between two steps, so nothing keeps it from going in a circle but [`MAX_STEPS`]. What it finds is a suggestion, as
//! everything in shared memory is: the pages are compared.

use crate::sync::{AtomicU64, Ordering as Memory, own};
use std::cmp::Ordering;
use std::hash::{BuildHasher, RandomState};

/// Most nodes that a tree can have.
pub const MAX_NODES: u32 = 1 << 26;

/// Comparisons after which a search gives up: the height of a tree of [`MAX_NODES`] is below 40.
pub const MAX_STEPS: usize = 64;

const LINK_BITS: u32 = 27;
const LINK_MASK: u64 = (1 << LINK_BITS) - 1;
const HEIGHT_SHIFT: u32 = 2 * LINK_BITS;

/// A node's number.
pub type Node = u32;

/// Words that a tree of `nodes` nodes needs.
pub const fn words(nodes: usize) -> usize {
    nodes + 1
}

/// A node's children and the height of the tree below it, itself included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Links {
    less: Option<Node>,
    more: Option<Node>,
    height: u32,
}

impl Links {
    fn encode(self) -> u64 {
        encode_link(self.less) | encode_link(self.more) << LINK_BITS | u64::from(self.height) << HEIGHT_SHIFT
    }

    fn decode(word: u64) -> Self {
        Self {
            less: decode_link(word),
            more: decode_link(word >> LINK_BITS),
            #[allow(clippy::cast_possible_truncation)] // 10 bits
            height: (word >> HEIGHT_SHIFT) as u32,
        }
    }
}

fn encode_link(node: Option<Node>) -> u64 {
    node.map_or(0, |node| u64::from(node) + 1)
}

#[allow(clippy::cast_possible_truncation)] // 27 bits
fn decode_link(word: u64) -> Option<Node> {
    ((word & LINK_MASK) as u32).checked_sub(1)
}

/// A view of a tree. The first word names the root and counts the changes, the others are the nodes.
#[derive(Clone, Copy, Debug)]
pub struct TreeReader<'a> {
    words: &'a [AtomicU64],
}

impl<'a> TreeReader<'a> {
    /// The tree in these words, all zero if it is empty.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        Self { words }
    }

    /// The root, or none if the tree is empty.
    pub fn root(&self) -> Option<Node> {
        decode_link(self.words.first()?.load(Memory::Acquire))
    }

    /// Tells this tree from any other that exists at the same time in this process.
    pub fn name(&self) -> usize {
        self.words.as_ptr() as usize
    }

    /// A number of 37 bits that changes whenever the tree does; 0 if nothing was ever entered. Else it begins anywhere, so
    /// that two trees do not have the same.
    pub fn version(&self) -> u64 {
        self.words
            .first()
            .map_or(0, |word| word.load(Memory::Acquire) >> LINK_BITS)
    }

    /// Levels of the tree below a node, itself included; 0 if it is not in the tree.
    pub fn levels(&self, node: Node) -> u32 {
        self.links(node).height
    }

    /// The children of a node: of smaller content, and of greater. A node that is not in the tree has none.
    pub fn children(&self, node: Node) -> (Option<Node>, Option<Node>) {
        let links = self.links(node);
        (links.less, links.more)
    }

    /// Searches by a comparison of the page in question with that of a node.
    pub fn search(&self, mut compare: impl FnMut(Node) -> Ordering) -> Option<Node> {
        let mut at = self.root();
        for _ in 0..MAX_STEPS {
            let node = at?;
            let (less, more) = self.children(node);
            at = match compare(node) {
                Ordering::Equal => return Some(node),
                Ordering::Less => less,
                Ordering::Greater => more,
            };
        }
        None
    }

    fn links(&self, node: Node) -> Links {
        let word = self.words.get(node as usize + 1);
        word.map_or(Links::default(), |word| Links::decode(word.load(Memory::Acquire)))
    }
}

/// The writer's view.
#[derive(Debug)]
pub struct TreeWriter<'a> {
    reader: TreeReader<'a>,
}

impl<'a> TreeWriter<'a> {
    /// The tree in these words, which nobody else may change, and which must be as [`words`] says.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        Self {
            reader: TreeReader::new(words),
        }
    }

    /// The tree to be read.
    pub fn reader(&self) -> TreeReader<'a> {
        self.reader
    }

    /// What the words say, which nobody but this writer changes.
    fn links(&self, node: Node) -> Links {
        let word = self.reader.words.get(node as usize + 1);
        word.map_or(Links::default(), |word| Links::decode(own(word)))
    }

    fn children(&self, node: Node) -> (Option<Node>, Option<Node>) {
        let links = self.links(node);
        (links.less, links.more)
    }

    fn height(&self, node: Option<Node>) -> u32 {
        node.map_or(0, |node| self.links(node).height)
    }

    fn root(&self) -> Option<Node> {
        decode_link(own(self.reader.words.first()?))
    }

    /// Becomes a copy of another tree. This one must be empty.
    pub fn adopt(&mut self, other: TreeReader<'_>) {
        let mut rest: Vec<Node> = other.root().into_iter().collect();
        while let Some(node) = rest.pop() {
            self.store(node, other.links(node));
            let (less, more) = other.children(node);
            rest.extend(less.into_iter().chain(more));
        }
        // A tree that was never changed stays one.
        if other.version() != 0 {
            self.set_root(other.root());
        }
    }

    /// Takes all nodes out.
    pub fn clear(&mut self) {
        let nodes = &self.reader.words[1..];
        nodes.iter().for_each(|word| word.store(0, Memory::Release));
        self.set_root(None);
    }

    /// Adds a node; `compare` compares its page with that of another. If the tree has that page already, be it in this
    /// node or in another, nothing changes and that node is returned.
    pub fn insert(&mut self, node: Node, mut compare: impl FnMut(Node) -> Ordering) -> Option<Node> {
        match self.insert_below(self.root(), node, &mut compare) {
            Ok(root) => {
                self.set_root(Some(root));
                None
            }
            Err(there) => Some(there),
        }
    }

    /// Takes a node out; `compare` compares its page with that of another. Returns whether it was in the tree.
    pub fn remove(&mut self, node: Node, mut compare: impl FnMut(Node) -> Ordering) -> bool {
        match self.remove_below(self.root(), node, &mut compare) {
            Some(root) => {
                self.set_root(root);
                self.store(node, Links::default());
                true
            }
            None => false,
        }
    }

    /// Returns the root of the changed subtree, or the node that has the page.
    fn insert_below(
        &mut self,
        at: Option<Node>,
        node: Node,
        compare: &mut impl FnMut(Node) -> Ordering,
    ) -> Result<Node, Node> {
        let Some(at) = at else {
            self.join(node, None, None);
            return Ok(node);
        };
        let (less, more) = self.children(at);
        match compare(at) {
            Ordering::Equal => Err(at),
            Ordering::Less => {
                let less = self.insert_below(less, node, compare)?;
                Ok(self.balance(at, Some(less), more))
            }
            Ordering::Greater => {
                let more = self.insert_below(more, node, compare)?;
                Ok(self.balance(at, less, Some(more)))
            }
        }
    }

    /// Returns the root of the changed subtree, or nothing if the node is not there.
    fn remove_below(
        &mut self,
        at: Option<Node>,
        node: Node,
        compare: &mut impl FnMut(Node) -> Ordering,
    ) -> Option<Option<Node>> {
        let at = at?;
        let (less, more) = self.children(at);
        if at == node {
            let Some(right) = more else { return Some(less) };
            let (first, rest) = self.take_first(right);
            return Some(Some(self.balance(first, less, rest)));
        }
        match compare(at) {
            Ordering::Equal => None,
            Ordering::Less => {
                let less = self.remove_below(less, node, compare)?;
                Some(Some(self.balance(at, less, more)))
            }
            Ordering::Greater => {
                let more = self.remove_below(more, node, compare)?;
                Some(Some(self.balance(at, less, more)))
            }
        }
    }

    /// The smallest node of a subtree, and what is left of that.
    fn take_first(&mut self, at: Node) -> (Node, Option<Node>) {
        match self.children(at) {
            (None, more) => (at, more),
            (Some(less), more) => {
                let (first, rest) = self.take_first(less);
                (first, Some(self.balance(at, rest, more)))
            }
        }
    }

    /// Makes one subtree of a node and two subtrees whose heights differ by two at most.
    fn balance(&mut self, node: Node, less: Option<Node>, more: Option<Node>) -> Node {
        let (low, high) = (self.height(less), self.height(more));
        match (less, more) {
            (Some(pivot), _) if low > high + 1 => {
                let (outer, inner) = self.children(pivot);
                match inner {
                    Some(inner) if self.height(outer) < self.height(Some(inner)) => {
                        let (a, b) = self.children(inner);
                        self.join(pivot, outer, a);
                        self.join(node, b, more);
                        self.join(inner, Some(pivot), Some(node))
                    }
                    inner => {
                        self.join(node, inner, more);
                        self.join(pivot, outer, Some(node))
                    }
                }
            }
            (_, Some(pivot)) if high > low + 1 => {
                let (inner, outer) = self.children(pivot);
                match inner {
                    Some(inner) if self.height(outer) < self.height(Some(inner)) => {
                        let (a, b) = self.children(inner);
                        self.join(pivot, b, outer);
                        self.join(node, less, a);
                        self.join(inner, Some(node), Some(pivot))
                    }
                    inner => {
                        self.join(node, less, inner);
                        self.join(pivot, Some(node), outer)
                    }
                }
            }
            _ => self.join(node, less, more),
        }
    }

    fn join(&mut self, node: Node, less: Option<Node>, more: Option<Node>) -> Node {
        let height = 1 + self.height(less).max(self.height(more));
        self.store(node, Links { less, more, height });
        node
    }

    fn store(&mut self, node: Node, links: Links) {
        assert!(node < MAX_NODES, "node {node} is beyond the tree's links");
        let word = &self.reader.words[node as usize + 1];
        let new = links.encode();
        // Most nodes on a path stay as they are, and their cache lines with the readers.
        if own(word) != new {
            word.store(new, Memory::Release);
        }
    }

    fn set_root(&mut self, root: Option<Node>) {
        let version = match own(&self.reader.words[0]) >> LINK_BITS {
            // Not the same for every new tree, or one at another's address could be taken for that.
            0 => RandomState::new().hash_one(0) | 1,
            version => version + 1,
        };
        self.reader.words[0].store(version << LINK_BITS | encode_link(root), Memory::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// A tree of numbers: node n holds `content[n]`.
    struct Numbers {
        words: Vec<AtomicU64>,
        content: Vec<u32>,
    }

    impl Numbers {
        fn new(content: Vec<u32>) -> Self {
            let words = (0..words(content.len())).map(|_| AtomicU64::new(0)).collect();
            Self { words, content }
        }

        fn insert(&self, node: Node) -> Option<Node> {
            let compare = |other: Node| self.content[node as usize].cmp(&self.content[other as usize]);
            TreeWriter::new(&self.words).insert(node, compare)
        }

        fn remove(&self, node: Node) -> bool {
            let compare = |other: Node| self.content[node as usize].cmp(&self.content[other as usize]);
            TreeWriter::new(&self.words).remove(node, compare)
        }

        fn search(&self, number: u32) -> Option<Node> {
            TreeReader::new(&self.words).search(|other| number.cmp(&self.content[other as usize]))
        }

        /// Checks heights and balance below a node; returns the nodes in order.
        fn check(&self, at: Option<Node>) -> (u32, Vec<Node>) {
            let Some(at) = at else { return (0, Vec::new()) };
            let links = TreeReader::new(&self.words).links(at);
            let ((low, mut nodes), (high, more)) = (self.check(links.less), self.check(links.more));
            assert!(
                low.abs_diff(high) <= 1,
                "node {at} has subtrees of {low} and {high}"
            );
            assert_eq!(links.height, 1 + low.max(high));
            nodes.push(at);
            nodes.extend(more);
            (links.height, nodes)
        }

        fn in_order(&self) -> Vec<Node> {
            self.check(TreeReader::new(&self.words).root()).1
        }
    }

    #[test]
    fn an_empty_tree_has_nothing() {
        let tree = Numbers::new(vec![1, 2]);
        assert_eq!((tree.search(1), tree.remove(0)), (None, false));
        assert_eq!(TreeReader::new(&[]).root(), None);
    }

    #[test]
    fn a_hundred_thousand_in_order_are_at_most_17_deep() {
        let tree = Numbers::new((0..100_000).collect());
        (0..100_000).for_each(|node| assert_eq!(tree.insert(node), None));
        let tree = TreeReader::new(&tree.words);
        assert_eq!(tree.levels(tree.root().unwrap()), 17);
    }

    #[test]
    fn every_change_has_a_version() {
        let tree = Numbers::new(vec![1, 2, 1]);
        let version = || TreeReader::new(&tree.words).version();
        let mut seen = std::collections::HashSet::from([version()]);
        let changes: [fn(&Numbers) -> bool; 3] = [
            |t| t.insert(0).is_none(),
            |t| t.insert(1).is_none(),
            |t| t.remove(0),
        ];
        for change in changes {
            assert!(change(&tree));
            seen.insert(version());
        }
        assert_eq!(seen.len(), 4);
        assert!(!tree.remove(0));
        assert!(seen.contains(&version()), "a removal of nothing is no change");
    }

    #[test]
    fn a_circle_ends() {
        let words: Vec<AtomicU64> = (0..2).map(|_| AtomicU64::new(1)).collect(); // node 0 is its own child
        let mut steps = 0;
        let found = TreeReader::new(&words).search(|_| {
            steps += 1;
            Ordering::Less
        });
        assert_eq!((found, steps), (None, MAX_STEPS));
    }

    proptest! {
        #[test]
        fn it_does_as_a_map_does(
            content in proptest::collection::vec(0..40u32, 64),
            steps in proptest::collection::vec((any::<bool>(), 0..64u32), 1..300),
        ) {
            let tree = Numbers::new(content.clone());
            let mut map: BTreeMap<u32, Node> = BTreeMap::new();
            for (insert, node) in steps {
                let number = content[node as usize];
                let there = map.get(&number).copied();
                if insert {
                    prop_assert_eq!(tree.insert(node), there);
                    map.entry(number).or_insert(node);
                } else {
                    prop_assert_eq!(tree.remove(node), there == Some(node));
                    map.retain(|_, n| *n != node);
                }
                prop_assert_eq!(tree.in_order(), map.values().copied().collect::<Vec<_>>());
            }
            for number in 0..40 {
                prop_assert_eq!(tree.search(number), map.get(&number).copied());
            }
            let copy = Numbers::new(content);
            TreeWriter::new(&copy.words).adopt(TreeReader::new(&tree.words));
            prop_assert_eq!(copy.in_order(), tree.in_order());
            TreeWriter::new(&tree.words).clear();
            prop_assert_eq!(tree.in_order(), []);
        }
    }
}
