//! Our side: the engine on the same memory, with a store in a process of its own.
use super::measured::Measured;
use crate::content::Area;
use crate::host::{self, seconds, vmas};
use crate::service::Served;
use std::path::Path;
use std::time::Instant;
use vmm_dedup::{Config, Options, Policy, ServiceStats};
use vmm_dedup_host::{Failure, account};

/// Passes without a change after which we have converged. Huge pages are looked at with growing pauses; nothing is
/// left to do after the first few.
const SETTLED_PASSES: u32 = 8;
/// Passes after which a measurement that still changes is given up.
const MOST_PASSES: u32 = 10_000;
/// Every chunk is visited at least once in that many passes, whatever its period.
const IDLE_PASSES: u32 = 128;
/// The longest period of a fragmented chunk: over that many passes each has been visited.
const DIRTY_PASSES: usize = 16;

/// Lets the engine work on the area as fast as it can.
pub(super) fn measure(area: &mut Area, store: &Path, store_pid: u32) -> Result<Measured, Failure> {
    let config = Config {
        name: "bench".into(),
        pass_period_ms: 3_600_000,
        cpu_percent: 100,
        // As KSM does; watching use needs time as well as passes.
        huge_policy: Policy::Ksm,
        // A stop target matters to guests; it is the default here as well.
        ..Config::default()
    };
    let before = host::available()?;
    let own = std::process::id();
    let cpu = || Ok(host::cpu_ns(own, "dedup-")? + host::cpu_ns(store_pid, "")?);
    let vmas_before = vmas()?;
    let (start, store_start) = (Instant::now(), host::cpu_ns(store_pid, "")?);
    let service = Served::area(area, store, config, Options::default())?;
    let mut last = (ServiceStats::default(), 0, start.elapsed());
    let (mut quiet, mut passes) = (0, 0);
    while quiet < SETTLED_PASSES {
        passes += 1;
        if passes > MOST_PASSES {
            return Err(Failure::new(format!(
                "the engine did not converge within {MOST_PASSES} passes"
            )));
        }
        let stats = service.pass()?;
        let changed = (stats.merges_total, stats.zero_merges_total, stats.published_total)
            != (
                last.0.merges_total,
                last.0.zero_merges_total,
                last.0.published_total,
            );
        if changed || stats.merges_total == 0 {
            last = (stats, cpu()? - store_start, start.elapsed());
        }
        quiet = if changed { 0 } else { quiet + 1 };
    }
    let vmas = vmas()?.saturating_sub(vmas_before);
    let stats = service.stats();
    let store_stats = account::of_store(store)?.0;
    let freed = host::available()?.cast_signed() - before.cast_signed();
    let idle_start = cpu()?;
    for _ in 0..IDLE_PASSES {
        service.pass()?;
    }
    let idle = seconds(cpu()? - idle_start) / f64::from(IDLE_PASSES);
    let mut dirty = 0;
    for round in 1..=DIRTY_PASSES {
        area.dirty(round);
        let start = cpu()?;
        service.pass()?;
        dirty += cpu()? - start;
    }
    let end = service.pass()?;
    let wrong = area.wrong();
    if wrong > 0 {
        return Err(Failure::new(format!(
            "{wrong} pages do not hold what was written to them"
        )));
    }
    let saved = (stats.pages_mapped + stats.pages_zero).saturating_sub(store_stats.pages_shared);
    let metadata = stats.metadata_bytes + store_stats.metadata_bytes;
    let net = (saved * 4096).cast_signed() - metadata.cast_signed() - stats.vma_bytes.cast_signed();
    Ok(Measured {
        cpu_s: seconds(last.1),
        wall_s: last.2.as_secs_f64(),
        saved_pages: saved,
        idle_pass_cpu_s: idle,
        dirty_pass_cpu_s: seconds(dirty) / DIRTY_PASSES as f64,
        freed_bytes: freed,
        claimed_bytes: net,
        metadata_bytes_per_page: metadata as f64 / area.pages() as f64,
        vmas: vmas as u64,
        vmas_per_merged_page: vmas as f64 / (stats.pages_mapped.max(1)) as f64,
        stop_p99_us: end.stop.quantile_us(0.99),
        stop_max_us: end.stop.max_ns / 1000,
        cpu_stages_s: [
            ("track", stats.cpu_ns.track),
            ("key", stats.cpu_ns.key),
            ("search", stats.cpu_ns.search),
            ("hash", stats.cpu_ns.hash),
            ("store client", stats.cpu_ns.store),
            ("merge", stats.cpu_ns.merge),
            ("store process", store_stats.cpu_ns),
        ]
        .map(|(name, ns)| (name.to_owned(), seconds(ns)))
        .into(),
    })
}
