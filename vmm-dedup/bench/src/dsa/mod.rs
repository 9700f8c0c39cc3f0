//! `bench dsa`: comparing and keying by Intel DSA, one page an offload and many (Para-ksm, ATC'25), beside the CPU.
//!
//! Four measurements: what single operations take ([`operations`]), KSM's algorithm ([`ksm`]), the service itself
//! ([`service`]), and what a neighbour feels ([`impact`]). Where there is no device the model is measured, with latencies that the report names.

mod device;
mod impact;
mod ksm;
mod operations;
mod report;
mod service;

use crate::content::{self, Kind};
use crate::engines::arenas::arena_of;
use crate::host;
use crate::report::print_json;
use clap::Args;
use device::{Device, DeviceArgs};
use report::{PAPER, Ratios, Report};
use vmm_dedup_host::{Failure, children, termination};

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
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the comparison.
pub(crate) fn run(args: &DsaArgs) -> Result<(), Failure> {
    host::need_memory((u64::from(args.mib) << 20) * 5)?;
    let cleanup = || drop(std::fs::remove_dir_all(children::folder(service::STORE)));
    let report = termination::on_termination(cleanup, || compare(args))?;
    if args.json {
        return print_json(&report);
    }
    report.print();
    Ok(())
}

fn compare(args: &DsaArgs) -> Result<Report, Failure> {
    let (device, mhz) = (Device::of(&args.device)?, host::mhz()?);
    eprintln!("single operations");
    let (operations, turns) = operations::measure(&device, args.pages as usize)?;
    let all = [Kind::Scattered, Kind::Runs, Kind::Files];
    let kinds: &[Kind] = if args.kinds.is_empty() { &all } else { &args.kinds };
    let (mut ksm, mut impact) = (Vec::new(), Vec::new());
    for (at, kind) in kinds.iter().enumerate() {
        eprintln!("{kind}: KSM's algorithm");
        let arena = arena_of(&content::fill(*kind, false, args.mib, &[])?)?;
        ksm.extend(ksm::measure(&kind.to_string(), &arena, &device, mhz)?);
        if at == 0 {
            eprintln!("{kind}: a neighbour");
            impact = impact::measure(&arena, &device)?;
        }
    }
    eprintln!("the service");
    let service = service::measure(&device, args.mib as usize * 256, mhz)?;
    Ok(Report {
        device,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        mhz,
        operations,
        turns,
        ksm,
        ratios: Ratios::of(&service),
        service,
        impact,
        paper: PAPER,
    })
}
