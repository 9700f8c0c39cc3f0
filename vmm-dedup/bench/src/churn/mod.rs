//! `bench churn`: whether sharing lasts while content is replaced, under KSM and under our engine, in turn, in one run.
//!
//! Several guests, each a process of its own, hold the same content in a half of their memory. In every round all of them
//! replace a part of it by other content that is, again, the same in all. Then sharing settles, and is counted: against the
//! books of what the guests hold ([`pattern`]), not against what either side says there is to share.
//!
//! - [`guest`]: the process of a guest, told line by line ([`orders`]) by the fleet ([`fleet`]);
//! - [`pattern`], [`cache`], [`files`]: what guests hold and write;
//! - [`side`]: the rounds; [`theirs`] and [`ours`]: who merges meanwhile;
//! - [`measured`], [`report`]: the figures.
//!
//! Guests write at full speed, while KSM scans at full pace or each service passes every 10 ms. At most as many guests write
//! at a time as there are cores, less one: a writer is to wait for dedup and not for another writer. After the writes KSM
//! scans, and our services pass, without pauses until nothing changes; nothing of our engine needs time rather than passes
//! with the policy that is measured. The store has time to get smaller then, while services pass as often as they do by
//! default.

mod cache;
mod files;
mod fleet;
mod guest;
mod measured;
mod orders;
mod ours;
mod pattern;
mod report;
mod side;
mod theirs;

use crate::content::{page_sizes, pages_name};
use crate::host;
use crate::kernel::Comparison;
use crate::plots::Plots;
use crate::report::print_json;
use crate::service::Breaker;
use clap::Args;
use files::Files;
use fleet::Setup;
use ours::Dedup;
use pattern::{Kind, TURNOVER};
use report::{About, Report};
use side::measure;
use std::time::Duration;
use theirs::Theirs;
use vmm_dedup_host::{Failure, children, note, termination};

/// Compare with KSM while content is replaced: whether sharing lasts, CPU, the writers' time, the store's size.
///
/// Each guest is a process. Half of its memory is the same in all guests, the other half is its own. In every round all guests
/// replace a quarter of the common half, by content that is new and again the same in all. After it sharing settles, and
/// is measured. At the end all guests but one go, and the store's size is measured once more. Every byte is checked.
///
/// extents: 256 KiB at a time, chosen at random. pages: 4 KiB at a time, chosen at random. files: a page cache, which reads
/// real files of this machine; each guest reads them in a slightly different order, uses some of them again, and recycles
/// what it used longest ago.
#[derive(Args, Debug)]
pub(crate) struct ChurnArgs {
    /// Guests.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    guests: u32,
    /// Memory of each guest, MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=16_384))]
    mib: u32,
    /// Rounds.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Repetitions of each measurement; medians are reported.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: u32,
    /// Only these kinds of replacement.
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Only with (true) or without (false) transparent huge pages.
    #[arg(long)]
    thp: Option<bool>,
    /// Who copies a page that we share when a guest writes it; as a service has it by default unless given.
    #[arg(long, value_enum)]
    breaks: Option<Breaker>,
    /// Seconds to wait in each round until the store holds no more than 1.15 times the slots in use and 8 MiB.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(0..=3600))]
    patience: u32,
    /// Run although KSM is in use on this host: all of its pages are unmerged, again and again.
    #[arg(long)]
    force: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A guest, which is told on standard input what to do (internal).
#[derive(Args, Debug)]
pub(crate) struct GuestArgs {}

/// Runs the comparison.
pub(crate) fn run(args: &ChurnArgs, plots: &Plots) -> Result<(), Failure> {
    // Twice: each guest touches as much before, and a store may hold all of it beside the guests.
    host::need_memory((u64::from(args.mib) << 21) * u64::from(args.guests))?;
    let comparison = Comparison::begin(args.force)?;
    let large_folios = comparison.has_large_folios();
    let cleanup = move || {
        drop(comparison);
        children::remove_folder();
    };
    let report = termination::on_termination(cleanup, || compare(args, large_folios))?;
    match args.json {
        true => print_json(&report)?,
        false => report.print(),
    }
    plots.write(|| report.plots())
}

fn compare(args: &ChurnArgs, large_folios: bool) -> Result<Report, Failure> {
    let kinds = if args.kinds.is_empty() {
        &Kind::ALL[..]
    } else {
        &args.kinds
    };
    let breaks = args.breaks.unwrap_or_else(Breaker::usual);
    let patience = Duration::from_secs(args.patience.into());
    let mut report = Report::new(About {
        mib: args.mib,
        guests: args.guests,
        rounds: args.rounds,
        repetitions: args.repetitions,
        breaks,
        patience_s: args.patience,
        store_large_folios: large_folios,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
    });
    for kind in kinds {
        let files = files_for(*kind, args)?;
        for thp in page_sizes(args.thp) {
            let setup = Setup {
                kind: *kind,
                thp: *thp,
                mib: args.mib,
                guests: args.guests as usize,
                rounds: args.rounds,
                files: &files,
            };
            let (mut theirs, mut ours) = (Vec::new(), Vec::new());
            for repetition in 1..=args.repetitions {
                let what = format!(
                    "{kind} {} run {repetition} of {}",
                    pages_name(*thp),
                    args.repetitions
                );
                note!("{what}: KSM");
                theirs.push(measure(&setup, &mut Theirs::new()?)?);
                note!("{what}: ours");
                ours.push(measure(&setup, &mut Dedup::new(breaks, patience)?)?);
            }
            report.add(*kind, *thp, theirs, ours);
        }
    }
    Ok(report)
}

/// Files enough for a cache of half of a guest's memory, twice at least, and for all rounds if there are as many.
fn files_for(kind: Kind, args: &ChurnArgs) -> Result<Files, Failure> {
    if kind != Kind::Files {
        return Ok(Files::none());
    }
    let cache = (args.mib as usize) << 7;
    let rounds = args.rounds as usize;
    Files::find(cache * 2, (cache + cache / TURNOVER * rounds).max(cache * 2))
}

/// The process of a guest.
pub(crate) fn work(_: &GuestArgs) -> Result<(), Failure> {
    guest::work()
}
