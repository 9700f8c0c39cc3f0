//! The stores of a plan.

use super::mistake::{Mistake, Place};
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
    /// For VMs whose users are hostile to each other.
    pub secure: bool,
    /// The users that VMs run as which merge there, where that is not who starts them: names or numbers.
    pub users: BTreeSet<String>,
}

/// The stores of all domains that VMs with dedup are in.
///
/// `entries`: of each VM, the number of its entry.
pub(super) fn stores<'a>(
    file: &'a FleetFile,
    vms: &[VmPlan],
    entries: &[usize],
    folder: &Path,
    run_folder: &Path,
) -> Result<Vec<StorePlan>, Mistake<'a>> {
    let mut stores: Vec<StorePlan> = Vec::new();
    let used: BTreeSet<&str> = vms
        .iter()
        .filter(|vm| vm.dedup.is_some())
        .map(|vm| vm.domain.as_str())
        .collect();
    if file.domain.contains_key(DEFAULT_DOMAIN) {
        let text = format!("[domain.{DEFAULT_DOMAIN}] is what [store] is for");
        return Err(Mistake::at(&["domain", DEFAULT_DOMAIN], text));
    }
    let is_known = |domain: &String| domain == DEFAULT_DOMAIN || file.domain.contains_key(domain);
    if let Some((vm, entry)) = vms.iter().zip(entries).find(|(vm, _)| !is_known(&vm.domain)) {
        return Err(Mistake {
            place: Place::Entry(*entry, Some("domain")),
            text: format!("VM {:?}: there is no [domain.{}]", vm.name, vm.domain),
        });
    }
    let sections = file
        .domain
        .iter()
        .map(|(domain, settings)| (domain.as_str(), settings));
    let sections = std::iter::once((DEFAULT_DOMAIN, &file.store)).chain(sections);
    for (domain, settings) in sections.filter(|(domain, _)| used.contains(domain)) {
        let at = |key, text| match domain {
            DEFAULT_DOMAIN => Mistake::at(&["store", key], text),
            domain => Mistake::at(&["domain", domain, key], text),
        };
        let mut store = store(domain, settings, folder, run_folder).map_err(|(key, text)| at(key, text))?;
        let members = vms.iter().filter(|vm| vm.dedup.is_some() && vm.domain == domain);
        store.users = members.filter_map(|vm| vm.user.clone()).collect();
        let same = |other: &&StorePlan| {
            other.socket == store.socket || (other.metrics.is_some() && other.metrics == store.metrics)
        };
        if let Some(other) = stores.iter().find(same) {
            let key = if other.socket == store.socket {
                "socket"
            } else {
                "metrics"
            };
            let text = format!(
                "domains {:?} and {domain:?} have the same socket or metrics address: each needs its own",
                other.domain
            );
            return Err(at(key, text));
        }
        stores.push(store);
    }
    Ok(stores)
}

/// One store; a mistake is told with its key.
fn store(
    domain: &str,
    settings: &StoreSettings,
    folder: &Path,
    run_folder: &Path,
) -> Result<StorePlan, (&'static str, String)> {
    // Which is the key of the table itself.
    file::check_name("a domain's name", domain).map_err(|e| ("", e))?;
    let is_default = domain == DEFAULT_DOMAIN;
    let default_socket = match is_default {
        true => "store.sock".to_owned(),
        false => format!("store-{domain}.sock"),
    };
    let default_metrics = Metrics(is_default.then_some(DEFAULT_METRICS));
    let max_mib = settings.max_mib.unwrap_or(DEFAULT_MAX_MIB);
    if !MAX_MIB.contains(&max_mib) {
        let text = format!(
            "max_mib of domain {domain:?} is {max_mib}: give {} to {}",
            MAX_MIB.start(),
            MAX_MIB.end()
        );
        return Err(("max_mib", text));
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
        secure: settings.secure.unwrap_or(false),
        users: BTreeSet::new(),
    })
}
