//! The stores of a plan.

use super::vm::VmPlan;
use crate::file::{self, DEFAULT_DOMAIN, FleetFile, Metrics, StoreSettings};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use vmm_dedup_host::store::{DEFAULT_MAX_MIB, DEFAULT_METRICS, MAX_MIB};

/// A trust domain's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePlan {
    /// The domain's name.
    pub domain: String,
    /// Where it listens.
    pub socket: PathBuf,
    /// Where it serves its metrics; `None`: nowhere.
    pub metrics: Option<SocketAddr>,
    /// Most memory for shared pages, MiB.
    pub max_mib: u64,
    /// For VMs with a `search`.
    pub ordered: bool,
}

/// The stores of all domains that VMs with dedup are in.
pub(super) fn stores(
    file: &FleetFile,
    vms: &[VmPlan],
    folder: &Path,
    run_folder: &Path,
) -> Result<Vec<StorePlan>, String> {
    let mut stores: Vec<StorePlan> = Vec::new();
    let used: BTreeSet<&str> = vms
        .iter()
        .filter(|vm| vm.dedup.is_some())
        .map(|vm| vm.domain.as_str())
        .collect();
    if file.domain.contains_key(DEFAULT_DOMAIN) {
        return Err(format!("[domain.{DEFAULT_DOMAIN}] is what [store] is for"));
    }
    if let Some(vm) = vms
        .iter()
        .find(|vm| vm.domain != DEFAULT_DOMAIN && !file.domain.contains_key(&vm.domain))
    {
        return Err(format!("VM {:?}: there is no [domain.{}]", vm.name, vm.domain));
    }
    for domain in used {
        let settings = file.domain.get(domain).unwrap_or(&file.store);
        let store = store(domain, settings, folder, run_folder)?;
        let same = |other: &&StorePlan| {
            other.socket == store.socket || (other.metrics.is_some() && other.metrics == store.metrics)
        };
        if let Some(other) = stores.iter().find(same) {
            return Err(format!(
                "domains {:?} and {domain:?} have the same socket or metrics address: each needs its own",
                other.domain
            ));
        }
        stores.push(store);
    }
    Ok(stores)
}

fn store(
    domain: &str,
    settings: &StoreSettings,
    folder: &Path,
    run_folder: &Path,
) -> Result<StorePlan, String> {
    file::check_name("a domain's name", domain)?;
    let is_default = domain == DEFAULT_DOMAIN;
    let default_socket = match is_default {
        true => "store.sock".to_owned(),
        false => format!("store-{domain}.sock"),
    };
    let default_metrics = Metrics(is_default.then_some(DEFAULT_METRICS));
    let max_mib = settings.max_mib.unwrap_or(DEFAULT_MAX_MIB);
    if !MAX_MIB.contains(&max_mib) {
        return Err(format!(
            "max_mib of domain {domain:?} is {max_mib}: give {:?}",
            MAX_MIB
        ));
    }
    Ok(StorePlan {
        domain: domain.to_owned(),
        socket: match &settings.socket {
            Some(path) => folder.join(path),
            None => run_folder.join(default_socket),
        },
        metrics: settings.metrics.unwrap_or(default_metrics).0,
        max_mib,
        ordered: settings.ordered.unwrap_or(false),
    })
}
