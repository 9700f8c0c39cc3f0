//! What `bench dsa` prints.

use super::device::Device;
use super::ksm::By;
use super::{impact, ksm, operations, service};
use serde::Serialize;

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) device: Device,
    pub(super) kernel: String,
    /// This machine's clock, MHz: cycles are CPU time by it.
    pub(super) mhz: f64,
    pub(super) operations: Vec<operations::Figures>,
    pub(super) turns: Vec<operations::Turn>,
    pub(super) ksm: Vec<ksm::Figures>,
    pub(super) service: Vec<service::Figures>,
    pub(super) impact: Vec<impact::Figures>,
    /// Of the service's figures.
    pub(super) ratios: Ratios,
    pub(super) paper: Paper,
}

/// Merges per CPU cycle of the service, one way's by another's.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Ratios {
    para_of_dsa: f64,
    para_of_dsa_async: f64,
    para_of_cpu: f64,
    dsa_of_cpu: f64,
    dsa_async_of_cpu: f64,
}

impl Ratios {
    pub(super) fn of(service: &[service::Figures]) -> Self {
        let of_cpu = |by: By| {
            let found = service.iter().find(|figures| figures.by == by);
            found.map_or(f64::NAN, |figures| figures.of_cpu_ksm)
        };
        let (dsa, single, para) = (of_cpu(By::DsaKsm), of_cpu(By::DsaKsmAsync), of_cpu(By::ParaKsm));
        Self {
            para_of_dsa: para / dsa,
            para_of_dsa_async: para / single,
            para_of_cpu: para,
            dsa_of_cpu: dsa,
            dsa_async_of_cpu: single,
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
    pub(super) fn print(&self) {
        match &self.device {
            Device::Real { node } => println!(
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
            } => println!(
                "MODELLED: {latency_ns} ns and {} GB/s as published, {portal_write_ns} ns of CPU for a submission; Linux {}",
                *bytes_per_s as f64 / 1e9,
                self.kernel
            ),
        }
        println!("\noperation  by            ns/page  cpu ns/page");
        for figures in &self.operations {
            println!(
                "{:<10} {:<12} {:>8.0} {:>12.0}",
                format!("{:?}", figures.operation).to_lowercase(),
                format!("{:?}", figures.by).to_lowercase(),
                figures.ns_per_page,
                figures.cpu_ns_per_page
            );
        }
        for turn in &self.turns {
            let size = |size: Option<usize>| size.map_or("none".to_owned(), |size| size.to_string());
            println!(
                "{:?}: sooner than the CPU from batches of {} on, with less CPU time from {} on",
                turn.operation,
                size(turn.time),
                size(turn.cpu)
            );
        }
        println!("\nKSM's algorithm");
        println!("content    by                  merges   cpu ms       ms  merges/Mcycle  of cpu-ksm's");
        for figures in &self.ksm {
            println!(
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
        println!("\nthe service, all of its CPU time");
        println!("by                  merges  search ms   cpu ms  merges/Mcycle  of cpu-ksm's");
        for figures in &self.service {
            println!(
                "{:<18} {:>7} {:>10.1} {:>8.1} {:>14.1} {:>13.2}",
                figures.by.name(),
                figures.merges,
                figures.search_ms,
                figures.cpu_ms,
                figures.merges_per_megacycle,
                figures.of_cpu_ksm
            );
        }
        let Ratios {
            para_of_dsa,
            para_of_cpu,
            ..
        } = self.ratios;
        println!(
            "para-ksm {para_of_dsa:.2} times dsa-ksm's merges per cycle, {para_of_cpu:.2} times cpu-ksm's; \
             the paper: {:?} times ksm's",
            PAPER.para_of_cpu
        );
        println!("\na neighbour on the same core, at the same rate of pages");
        println!("by                 pages/s  of the core  slowdown  the paper's");
        for figures in &self.impact {
            let paper = match figures.by {
                By::CpuKsm => PAPER.slowdown_cpu,
                By::DsaKsm | By::DsaKsmAsync => PAPER.slowdown_dsa,
                By::ParaKsm | By::ParaKsmGuessing => PAPER.slowdown_para,
            };
            println!(
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
