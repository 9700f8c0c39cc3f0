//! `stat`: what a store and its VMs say of themselves.

use crate::store_socket::StoreSocket;
use clap::Args;
use serde_json::{Value, json};
use vmm_dedup_host::{Failure, account};

/// Show what a store and its VMs save and cost.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    #[command(flatten)]
    store: StoreSocket,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    let (store, vms) = account::of_store(&args.store.path)?;
    if args.json {
        let vms: Vec<Value> = vms.iter().map(account::vm_json).collect();
        let text = serde_json::to_string_pretty(&json!({ "store": account::store_json(&store), "vms": vms }));
        println!("{}", text.map_err(Failure::from_error)?);
        return Ok(());
    }
    let mib = |bytes: i64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    println!("saved net       {}", mib(account::saved_net(&store)));
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
        "{:<20} {:>8} {:<13} {:>9} {:>8} {:>9} {:>8} {:>8} {:>8}",
        "vm", "pid", "state", "mapped", "zero", "unshared", "breaks", "vmas", "cpu s"
    );
    for vm in &vms {
        let s = &vm.stats;
        println!(
            "{:<20} {:>8} {:<13} {:>9} {:>8} {:>9} {:>8} {:>8} {:>8.2}",
            vm.name,
            vm.pid,
            account::state_name(vm.stats.state),
            s.pages_mapped,
            s.pages_zero,
            s.pages_unshared,
            s.breaks_total(),
            s.vmas,
            s.cpu_ns.total() as f64 / 1e9
        );
    }
    vms.iter().for_each(|vm| print!("{}", account::engine_lines(vm)));
    Ok(())
}
