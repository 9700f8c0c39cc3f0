//! Which part of a tree is in which table of the window.

use crate::scan_table::{EntryIndex, OTHER_PAGES, OtherPage, Pointer, Ppn};
use crate::window::{RING, TABLES, Window};
use std::collections::HashMap;
use vmm_dedup_protocol::tree::{Node, TreeReader};

/// Subtrees of at most so many levels are loaded for each job, into a table of the job's own.
const SMALL: u32 = 3;
/// Tables that are kept; the others are the jobs' own.
const KEPT: usize = TABLES - RING;

/// Nodes of a table, in breadth-first order: the children of entry n are the entries 2n + 1 and 2n + 2. The pointers to
/// entries beyond the last are the ways out.
type Nodes = [Option<Node>; OTHER_PAGES];

/// What the driver knows of the window.
#[derive(Debug)]
pub(super) struct Tables {
    /// The tree that the kept tables are of: where it is, and its version.
    tree: Option<(TreeName, u64)>,
    kept: HashMap<Node, u32>,
    nodes: Vec<Nodes>,
}

/// Tells trees apart, together with their versions.
type TreeName = usize;

impl Default for Tables {
    fn default() -> Self {
        Self {
            tree: None,
            kept: HashMap::new(),
            nodes: vec![[None; OTHER_PAGES]; TABLES],
        }
    }
}

impl Tables {
    /// A round of so many candidates in this tree follows. Forgets what was kept if the tree has changed, or if there
    /// might not be room enough.
    pub(super) fn expect(&mut self, tree: TreeReader<'_>, candidates: usize) {
        let name = Some((tree.name(), tree.version()));
        if self.tree != name || self.kept.len() + candidates > KEPT {
            self.tree = name;
            self.kept.clear();
        }
    }

    /// The table that a node's subtree is in, loaded if it is not there yet. `place` is the job's in its batch.
    pub(super) fn load(&mut self, window: Window<'_>, tree: TreeReader<'_>, node: Node, place: u32) -> u32 {
        if tree.levels(node) <= SMALL {
            let table = self.of_job(place);
            self.fill(window, tree, node, table);
            return table;
        }
        if let Some(table) = self.kept.get(&node) {
            return *table;
        }
        #[allow(clippy::cast_possible_truncation)] // below TABLES
        let table = self.kept.len() as u32;
        self.fill(window, tree, node, table);
        self.kept.insert(node, table);
        table
    }

    /// The table of a job's own.
    #[allow(clippy::cast_possible_truncation)] // below TABLES
    pub(super) fn of_job(&self, place: u32) -> u32 {
        KEPT as u32 + place % RING as u32
    }

    /// The node of an entry.
    pub(super) fn node(&self, table: u32, ptr: Pointer) -> Option<Node> {
        self.nodes[table as usize][ptr.entry()?.number()]
    }

    /// The node that a way out leads to, if the tree goes on there.
    pub(super) fn way_out(&self, tree: TreeReader<'_>, table: u32, ptr: Pointer) -> Option<Node> {
        let way = usize::from(ptr.bits());
        if way < OTHER_PAGES {
            return None; // an entry that is not there: so there is no such child
        }
        let from = *self.nodes[table as usize].get((way - 1) / 2)?;
        let (less, more) = tree.children(from?);
        if way % 2 == 1 { less } else { more }
    }

    fn fill(&mut self, window: Window<'_>, tree: TreeReader<'_>, node: Node, table: u32) {
        let nodes = &mut self.nodes[table as usize];
        *nodes = [None; OTHER_PAGES];
        nodes[0] = Some(node);
        for (index, pointers) in EntryIndex::all().zip((1u8..).step_by(2)) {
            let at = index.number();
            let Some(node) = nodes[at] else {
                // The search comes here from a parent only.
                if nodes[(at - 1) / 2].is_some() {
                    window.set_entry(table, index, None);
                }
                continue;
            };
            let entry = Ppn::try_new(node.into()).map(|ppn| OtherPage {
                ppn,
                less: Pointer::new(pointers),
                more: Pointer::new(pointers + 1),
            });
            window.set_entry(table, index, entry.ok());
            if at * 2 + 2 < OTHER_PAGES {
                (nodes[at * 2 + 1], nodes[at * 2 + 2]) = tree.children(node);
            }
        }
    }
}
