//! `bench engines`: the engines that compare pages, side by side, on the same content: the CPU, PageForge (in this process
//! and over vfio-user), PageCmp and PageCmp-Hybrid.
//!
//! Four measurements: KSM's algorithm run by each engine ([`merging`]), how often each key takes a changed page for
//! unchanged ([`keys`]), searching a large tree ([`searching`]), and the service that searches a large store
//! ([`service`]). What models of hardware report in cycles,
//! nanojoules and bytes is by the papers' constants; times and CPU are those of this machine.

pub(crate) mod arenas;
mod device;
mod keys;
mod merging;
mod report;
mod searching;
pub(crate) mod service;

use crate::content::{self, Area, Kind, total_mib};
use crate::host;
use crate::plots::Plots;
use crate::report::print_json;
use arenas::{arena_of, arena_of_pages, arena_without_zeros};
use clap::Args;
use device::DeviceProcess;
use report::Report;
use std::path::PathBuf;
use vmm_dedup_host::{Failure, children, note, termination};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::PAGE_WORDS;

/// Compare the engines that compare pages: CPU, PageForge, PageCmp, on the same content.
#[derive(Args, Debug)]
pub(crate) struct EnginesArgs {
    /// Memory of each content kind, MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=4096))]
    mib: u32,
    /// Only these content kinds.
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// An image of a guest's memory (raw, an ELF core or a snapshot); all of them are another kind of content, without
    /// their zero pages.
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// An image of the same guest as that --image, taken later: shows how often keys miss what the guest wrote.
    #[arg(long, value_name = "FILE", requires = "image")]
    later: Vec<PathBuf>,
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
pub(crate) fn run(args: &EnginesArgs, plots: &Plots) -> Result<(), Failure> {
    let largest = (u64::from(args.mib) << 20).max(u64::from(args.slots) * PAGE_SIZE as u64);
    let images = u64::from(total_mib(&args.image)?) << 20;
    host::need_memory((largest * 3).max(images * 3) + (CANDIDATES * PAGE_SIZE) as u64)?;
    if !args.later.is_empty() && args.later.len() != args.image.len() {
        let (later, image) = (args.later.len(), args.image.len());
        return Err(Failure::usage(format!(
            "{later} --later for {image} --image: give one for each, in the same order, or none"
        )));
    }
    let report = termination::on_termination(children::remove_folder, || compare(args))?;
    match args.json {
        true => print_json(&report)?,
        false => report.print(),
    }
    plots.write(|| report.plots())
}

fn compare(args: &EnginesArgs) -> Result<Report, Failure> {
    let device = DeviceProcess::start()?;
    let all = [Kind::Scattered, Kind::Runs, Kind::Files];
    let kinds: &[Kind] = if args.kinds.is_empty() { &all } else { &args.kinds };
    let mut report = Report::new(args.mib, args.slots);
    for kind in kinds {
        note!("{kind}: merging and keys");
        let arena = arena_of(&content::fill(*kind, false, args.mib, &[])?)?;
        report
            .merging
            .extend(merging::measure(&kind.to_string(), &arena, &device)?);
        report.keys.extend(keys::measure(&kind.to_string(), &arena)?);
    }
    if !args.image.is_empty() {
        note!("images: merging and keys");
        let name = Kind::Images.to_string();
        let before = area_of_images(&args.image)?;
        let arena = arena_without_zeros(&before)?;
        report.merging.extend(merging::measure(&name, &arena, &device)?);
        report.keys.extend(keys::measure(&name, &arena)?);
        if !args.later.is_empty() {
            report
                .keys
                .extend(between(&name, &before, &area_of_images(&args.later)?)?);
        }
    }
    note!("searching a tree of {} pages", args.slots);
    report.searching = searching::measure(args.slots as usize, CANDIDATES, &device)?;
    note!("the service on a store of {} pages", args.slots);
    report.service = service::measure(args.slots as usize, CANDIDATES, &device)?;
    Ok(report)
}

fn area_of_images(paths: &[PathBuf]) -> Result<Area, Failure> {
    content::fill(Kind::Images, false, total_mib(paths)?, paths)
}

/// The pages that had content at first, at both times.
fn between(name: &str, before: &Area, after: &Area) -> Result<Vec<keys::Keys>, Failure> {
    if before.pages() != after.pages() {
        return Err(Failure::new(format!(
            "the images have {} pages, the later ones {}: they are not of the same guests",
            before.pages(),
            after.pages()
        )));
    }
    let used = |page: &usize| before.read(*page) != [0; PAGE_WORDS];
    let pages: Vec<usize> = (0..before.pages()).filter(used).collect();
    let (before, after) = (arena_of_pages(before, &pages)?, arena_of_pages(after, &pages)?);
    keys::between(name, &before, &after)
}
