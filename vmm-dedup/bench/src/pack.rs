//! `bench pack`: what packing saves on images beyond exact sharing, and what it costs.

use crate::plots::{Plot, Plots};
use crate::report::print_json;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use vmm_dedup_estimate::pack::{Bases, Packing, Plan, Settings, pack};
use vmm_dedup_estimate::{Inputs, Memory, Reading, Sample, Total, estimate};
use vmm_dedup_host::units::hundredths;
use vmm_dedup_host::{Failure, say};

/// Pack the pages of images that have no twin, by each codec alone and by all together, rebuild and compare them.
///
/// Bases are taken from the same image first, then from all of them. One thread packs, so that times are those of a quiet CPU if
/// the machine is quiet. What is saved is net of all bookkeeping; what exact sharing frees stands beside it.
#[derive(Args, Debug)]
pub(crate) struct PackArgs {
    /// Memory dumps, snapshot directories or raw images; several with commas or by repeating.
    #[arg(long, value_name = "FILE", value_delimiter = ',', num_args = 1.., required = true)]
    images: Vec<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    /// What exact sharing frees, in pages.
    exact: Total,
    /// With bases of the same image.
    own: Packing,
    /// With bases of all images.
    domain: Packing,
}

/// Runs the bench.
pub(crate) fn run(args: &PackArgs, plots: &Plots) -> Result<(), Failure> {
    let inputs = Inputs {
        files: args.images.clone(),
        ..Inputs::default()
    };
    let memories = inputs.open().map_err(Failure::from_error)?;
    let reading = Reading {
        threads: 1,
        progress: &|_, _| (),
    };
    let exact = estimate(&memories, Sample::ALL, &reading).map_err(Failure::from_error)?;
    let packed = |bases| try_bases(&memories, bases, &reading);
    let report = Report {
        exact: exact.total,
        own: packed(Bases::Own)?,
        domain: packed(Bases::Domain)?,
    };
    match args.json {
        true => print_json(&report)?,
        false => report.print(),
    }
    plots.write(|| report.plots())
}

impl Report {
    fn plots(&self) -> Vec<Plot> {
        let bars = |name, title, unit, figure: fn(&Plan) -> f64| {
            let figures = [&self.own, &self.domain].into_iter().flat_map(|packing| {
                let bases = format!("bases {}", packing.bases);
                packing
                    .plans
                    .iter()
                    .map(move |plan| (plan.name.to_string(), bases.clone(), figure(plan)))
            });
            Plot::bars(name, title, unit, figures)
        };
        vec![
            bars("pack-saved", "Saved by packing beyond sharing", "MiB", |plan| {
                plan.saved_bytes as f64 / f64::from(1 << 20)
            }),
            bars("pack-rebuild", "99 of 100 rebuilds take at most", "us", |plan| {
                plan.rebuild_p99_us
            }),
        ]
    }

    fn print(&self) {
        say!(
            "exact sharing frees {} of {} pages; packed, beyond that:",
            self.exact.saved.pages,
            self.exact.pages
        );
        for packing in [&self.own, &self.domain] {
            say!("bases {}, {} pages without a twin", packing.bases, packing.pages);
            packing.plans.iter().for_each(print);
        }
    }
}

fn try_bases(memories: &[Memory], bases: Bases, reading: &Reading<'_>) -> Result<Packing, Failure> {
    let settings = Settings {
        bases,
        ..Settings::default()
    };
    let packing = pack(memories, &settings, reading).map_err(Failure::from_error)?;
    // Images do not change: what was refused came back as another page.
    match packing.plans.iter().find(|plan| plan.refused > 0) {
        None => Ok(packing),
        Some(plan) => Err(Failure::new(format!(
            "{} pages packed by {} came back as others",
            plan.refused, plan.name
        ))),
    }
}

fn print(plan: &Plan) {
    say!(
        "{:<18} {:>8} MiB saved, {:>7} pages, {:>6} bases, pack {:>5.1} us, rebuild p50 {:>5.1} us, p99 {:>5.1} us",
        plan.name,
        hundredths(plan.saved_bytes as f64 / f64::from(1 << 20)),
        plan.pages,
        plan.bases,
        plan.pack_us,
        plan.rebuild_p50_us,
        plan.rebuild_p99_us
    );
}
