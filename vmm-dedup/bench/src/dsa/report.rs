//! What `bench dsa` prints.

use super::device::Device;
use super::ksm::By;
use super::order::Order;
use super::{impact, ksm, operations, service};
use crate::plots::Plot;
use serde::Serialize;
use vmm_dedup_host::say;

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) device: Device,
    pub(super) kernel: String,
    /// This machine's clock, MHz: cycles are CPU time by it.
    pub(super) mhz: f64,
    /// Rounds, of which figures are medians.
    pub(super) rounds: u32,
    /// Where pages of KSM's algorithm lie.
    pub(super) order: Order,
    pub(super) operations: Vec<operations::Figures>,
    pub(super) turns: Vec<operations::Turn>,
    pub(super) ksm: Vec<ksm::Figures>,
    pub(super) service: Vec<service::Figures>,
    pub(super) impact: Vec<impact::Figures>,
    /// Of KSM's algorithm on each content, and of the service.
    pub(super) ratios: Vec<Ratios>,
    pub(super) paper: Paper,
}

/// Merges per CPU cycle, one way's by another's: medians of the rounds' ratios.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ratios {
    /// A content, or the service.
    of: String,
    para_of_dsa: Ratio,
    para_of_dsa_two: Ratio,
    para_of_dsa_async: Ratio,
    para_of_cpu: Ratio,
    dsa_of_cpu: Ratio,
    dsa_two_of_cpu: Ratio,
    dsa_async_of_cpu: Ratio,
}

/// A ratio in several rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Ratio {
    median: f64,
    least: f64,
    most: f64,
}

impl Ratio {
    fn of(mut rounds: Vec<f64>) -> Self {
        rounds.sort_by(f64::total_cmp);
        let at = |place: usize| rounds.get(place).copied().unwrap_or(f64::NAN);
        Self {
            median: at(rounds.len().saturating_sub(1) / 2),
            least: at(0),
            most: at(rounds.len().saturating_sub(1)),
        }
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { median, least, most } = self;
        write!(f, "{median:.2} ({least:.2} to {most:.2})")
    }
}

impl Ratios {
    /// Of rounds, each with a figure for each way: whose it is, and what multiple of cpu-ksm's.
    pub(super) fn of<T>(of: String, rounds: &[Vec<T>], of_cpu: impl Fn(&T) -> (By, f64)) -> Self {
        let by = |round: &[T], by: By| {
            let found = round.iter().map(&of_cpu).find(|(way, _)| *way == by);
            found.map_or(f64::NAN, |(_, figure)| figure)
        };
        let ratio = |a: By, b: By| {
            Ratio::of(
                { rounds.iter() }
                    .map(|round| by(round, a) / by(round, b))
                    .collect(),
            )
        };
        Self {
            of,
            para_of_dsa: ratio(By::ParaKsm, By::DsaKsm),
            para_of_dsa_two: ratio(By::ParaKsm, By::DsaKsmTwo),
            para_of_dsa_async: ratio(By::ParaKsm, By::DsaKsmAsync),
            para_of_cpu: ratio(By::ParaKsm, By::CpuKsm),
            dsa_of_cpu: ratio(By::DsaKsm, By::CpuKsm),
            dsa_two_of_cpu: ratio(By::DsaKsmTwo, By::CpuKsm),
            dsa_async_of_cpu: ratio(By::DsaKsmAsync, By::CpuKsm),
        }
    }
}

/// What the paper says of real devices (Para-ksm, ATC'25, abstract): least and most.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Paper {
    /// Merges per CPU cycle, of KSM's.
    para_of_cpu: [f64; 2],
    /// Slowdowns of co-runners.
    slowdown_cpu: [f64; 2],
    slowdown_dsa: [f64; 2],
    slowdown_para: [f64; 2],
}

pub(super) const PAPER: Paper = Paper {
    para_of_cpu: [1.31, 1.50],
    slowdown_cpu: [1.6, 5.8],
    slowdown_dsa: [1.0, 1.6],
    slowdown_para: [1.3, 2.7],
};

impl Report {
    pub(super) fn plots(&self) -> Vec<Plot> {
        let modelled = match &self.device {
            Device::Real { .. } => "",
            Device::Modelled { .. } => ", modelled",
        };
        let operations = self.operations.iter().map(|o| {
            let name = |debug: String| debug.to_lowercase();
            (
                name(format!("{:?}", o.operation)),
                name(format!("{:?}", o.by)),
                o.cpu_ns_per_page,
            )
        });
        let ksm = self.ksm.iter();
        let ksm = ksm.map(|k| (k.content.clone(), k.by.name().to_owned(), k.merges_per_megacycle));
        let service = self.service.iter();
        let service = service.map(|s| {
            (
                "service".to_owned(),
                s.by.name().to_owned(),
                s.merges_per_megacycle,
            )
        });
        let impact = self.impact.iter();
        let impact = impact.map(|i| (i.by.name().to_owned(), "slowdown".to_owned(), i.slowdown));
        let title = |text: &str| format!("{text}{modelled}");
        vec![
            Plot::bars("dsa-operations", &title("CPU time for a page"), "ns", operations),
            Plot::bars(
                "dsa-merges",
                &title("Merges"),
                "in a million cycles",
                ksm.chain(service),
            ),
            Plot::bars("dsa-impact", &title("Slowdown of a neighbour"), "times", impact),
        ]
    }

    pub(super) fn print(&self) {
        match &self.device {
            Device::Real { node } => say!(
                "device: {}, Linux {}",
                node.as_ref()
                    .map_or("all user queues".to_owned(), |node| node.display().to_string()),
                self.kernel
            ),
            Device::Modelled {
                latency_ns,
                bytes_per_s,
                portal_write_ns,
                ..
            } => say!(
                "MODELLED: {latency_ns} ns and {} GB/s as published, {portal_write_ns} ns of CPU for a submission; Linux {}",
                *bytes_per_s as f64 / 1e9,
                self.kernel
            ),
        }
        say!("\noperation  by            ns/page  cpu ns/page");
        for figures in &self.operations {
            say!(
                "{:<10} {:<12} {:>8.0} {:>12.0}",
                format!("{:?}", figures.operation).to_lowercase(),
                format!("{:?}", figures.by).to_lowercase(),
                figures.ns_per_page,
                figures.cpu_ns_per_page
            );
        }
        for turn in &self.turns {
            let size = |size: Option<usize>| size.map_or("none".to_owned(), |size| size.to_string());
            say!(
                "{:?}: sooner than the CPU from batches of {} on, with less CPU time from {} on",
                turn.operation,
                size(turn.time),
                size(turn.cpu)
            );
        }
        say!("\nKSM's algorithm; neighbouring pages lie {}", self.order.text());
        say!("content    by                  merges   cpu ms       ms  merges/Mcycle  of cpu-ksm's");
        for figures in &self.ksm {
            say!(
                "{:<10} {:<18} {:>7} {:>8.1} {:>8.1} {:>14.1} {:>13.2}",
                figures.content,
                figures.by.name(),
                figures.merges,
                figures.cpu_ms,
                figures.ms,
                figures.merges_per_megacycle,
                figures.of_cpu_ksm
            );
        }
        say!("\nthe service, all of its CPU time");
        say!("by                  merges  search ms   cpu ms  merges/Mcycle  of cpu-ksm's");
        for figures in &self.service {
            say!(
                "{:<18} {:>7} {:>10.1} {:>8.1} {:>14.1} {:>13.2}",
                figures.by.name(),
                figures.merges,
                figures.search_ms,
                figures.cpu_ms,
                figures.merges_per_megacycle,
                figures.of_cpu_ksm
            );
        }
        say!(
            "\nmerges per cycle; para-ksm of ksm in the paper: {:?}",
            PAPER.para_of_cpu
        );
        for ratios in &self.ratios {
            say!(
                "{:<10} para of cpu {}, of dsa {}, of dsa-two {}, of dsa-async {}",
                ratios.of,
                ratios.para_of_cpu,
                ratios.para_of_dsa,
                ratios.para_of_dsa_two,
                ratios.para_of_dsa_async
            );
            say!(
                "{:<10} of cpu: dsa {}, dsa-two {}, dsa-async {}",
                "",
                ratios.dsa_of_cpu,
                ratios.dsa_two_of_cpu,
                ratios.dsa_async_of_cpu
            );
        }
        say!("\na neighbour on the same core, at the same rate of pages");
        say!("by                 pages/s  of the core  slowdown  the paper's");
        for figures in &self.impact {
            let paper = match figures.by {
                By::CpuKsm => PAPER.slowdown_cpu,
                By::DsaKsm | By::DsaKsmTwo | By::DsaKsmAsync => PAPER.slowdown_dsa,
                By::ParaKsm | By::ParaKsmGuessing => PAPER.slowdown_para,
            };
            say!(
                "{:<17} {:>8.0} {:>12.3} {:>9.2}  {:.1} to {:.1}",
                figures.by.name(),
                figures.pages_per_s,
                figures.core,
                figures.slowdown,
                paper[0],
                paper[1]
            );
        }
    }
}
