//! KSM's algorithm run by each engine on the same content: the same merges, at what cost.

use super::device::DeviceProcess;
use super::searching::CycleFigures;
use serde::Serialize;
use std::time::Instant;
use vmm_dedup::compare::ksm::{Ksm, Pass};
use vmm_dedup::compare::{Account, Arena, Cpu, Engine, KeyKind, PageId, TreeSearch};
use vmm_dedup_host::Failure;
use vmm_dedup_pagecmp::{Costs, PageCmpEngine};
use vmm_dedup_pageforge::driver::{InProcess, PageForgeEngine, Port};
use vmm_dedup_protocol::key::Salt;

/// Passes: pages are seen, merged, and found merged.
const PASSES: usize = 3;

/// One engine on one content.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Merging {
    pub(super) content: String,
    pub(super) engine: &'static str,
    pages: usize,
    /// Pages that share another's memory.
    pub(super) saved_pages: usize,
    /// Whether every page was merged with the same page as by the first engine.
    pub(super) same_merges: bool,
    /// Pages looked at per second, all passes together.
    pub(super) pages_per_s: f64,
    /// CPU time of the engine's caller for each of them, ns.
    pub(super) cpu_ns_per_page: f64,
    /// CPU time of a device's model, ns; hardware would take none.
    pub(super) device_cpu_ns_per_page: f64,
    /// Bytes that comparisons and keys moved, for each of them.
    pub(super) bytes_per_page: f64,
    pub(super) comparisons_per_search: f64,
    passes: Vec<Pass>,
    account: Account,
    /// PageCmp by its paper's constants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pagecmp: Option<PageCmpCosts>,
    /// PageForge by its paper's machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cycles: Option<CycleFigures>,
    /// The CPU's comparisons by the lines of each page that they read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lines: Option<Lines>,
}

/// What PageCmp's comparisons cost, next to memcmp's, by the paper's constants; keys left out.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PageCmpCosts {
    bytes_per_comparison: f64,
    nanojoules_per_comparison: f64,
    line_times_per_comparison: f64,
    /// Bytes that memcmp moves (one page's lines, as the paper counts), divided by PageCmp's.
    pub(super) bandwidth_cut: f64,
    /// The same with the keys' bytes (1 KiB each) on both sides.
    pub(super) bandwidth_cut_with_keys: f64,
}

/// How far memcmp reads.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Lines {
    /// Part of the comparisons that end in the first line.
    pub(super) first_line: f64,
    /// Part that reads all 64.
    pub(super) all_lines: f64,
    pub(super) mean: f64,
    /// Number of comparisons that read 0, 1, ... 64 lines of each page.
    counts: Vec<u64>,
}

pub(super) fn measure(content: &str, arena: &Arena, device: &DeviceProcess) -> Result<Vec<Merging>, Failure> {
    let mut all = Vec::new();
    let mut merges = Vec::new();
    let mut run = |engine: &mut dyn TreeSearch| -> Result<usize, Failure> {
        let (figures, map) = merge(content, arena, engine)?;
        merges.push(map);
        all.push(Merging {
            same_merges: merges.first() == merges.last(),
            ..figures
        });
        Ok(all.len() - 1)
    };
    let mut ksm = Cpu::new(KeyKind::Jhash2);
    let mut in_memory = PageCmpEngine::new(false);
    let mut hybrid = PageCmpEngine::new(true);
    let mut pageforge = PageForgeEngine::new(InProcess::new(1));
    let baseline = run(&mut ksm)?;
    run(&mut Cpu::new(KeyKind::Lines(Salt(1))))?;
    let pageforge_at = run(&mut pageforge)?;
    run(&mut device.engine(arena)?)?;
    let (in_memory_at, hybrid_at) = (run(&mut in_memory)?, run(&mut hybrid)?);
    all[baseline].lines = Some(lines(&ksm));
    all[pageforge_at].cycles = Some(CycleFigures::of(&pageforge.port().account()));
    all[in_memory_at].pagecmp = Some(costs(&ksm, &in_memory));
    all[hybrid_at].pagecmp = Some(costs(&ksm, &hybrid));
    Ok(all)
}

type Merges = Vec<Option<PageId>>;

fn merge(content: &str, arena: &Arena, engine: &mut dyn TreeSearch) -> Result<(Merging, Merges), Failure> {
    let mut ksm = Ksm::new(arena.pages());
    let start = Instant::now();
    let mut passes = Vec::with_capacity(PASSES);
    for _ in 0..PASSES {
        passes.push(ksm.pass(engine, arena).map_err(Failure::from_error)?);
    }
    let seconds = start.elapsed().as_secs_f64();
    let merges: Merges = (0..arena.pages() as u64)
        .map(|page| ksm.merged_with(PageId(page)))
        .collect();
    let saved = (0..)
        .zip(&merges)
        .filter(|(page, twin)| twin.is_some_and(|twin| twin != PageId(*page)));
    let account = engine.account();
    let candidates = passes.iter().map(|pass| pass.candidates).sum::<u64>() as f64;
    let unstable = passes.iter().map(|pass| pass.key_matches).sum::<u64>() as f64;
    let figures = Merging {
        content: content.to_owned(),
        engine: engine.name(),
        pages: arena.pages(),
        saved_pages: saved.count(),
        same_merges: true,
        pages_per_s: candidates / seconds,
        cpu_ns_per_page: account.cpu_ns as f64 / candidates,
        device_cpu_ns_per_page: account.device_cpu_ns as f64 / candidates,
        bytes_per_page: account.bytes as f64 / candidates,
        comparisons_per_search: account.comparisons as f64 / (candidates + unstable),
        passes,
        account,
        pagecmp: None,
        cycles: None,
        lines: None,
    };
    Ok((figures, merges))
}

fn lines(cpu: &Cpu) -> Lines {
    let counts = cpu.line_counts();
    let comparisons = counts.iter().sum::<u64>().max(1) as f64;
    let read: u64 = (0..)
        .zip(counts)
        .map(|(lines, count): (u64, &u64)| lines * count)
        .sum();
    Lines {
        first_line: counts[1] as f64 / comparisons,
        all_lines: counts[64] as f64 / comparisons,
        mean: read as f64 / comparisons,
        counts: counts.to_vec(),
    }
}

fn costs(memcmp: &Cpu, pagecmp: &PageCmpEngine) -> PageCmpCosts {
    let Costs {
        bytes_moved,
        nanojoules,
        line_times,
    } = pagecmp.chips().costs();
    let comparisons = pagecmp.account().comparisons.max(1) as f64;
    let compared = lines(memcmp).mean * memcmp.account().comparisons as f64 * 64.0;
    let keys = (pagecmp.account().bytes - bytes_moved) as f64;
    PageCmpCosts {
        bytes_per_comparison: bytes_moved as f64 / comparisons,
        nanojoules_per_comparison: nanojoules / comparisons,
        line_times_per_comparison: line_times / comparisons,
        bandwidth_cut: compared / bytes_moved.max(1) as f64,
        bandwidth_cut_with_keys: (compared + keys) / (bytes_moved as f64 + keys).max(1.0),
    }
}
