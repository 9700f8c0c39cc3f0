//! `bench engines`: the engines that compare pages, side by side, on the same content: the CPU, PageForge (in this process
//! and over vfio-user), PageCmp and PageCmp-Hybrid.
//!
//! Three measurements: KSM's algorithm run by each engine ([`merging`]), how often each key takes a changed page for
//! unchanged ([`keys`]), and searching a large tree ([`searching`]). What models of hardware report in cycles,
//! nanojoules and bytes is by the papers' constants; times and CPU are those of this machine.

mod device;
mod keys;
mod merging;
mod report;
mod searching;

use super::content::{Area, Kind};
use super::host;
use crate::Failure;
use clap::Args;
use device::DeviceProcess;
use report::Report;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use vmm_dedup::backend::Arena;
use vmm_dedup_protocol::PAGE_SIZE;

/// Compare the engines that compare pages: CPU, PageForge, PageCmp, on the same content.
#[derive(Args, Debug)]
pub(crate) struct EnginesArgs {
    /// Memory of each content kind, MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=4096))]
    mib: u32,
    /// Only these content kinds.
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// A raw image of guest memory, as another kind of content; as many as wanted.
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Pages in the tree that is searched.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1000..=4_000_000))]
    slots: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Pages that the searches look for.
const CANDIDATES: usize = 32_768;

/// Runs the comparison.
pub(crate) fn engines(args: &EnginesArgs) -> Result<(), Failure> {
    let largest = (u64::from(args.mib) << 20).max(u64::from(args.slots) * PAGE_SIZE as u64);
    host::need_memory(largest * 2 + (CANDIDATES * PAGE_SIZE) as u64)?;
    let cleanup = || drop(std::fs::remove_dir_all(device::folder()));
    let report = crate::signals::on_termination(cleanup, || compare(args))?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(e.to_string()))?;
        println!("{text}");
    } else {
        report.print();
    }
    Ok(())
}

fn compare(args: &EnginesArgs) -> Result<Report, Failure> {
    let device = DeviceProcess::start()?;
    let all = [Kind::Scattered, Kind::Runs, Kind::Files];
    let kinds: &[Kind] = if args.kinds.is_empty() { &all } else { &args.kinds };
    let mut report = Report::new(args.mib, args.slots);
    for kind in kinds {
        eprintln!("{kind}: merging and keys");
        let arena = arena_of(&Area::fill(*kind, false, args.mib, &[])?)?;
        report
            .merging
            .extend(merging::measure(&kind.to_string(), &arena, &device)?);
        report.keys.extend(keys::measure(&kind.to_string(), &arena)?);
    }
    for image in &args.image {
        eprintln!("{}: merging and keys", image.display());
        let name = image.display().to_string();
        let arena = arena_of_image(image, args.mib)?;
        report.merging.extend(merging::measure(&name, &arena, &device)?);
        report.keys.extend(keys::measure(&name, &arena)?);
    }
    eprintln!("searching a tree of {} pages", args.slots);
    report.searching = searching::measure(args.slots as usize, CANDIDATES, &device)?;
    Ok(report)
}

fn arena(pages: usize) -> Result<Arena, Failure> {
    Arena::new(pages).map_err(|e| Failure::new(format!("cannot make {pages} pages of shared memory: {e}")))
}

fn arena_of(area: &Area) -> Result<Arena, Failure> {
    let arena = arena(area.pages())?;
    (0..area.pages()).for_each(|page| arena.write(page, &area.read(page)));
    Ok(arena)
}

/// The first `mib` MiB of an image, as far as it has as much.
fn arena_of_image(path: &PathBuf, mib: u32) -> Result<Arena, Failure> {
    let failed = |e: std::io::Error| Failure::new(format!("cannot read {}: {e}", path.display()));
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(u64::from(mib) << 20)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    let pages = bytes.len() / PAGE_SIZE;
    if pages == 0 {
        return Err(Failure::new(format!("{} has no whole page", path.display())));
    }
    let arena = arena(pages)?;
    for (page, content) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
        let word = |word: usize| std::array::from_fn(|byte| content[word * 8 + byte]);
        arena.write(page, &std::array::from_fn(|at| u64::from_ne_bytes(word(at))));
    }
    Ok(arena)
}
