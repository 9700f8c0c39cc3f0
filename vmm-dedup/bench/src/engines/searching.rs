//! Searching a large tree: throughput, and what the caller's CPU is spared.
//!
//! The tree holds real files' pages as far as there are any, and generated ones. Half of the candidates are copies of
//! pages of the tree, the other half differ from one in their last word. They lie in a staging buffer.

use super::arenas;
use super::device::DeviceProcess;
use crate::content::{self, Kind, mix, pick};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup::compare::{Answer, Arena, Cpu, KeyKind, PageId, Pages, TreeSearch};
use vmm_dedup_host::Failure;
use vmm_dedup_pageforge::Account as Cycles;
use vmm_dedup_pageforge::driver::{InProcess, PageForgeEngine, Port};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, Salt, bytes_of};
use vmm_dedup_protocol::tree::{Node, TreeReader, TreeWriter, words};

/// Times that the candidates are searched for; the first time, tables are loaded.
const ROUNDS: usize = 5;

/// One engine.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Searching {
    pub(super) engine: &'static str,
    pub(super) slots: usize,
    searches: u64,
    /// Searches that found a twin; the same for all engines.
    found: usize,
    /// Whether every answer is that of the CPU.
    pub(super) same_answers: bool,
    pub(super) searches_per_s: f64,
    /// CPU time of the caller for a search, ns.
    pub(super) cpu_ns_per_search: f64,
    /// That, divided by what the CPU engine takes.
    pub(super) cpu_of_cpus: f64,
    /// CPU time of the device's model, ns.
    pub(super) device_cpu_ns_per_search: f64,
    pub(super) comparisons_per_search: f64,
    bytes_per_search: f64,
    /// By the paper's machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cycles: Option<CycleFigures>,
}

/// What the paper's table 5 and figure 11 report.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct CycleFigures {
    per_table: f64,
    deviation: f64,
    comparisons_per_table: f64,
    lines_per_comparison: f64,
    /// Bytes a second from memory while the device works.
    bandwidth: f64,
}

impl std::fmt::Display for CycleFigures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.0} cycles a table (deviation {:.0}), {:.2} comparisons of {:.1} lines, {:.2} GB/s from memory",
            self.per_table,
            self.deviation,
            self.comparisons_per_table,
            self.lines_per_comparison,
            self.bandwidth / 1e9
        )
    }
}

impl CycleFigures {
    pub(super) fn of(cycles: &Cycles) -> Self {
        let comparisons = cycles.comparisons.max(1) as f64;
        Self {
            per_table: cycles.mean_cycles(),
            deviation: cycles.deviation_cycles(),
            comparisons_per_table: cycles.comparisons as f64 / cycles.tables.max(1) as f64,
            lines_per_comparison: cycles.lines() as f64 / 2.0 / comparisons,
            bandwidth: cycles.bandwidth(),
        }
    }
}

type Answers = Vec<Answer<Option<PageId>>>;

/// Pages in a tree, and pages to be searched for behind them.
struct Bench {
    arena: Arena,
    tree: Vec<AtomicU64>,
    candidates: Vec<PageId>,
}

pub(super) fn measure(
    slots: usize,
    candidates: usize,
    device: &DeviceProcess,
) -> Result<Vec<Searching>, Failure> {
    let bench = Bench::new(slots, candidates)?;
    let mut cpu = Cpu::new(KeyKind::Lines(Salt(1)));
    let (reference, expected) = bench.search(&mut cpu, None)?;
    let base = (reference.cpu_ns_per_search, expected.as_slice());
    let mut all = vec![reference];
    let mut local = PageForgeEngine::new(InProcess::new(1));
    let (figures, _) = bench.search(&mut local, Some(base))?;
    all.push(Searching {
        cycles: Some(CycleFigures::of(&local.port().account())),
        ..figures
    });
    let mut remote = device.engine(&bench.arena)?;
    let (figures, _) = bench.search(&mut remote, Some(base))?;
    all.push(Searching {
        cycles: Some(CycleFigures::of(&remote.port().account())),
        ..figures
    });
    Ok(all)
}

impl Bench {
    fn new(slots: usize, candidates: usize) -> Result<Self, Failure> {
        let arena = arenas::arena(slots + candidates)?;
        let tree: Vec<AtomicU64> = (0..words(slots)).map(|_| AtomicU64::new(0)).collect();
        let mib = u32::try_from(slots * 2 / 256 + 64).unwrap_or(u32::MAX);
        let area = content::fill(Kind::Files, false, mib, &[])?;
        let mut node: Node = 0;
        for page in 0..area.pages() {
            if node as usize == slots {
                break;
            }
            let content = area.read(page);
            arena.write(node as usize, &content);
            node += u32::from(insert(&arena, &tree, node, &content)?);
        }
        if (node as usize) < slots {
            return Err(Failure::new(format!(
                "only {node} of {slots} distinct pages: choose fewer --slots"
            )));
        }
        let bench = Self {
            candidates: (slots as u64..).map(PageId).take(candidates).collect(),
            arena,
            tree,
        };
        for at in 0..candidates {
            let mut content = bench.read(PageId(pick(at, slots) as u64))?;
            if at % 2 == 1 {
                content[PAGE_WORDS - 1] ^= mix(at) | 1;
            }
            bench.arena.write(slots + at, &content);
        }
        Ok(bench)
    }

    fn read(&self, page: PageId) -> Result<PageWords, Failure> {
        let view = self
            .arena
            .view(page)
            .ok_or_else(|| Failure::new("a page is missing"))?;
        Ok(std::array::from_fn(|word| view[word].load(Ordering::Relaxed)))
    }

    /// Searches for all candidates; `base` is what the CPU takes and answers.
    fn search(
        &self,
        engine: &mut dyn TreeSearch,
        base: Option<(f64, &[Answer<Option<PageId>>])>,
    ) -> Result<(Searching, Answers), Failure> {
        let tree = TreeReader::new(&self.tree);
        let mut answers = Vec::new();
        for _ in 0..ROUNDS {
            answers = engine.search(&self.arena, tree, &self.candidates);
        }
        let account = engine.account();
        let count = (self.candidates.len() * ROUNDS) as u64;
        let searches = count as f64;
        let cpu = account.cpu_ns as f64 / searches;
        let figures = Searching {
            engine: engine.name(),
            slots: self.tree.len() - 1,
            searches: count,
            found: answers
                .iter()
                .filter(|answer| matches!(answer, Ok(Some(_))))
                .count(),
            same_answers: base.is_none_or(|(_, expected)| expected == answers),
            searches_per_s: searches * 1e9 / account.wall_ns as f64,
            cpu_ns_per_search: cpu,
            cpu_of_cpus: base.map_or(1.0, |(base, _)| cpu / base),
            device_cpu_ns_per_search: account.device_cpu_ns as f64 / searches,
            comparisons_per_search: account.comparisons as f64 / searches,
            bytes_per_search: account.bytes as f64 / searches,
            cycles: None,
        };
        Ok((figures, answers))
    }
}

/// Enters a page into the tree unless it has one like it.
fn insert(arena: &Arena, tree: &[AtomicU64], node: Node, page: &PageWords) -> Result<bool, Failure> {
    let mut missing = false;
    let found = TreeWriter::new(tree).insert(node, |other| match arena.view(PageId::of_node(other)) {
        Some(other) => {
            let other: PageWords = std::array::from_fn(|word| other[word].load(Ordering::Relaxed));
            bytes_of(page).cmp(bytes_of(&other))
        }
        None => {
            missing = true;
            std::cmp::Ordering::Equal
        }
    });
    if missing {
        return Err(Failure::new("a page is missing"));
    }
    Ok(found.is_none())
}
