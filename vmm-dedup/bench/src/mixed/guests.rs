//! Two payload guests in this process, with huge pages: each works on pages of its own, and both hold the same cold ones.

use super::measured::Guests;
use super::setup::Setup;
use crate::host;
use crate::service::{Served, vouched};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;
use vmm_dedup_payload::{Access, Console, PayloadConfig, Report, WorkingSet, measure_tsc_khz};
use vmm_dedup_refvmm::{Image, RunningVm, ThpMode, Vm, VmConfig};

/// MiB that a guest works on, and MiB of cold pages that all have.
const HOT_MIB: u64 = 16;
const COLD_MIB: u64 = 64;
const MEMORY_MIB: u64 = HOT_MIB + COLD_MIB + 16;
/// Guests start slowly where KVM shadows page tables in software.
const PATIENCE: Duration = Duration::from_secs(180);

struct Guest {
    vm: RunningVm,
    console: Console,
}

pub(super) fn measure(setup: &Setup<'_>) -> Result<Guests, Failure> {
    let tsc_khz = measure_tsc_khz();
    let (mut guests, mut services) = (Vec::new(), Vec::new());
    for n in 1..=2 {
        let (guest, service) = boot(setup, n, tsc_khz)?;
        guests.push(guest);
        services.extend(service);
    }
    await_work(&guests)?;
    setup.settle(&services);
    let vcpus = || host::cpu_ns(std::process::id(), "vcpu");
    let before = (progress(&guests)?, vcpus()?, setup.cpu(&services)?);
    std::thread::sleep(setup.seconds);
    let after = (progress(&guests)?, vcpus()?, setup.cpu(&services)?);
    let saved_pages = setup.saved_pages(&services)?;
    let huge_pages = services.iter().map(|s| s.stats().huge_ranges).sum();
    let sources: Vec<&str> = services.iter().map(|s| s.stats().use_source_name()).collect();
    let use_source = sources.join(", ");
    let mut histogram = Vec::new();
    for guest in guests {
        histogram.extend(finish(guest)?);
    }
    let vcpu_s = host::seconds((after.1 - before.1).max(1));
    Ok(Guests {
        use_source,
        saved_pages,
        huge_pages,
        pages_per_cpu_s: (after.0 - before.0) as f64 / vcpu_s,
        access_p50_ns: quantile_ns(&histogram, 0.5, tsc_khz),
        access_p99_ns: quantile_ns(&histogram, 0.99, tsc_khz),
        monitor_cpu_s: after.2.0 - before.2.0,
        dedup_cpu_s: after.2.1 - before.2.1,
    })
}

fn boot(setup: &Setup<'_>, n: u64, tsc_khz: u64) -> Result<(Guest, Option<Served>), Failure> {
    let payload = PayloadConfig::default()
        .seed(n)
        .private_mib(HOT_MIB)
        .zero_mib(0)
        .common_mib(COLD_MIB)
        .ws_pages(1 << 20)
        .ws_area(WorkingSet::Private)
        .rate(0)
        .reads(7)
        .report_ms(100)
        .seconds(1_000_000)
        .tsc_khz(tsc_khz);
    let config = VmConfig {
        memory_mib: MEMORY_MIB,
        vcpus: 1,
        kernel: Image::Bytes(vmm_dedup_payload::ELF),
        initrd: None,
        cmdline: payload.command_line(),
        thp: ThpMode::Always,
    };
    let vm = Vm::new(&config).map_err(Failure::from_error)?;
    let service = match (setup.subject, setup.store) {
        (Some(subject), Some(store)) => {
            let memory = Arc::new(vm.memory().clone());
            let config = setup.config(&format!("guest-{n}"), subject);
            Some(Served::guest(memory, store, config, vouched())?)
        }
        _ => None,
    };
    let console = Console::new();
    let vm = vm.start(Box::new(console.clone())).map_err(Failure::from_error)?;
    console.wait_ready(PATIENCE).map_err(Failure::from_error)?;
    Ok((Guest { vm, console }, service))
}

/// Waits until each guest has told of its work.
fn await_work(guests: &[Guest]) -> Result<(), Failure> {
    let start = Instant::now();
    while let Err(silent) = progress(guests) {
        if start.elapsed() > PATIENCE {
            return Err(silent);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Pages verified or written by all guests.
fn progress(guests: &[Guest]) -> Result<u64, Failure> {
    let mut sum = 0;
    for guest in guests {
        let reports = guest.console.reports();
        let done = reports.iter().rev().find_map(|report| match report {
            Report::Tick { writes, reads, .. } => Some(writes + reads),
            _ => None,
        });
        sum += done.ok_or_else(|| Failure::new("a guest does not report"))?;
    }
    Ok(sum)
}

/// Lets a guest verify its memory; how long its reads took, as pairs of log2 of cycles and a count.
fn finish(guest: Guest) -> Result<Vec<(u32, u64)>, Failure> {
    guest.vm.serial_input(b"q");
    if !guest.console.wait_done(PATIENCE).map_err(Failure::from_error)? {
        return Err(Failure::new("a guest found wrong bytes"));
    }
    guest.vm.wait().map_err(Failure::from_error)?;
    let reads = guest
        .console
        .reports()
        .into_iter()
        .find_map(|report| match report {
            Report::Latency {
                kind: Access::Read,
                histogram,
                ..
            } => Some(histogram),
            _ => None,
        });
    Ok(reads.unwrap_or_default())
}

/// Upper bound of a quantile: buckets are powers of two.
fn quantile_ns(histogram: &[(u32, u64)], q: f64, tsc_khz: u64) -> u64 {
    let mut sorted = histogram.to_vec();
    sorted.sort_unstable();
    let total: u64 = sorted.iter().map(|(_, n)| n).sum();
    let mut seen = 0;
    for (bit, n) in sorted {
        seen += n;
        if seen as f64 >= total as f64 * q {
            return (2u64 << bit.min(62)).saturating_mul(1_000_000) / tsc_khz.max(1);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_upper_bounds_of_buckets() {
        let histogram = [(6, 90), (10, 9), (6, 9), (20, 2)];
        assert_eq!(quantile_ns(&histogram, 0.5, 1_000_000), 128);
        assert_eq!(quantile_ns(&histogram, 0.98, 1_000_000), 2048);
        assert_eq!(quantile_ns(&histogram, 1.0, 1_000_000), 2 << 20);
    }
}
