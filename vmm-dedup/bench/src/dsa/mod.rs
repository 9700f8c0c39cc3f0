//! `bench dsa`: comparing and keying by Intel DSA, one page an offload and many (Para-ksm, ATC'25), beside the CPU.
//!
//! Four measurements: what single operations take ([`operations`]), KSM's algorithm ([`ksm`]), the service itself
//! ([`service`]), and what a neighbour feels ([`impact`]). Where there is no device the model is measured, with latencies that the report names.

mod device;
mod impact;
mod ksm;
mod operations;
mod order;
mod report;
mod service;

use crate::content::{self, Kind};
use crate::engines::arenas::arena_of;
use crate::host;
use crate::plots::Plots;
use crate::report::{median, print_json};
use clap::{Args, ValueEnum};
use device::{Device, DeviceArgs};
use order::Order;
use report::{PAPER, Ratios, Report};
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmm_dedup_host::{Failure, children, note, termination};

/// Compare the CPU with Intel DSA, one page an offload and in batches.
#[derive(Args, Debug)]
pub(crate) struct DsaArgs {
    /// Memory of each content kind, MiB.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(4..=4096))]
    mib: u32,
    /// Only these content kinds.
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Pages on which single operations are measured.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1024..=1_000_000))]
    pages: u32,
    /// Rounds of KSM's algorithm and of the service, in which the ways take turns; medians are reported.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Where neighbouring pages of KSM's algorithm lie.
    #[arg(long, value_enum, default_value_t = Order::Memory)]
    order: Order,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Single operations.
    Operations,
    /// KSM's algorithm.
    Ksm,
    /// A neighbour.
    Impact,
    /// The dedup service.
    Service,
}

/// Runs the comparison.
pub(crate) fn run(args: &DsaArgs, plots: &Plots) -> Result<(), Failure> {
    // The service's memory is not given back between rounds.
    host::need_memory((u64::from(args.mib) << 20) * (5 + 5 * u64::from(args.rounds)))?;
    let report = termination::on_termination(children::remove_folder, || compare(args))?;
    match args.json {
        true => print_json(&report)?,
        false => report.print(),
    }
    plots.write(|| report.plots())
}

fn compare(args: &DsaArgs) -> Result<Report, Failure> {
    let (device, mhz) = (Device::of(&args.device)?, host::mhz()?);
    if args.order == Order::Anywhere && !device.uses_process_addresses() {
        // It is given the pages' file, and would read others.
        return Err(Failure::new(
            "pages can lie anywhere for a device node and for the model only",
        ));
    }
    let wanted = |part: Part| args.only.is_empty() || args.only.contains(&part);
    let (mut operations, mut turns) = (Vec::new(), Vec::new());
    if wanted(Part::Operations) {
        note!("single operations");
        (operations, turns) = operations::measure(&device, args.pages as usize)?;
    }
    let all = [Kind::Scattered, Kind::Runs, Kind::Files];
    let kinds: &[Kind] = if args.kinds.is_empty() { &all } else { &args.kinds };
    let (mut ksm, mut impact, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for (at, kind) in kinds.iter().enumerate() {
        let neighbour = at == 0 && wanted(Part::Impact);
        if !wanted(Part::Ksm) && !neighbour {
            continue;
        }
        let arena = arena_of(&content::fill(*kind, false, args.mib, &[])?)?;
        if wanted(Part::Ksm) {
            note!("{kind}: KSM's algorithm");
            let rounds =
                (0..args.rounds).map(|_| ksm::measure(&kind.to_string(), (&arena, args.order), &device, mhz));
            let rounds = rounds.collect::<Result<Vec<_>, Failure>>()?;
            let of_cpu = |figures: &ksm::Figures| (figures.by, figures.of_cpu_ksm);
            ratios.push(Ratios::of(kind.to_string(), &rounds, of_cpu));
            ksm.extend(medians(&rounds));
        }
        if neighbour {
            note!("{kind}: a neighbour");
            impact = impact::measure(&arena, &device)?;
        }
    }
    let mut service = Vec::new();
    if wanted(Part::Service) {
        note!("the service");
        let rounds = service::measure(&device, args.mib as usize * 256, mhz, args.rounds as usize)?;
        let of_cpu = |figures: &service::Figures| (figures.by, figures.of_cpu_ksm);
        ratios.push(Ratios::of("service".to_owned(), &rounds, of_cpu));
        service = medians(&rounds);
    }
    Ok(Report {
        device,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        mhz,
        rounds: args.rounds,
        order: args.order,
        operations,
        turns,
        ksm,
        service,
        impact,
        ratios,
        paper: PAPER,
    })
}

/// Of several rounds, which have the same ways in the same order, each way's medians.
fn medians<T: Serialize + DeserializeOwned + Clone>(rounds: &[Vec<T>]) -> Vec<T> {
    let ways = rounds.first().map_or(0, Vec::len);
    let way = |at: usize| median(&rounds.iter().map(|round| &round[at]).collect::<Vec<_>>());
    (0..ways).map(way).collect()
}
