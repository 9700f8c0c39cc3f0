//! `stat`: what a store and its VMs say of themselves.

use crate::Failure;
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use vmm_dedup_protocol::message::{
    Hello, Kind, Message, Role, Stats, StatsRequest, StoreStats, aligned_buffer, encode,
};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::{STATES, ServiceStats};
use zerocopy::IntoBytes;

/// Show what a store and its VMs save and cost.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    /// The store's socket.
    #[arg(long, default_value = crate::store::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One VM's account.
#[derive(Clone, Debug)]
pub(crate) struct Vm {
    pub(crate) name: String,
    pub(crate) pid: u64,
    pub(crate) stats: ServiceStats,
}

/// Asks a store for its account and those of all VMs.
pub(crate) fn fetch(path: &Path) -> Result<(StoreStats, Vec<Vm>), Failure> {
    let fail = |e: std::io::Error| {
        let path = path.display();
        Failure::new(format!(
            "cannot reach a store at {path} ({e}): start one with `vmm-dedup store --socket {path}`"
        ))
    };
    let stream = socket::connect(path).map_err(fail)?;
    let patience = Some(std::time::Duration::from_secs(5));
    rustix::net::sockopt::set_socket_timeout(&stream, rustix::net::sockopt::Timeout::Recv, patience)
        .map_err(|e| fail(e.into()))?;
    let hello = Hello::new(Role::Observer, "stat", 0);
    socket::send(&stream, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).map_err(fail)?;
    let mut buffer = aligned_buffer();
    let mut ask = |request: &[u8]| -> Result<Option<Stats>, Failure> {
        if !request.is_empty() {
            socket::send(&stream, request, &[]).map_err(fail)?;
        }
        let gone = || Failure::new("the store closed the connection");
        let received = socket::receive(&stream, &mut buffer)
            .map_err(fail)?
            .ok_or_else(gone)?;
        match received.parse(&buffer).map_err(Failure::from_error)? {
            Message::Stats(stats) => Ok(Some(*stats)),
            Message::Welcome(_) => Ok(None),
            Message::Error(text) => Err(Failure::new(format!("the store refused: {text}"))),
            _ => Err(Failure::new("the store sent an unexpected message")),
        }
    };
    ask(&[])?;
    let mut vms = Vec::new();
    loop {
        let index = u32::try_from(vms.len()).unwrap_or(u32::MAX);
        let request = StatsRequest { index, reserved: 0 };
        let answer = ask(&encode(Kind::StatsRequest, &[request.as_bytes()]))?;
        let stats = answer.ok_or_else(|| Failure::new("the store sent an unexpected message"))?;
        if stats.found == 0 {
            return Ok((stats.store, vms));
        }
        vms.push(Vm {
            name: stats.name.text(),
            pid: stats.pid,
            stats: stats.vm,
        });
    }
}

/// Net bytes saved on the host, after all metadata and mappings.
pub(crate) fn saved_net(store: &StoreStats) -> i64 {
    store.saved_net_bytes.cast_signed()
}

/// Runs the command.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    let (store, vms) = fetch(&args.socket)?;
    if args.json {
        let vms: Vec<Value> = vms.iter().map(vm_json).collect();
        let text = serde_json::to_string_pretty(&json!({ "store": store_json(&store), "vms": vms }));
        println!("{}", text.map_err(Failure::from_error)?);
        return Ok(());
    }
    let mib = |bytes: i64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    println!("saved net       {}", mib(saved_net(&store)));
    println!(
        "pages shared    {} (slots), sharing {}",
        store.pages_shared, store.pages_sharing
    );
    println!("metadata        {}", mib(store.metadata_bytes.cast_signed()));
    println!("store CPU       {:.2} s", store.cpu_ns as f64 / 1e9);
    if vms.is_empty() {
        println!("no VM is connected");
        return Ok(());
    }
    println!(
        "{:<20} {:>8} {:>9} {:>8} {:>9} {:>8} {:>8} {:>8}",
        "vm", "pid", "mapped", "zero", "unshared", "breaks", "vmas", "cpu s"
    );
    for vm in &vms {
        let s = &vm.stats;
        println!(
            "{:<20} {:>8} {:>9} {:>8} {:>9} {:>8} {:>8} {:>8.2}",
            vm.name,
            vm.pid,
            s.pages_mapped,
            s.pages_zero,
            s.pages_unshared,
            s.breaks_kernel_total + s.breaks_managed_total,
            s.vmas,
            s.cpu_ns.total() as f64 / 1e9
        );
    }
    Ok(())
}

fn store_json(s: &StoreStats) -> Value {
    json!({
        "saved_net_bytes": saved_net(s),
        "pages_shared": s.pages_shared,
        "pages_sharing": s.pages_sharing,
        "slots_limbo": s.slots_limbo,
        "slots_max": s.slots_max,
        "resident_bytes": s.resident_bytes,
        "sightings": s.sightings,
        "marks": s.marks,
        "metadata_bytes": s.metadata_bytes,
        "cpu_seconds": s.cpu_ns as f64 / 1e9,
        "refused_full_total": s.refused_full_total,
        "malformed_total": s.malformed_total,
        "published_total": s.published_total,
        "epoch": s.epoch,
    })
}

fn vm_json(vm: &Vm) -> Value {
    let s = &vm.stats;
    json!({
        "name": vm.name,
        "pid": vm.pid,
        "state": STATES.get(usize::try_from(s.state).unwrap_or(9)).unwrap_or(&"unknown"),
        "pages": s.pages,
        "pages_mapped": s.pages_mapped,
        "pages_zero": s.pages_zero,
        "pages_unshared": s.pages_unshared,
        "pages_volatile": s.pages_volatile,
        "pages_broken": s.pages_broken,
        "huge_ranges": s.huge_ranges,
        "merges_total": s.merges_total,
        "zero_merges_total": s.zero_merges_total,
        "breaks_kernel_total": s.breaks_kernel_total,
        "breaks_managed_total": s.breaks_managed_total,
        "mismatches_total": s.mismatches_total,
        "refused_pinned_total": s.refused_pinned_total,
        "refused_vmas_total": s.refused_vmas_total,
        "refused_other_total": s.refused_other_total,
        "published_total": s.published_total,
        "passes_total": s.passes_total,
        "full_scans_total": s.full_scans_total,
        "bytes_read_total": s.bytes_read.total(),
        "vmas": s.vmas,
        "vmas_max": s.vmas_max,
        "metadata_bytes": s.metadata_bytes,
        "vma_bytes": s.vma_bytes,
        "reserve_pages": s.reserve_pages,
        "reserve_target": s.reserve_target,
        "reserve_waits_total": s.reserve_waits_total,
        "waiting_writers": s.waiting_writers,
        "cpu_seconds": {
            "track": s.cpu_ns.track as f64 / 1e9,
            "key": s.cpu_ns.key as f64 / 1e9,
            "hash": s.cpu_ns.hash as f64 / 1e9,
            "store": s.cpu_ns.store as f64 / 1e9,
            "merge": s.cpu_ns.merge as f64 / 1e9,
            "break": s.cpu_ns.break_ as f64 / 1e9,
        },
        "stop_us": { "count": s.stop.count(), "p50": s.stop.quantile_us(0.5), "p99": s.stop.quantile_us(0.99), "max": s.stop.max_ns / 1000 },
        "break_us": { "count": s.break_latency.count(), "p50": s.break_latency.quantile_us(0.5), "p99": s.break_latency.quantile_us(0.99), "max": s.break_latency.max_ns / 1000 },
    })
}
