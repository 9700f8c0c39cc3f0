//! What `up` has to do so that the fleet is as its file says.

use crate::log_keeper::{self, Fault};
use crate::plan::{Plan, StorePlan, VmPlan};
use crate::spec::{Difference, spec, store_keys};
use crate::state::{Directory, State, VmState};
use crate::stores::{Accounts, Unheard};
use crate::vmm::{self, Condition, Health};
use std::path::{Path, PathBuf};
use tokio::task::JoinSet;
use vmm_dedup_host::store::listens;
use vmm_dedup_host::units::quoted;
use vmm_dedup_host::view::address;
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::control::Settings;
use vmm_dedup_protocol::observer::Vm;

/// Everything.
#[derive(Debug, Default)]
pub(crate) struct Changes<'a> {
    /// Stores that do not run.
    pub(crate) stores: Vec<&'a StorePlan>,
    /// VMs that do not run, and why.
    pub(crate) starts: Vec<(&'a VmPlan, &'static str)>,
    /// VMs whose services take over settings.
    pub(crate) live: Vec<Live<'a>>,
    /// VMs that were started with other settings, which need a new start.
    restarts: Vec<(&'a str, Vec<String>)>,
    /// Stores that were started with other settings, by domain and process: they need a new start of the store.
    stale: Vec<(&'a str, i32, Vec<String>)>,
    /// Stores that run and do not answer: their domains, and why.
    deaf: Vec<(&'a str, String)>,
    /// VMs that the file does not have any more.
    extra: Vec<String>,
    /// VMs that do not answer, and why.
    silent: Vec<(&'a str, String)>,
    /// VMs that are stopped by a signal, and their processes.
    frozen: Vec<(&'a str, i32)>,
    /// VMs that somebody has switched off although the file has them on, as their stores are told of them, and the stores' sockets.
    off: Vec<(&'a str, String, PathBuf)>,
    /// Why logs are not kept short, if they are not.
    pub(crate) logs: Option<Fault>,
}

/// A VM whose service takes over settings.
#[derive(Debug)]
pub(crate) struct Live<'a> {
    pub(crate) vm: &'a VmPlan,
    pub(crate) settings: Settings,
    keys: Vec<String>,
}

impl<'a> Changes<'a> {
    /// Compares a fleet with what its file says now.
    pub(crate) async fn between(
        plan: &'a Plan,
        state: &State,
        directory: &Directory,
    ) -> Result<Self, Failure> {
        let health = health(state, directory).await?;
        let accounts = Accounts::of(state.asked(&plan.stores));
        Ok(Self::seen(plan, state, &health, &accounts))
    }

    /// The same, of what was seen already. `health`: of the state's VMs.
    pub(crate) fn seen(plan: &'a Plan, state: &State, health: &[Health], accounts: &Accounts) -> Self {
        let mut changes = Self {
            stores: plan
                .stores
                .iter()
                .filter(|store| !listens(&store.socket))
                .collect(),
            stale: plan
                .stores
                .iter()
                .filter_map(|store| stale(store, state))
                .collect(),
            deaf: (plan.stores.iter())
                .filter_map(|store| match accounts.of_domain(&store.domain) {
                    Some(Err(Unheard::Silent(why))) => Some((store.domain.as_str(), why.to_string())),
                    _ => None,
                })
                .collect(),
            logs: log_keeper::fault(state),
            ..Self::default()
        };
        for vm in &plan.vms {
            let running = state
                .vms
                .iter()
                .zip(health)
                .find(|(other, _)| other.name == vm.name);
            match running {
                None => changes.starts.push((vm, "missing")),
                Some((old, health)) => {
                    let service = accounts.service(old);
                    let store = plan.store_of(vm).map(|store| store.socket.as_path());
                    changes.of_vm(vm, old, health, service.zip(store));
                }
            }
        }
        let is_planned = |vm: &&VmState| plan.vms.iter().any(|planned| planned.name == vm.name);
        let extra = state.vms.iter().filter(|vm| !is_planned(vm));
        changes.extra = extra.map(|vm| vm.name.clone()).collect();
        changes
    }

    /// `service`: what the VM's service says, and the socket of its store.
    fn of_vm(&mut self, vm: &'a VmPlan, old: &VmState, health: &Health, service: Option<(&Vm, &Path)>) {
        match health {
            Health::Crashed(_) => return self.starts.push((vm, "crashed")),
            Health::Ended => return self.starts.push((vm, "ended")),
            Health::Alive(Condition::Off) => return self.starts.push((vm, "off")),
            // Its start was killed: nobody knows how far it is. One that has run is left alone, whatever it does now.
            Health::Silent(_) if old.starting => return self.starts.push((vm, "not started completely")),
            Health::Silent(why) => self.silent.push((&vm.name, why.clone())),
            Health::Frozen => self.frozen.push((&vm.name, old.process.pid)),
            Health::Alive(Condition::Running | Condition::Paused) => {}
        }
        if old.spec.is_null() {
            return; // noted down by an older release
        }
        let new = spec(vm);
        let mut difference = Difference::between(&old.spec, &new);
        if let (Some((service, socket)), Health::Alive(_)) = (service, health) {
            difference.add_drift(&old.spec, &new, &service.stats);
            let is_on = |spec: &serde_json::Value| spec["dedup"]["enabled"] == true;
            // One that the file switches on now is switched on. What somebody has switched off is his to switch on again.
            if is_on(&old.spec) && is_on(&new) && account::is_off(service.stats.state) {
                self.off.push((&vm.name, address(service), socket.to_owned()));
            }
        }
        if !difference.live_keys.is_empty() {
            self.live.push(Live {
                vm,
                settings: difference.live,
                keys: difference.live_keys,
            });
        }
        if !difference.restart_keys.is_empty() {
            self.restarts.push((&vm.name, difference.restart_keys));
        }
    }

    /// Whether no store or VM is to be started or changed. What is only told is no work.
    pub(crate) fn is_none(&self) -> bool {
        self.stores.is_empty() && self.starts.is_empty() && self.live.is_empty()
    }

    /// What is to be done, a line each: `+` starts, `~` changes while it runs.
    pub(crate) fn work(&self) -> Vec<String> {
        let stores = self.stores.iter().map(|store| {
            let (domain, socket) = (&store.domain, store.socket.display());
            format!("+ store of domain {domain:?} on {socket}")
        });
        let starts = self
            .starts
            .iter()
            .map(|(vm, why)| format!("+ {} ({}, {why})", vm.name, vm.vmm));
        let logs = (self.logs == Some(Fault::Gone)).then(|| "+ the process that keeps logs short".to_owned());
        logs.into_iter()
            .chain(stores)
            .chain(starts)
            .chain(self.live())
            .collect()
    }

    /// The settings that services take over while they run, a line for each VM.
    pub(crate) fn live(&self) -> impl Iterator<Item = String> {
        let live = self.live.iter();
        live.map(|live| format!("~ {}: {}", live.vm.name, live.keys.join(", ")))
    }

    /// What `up` leaves to whoever runs it. `command`: a fleet command, to be pasted.
    pub(crate) fn told(&self, command: impl Fn(&str) -> String) -> Vec<String> {
        let mut told = self.other_than_in_the_file(&command);
        told.extend(self.unwell(&command));
        told
    }

    /// Of that, what runs otherwise than the file says.
    pub(crate) fn other_than_in_the_file(&self, command: impl Fn(&str) -> String) -> Vec<String> {
        let restarts = self.restarts.iter().map(|(name, keys)| {
            format!(
                "! {name}: {} changed: `{} {name}`",
                keys.join(", "),
                command("restart")
            )
        });
        let stale = self.stale.iter().map(|(domain, pid, keys)| {
            format!(
                "! store of domain {domain:?}: {} changed: `kill {pid}` ends it, then `{}` starts it with that; guests go on meanwhile, \
                 nothing merges",
                keys.join(", "),
                command("up")
            )
        });
        let extra = self.extra.iter().map(|name| {
            format!(
                "! {name} is not in the file any more: `{} {name}` ends it",
                command("down")
            )
        });
        let off = self.off.iter().map(|(name, address, socket)| {
            let (address, socket) = (quoted(address), quoted(&socket.to_string_lossy()));
            format!("! {name} was switched off by `set`: `vmm-dedup set {address} on --store {socket}` switches it on again")
        });
        restarts.chain(off).chain(stale).chain(extra).collect()
    }

    /// Of that, what does not answer, or stands still.
    fn unwell(&self, command: impl Fn(&str) -> String) -> Vec<String> {
        let deaf = (self.deaf.iter()).map(|(domain, why)| format!("! store of domain {domain:?}: {why}"));
        let silent = self.silent.iter().map(|(name, why)| {
            format!(
                "! {name} does not answer ({why}): `{} {name}` starts it anew, and its guest loses what it has not written",
                command("restart")
            )
        });
        let frozen = (self.frozen.iter())
            .map(|(name, pid)| format!("! {name} is stopped by a signal: `kill -CONT {pid}` lets it go on"));
        let logs = match self.logs {
            Some(Fault::Stopped(pid)) => Some(format!(
                "! the process that keeps logs short is stopped by a signal: `kill -CONT {pid}` lets it go on"
            )),
            _ => None,
        };
        deaf.chain(silent).chain(frozen).chain(logs).collect()
    }
}

/// A store that runs with other settings than the file has now. Null: nobody noted down with which.
fn stale<'a>(store: &'a StorePlan, state: &State) -> Option<(&'a str, i32, Vec<String>)> {
    let started = state.stores.iter().find(|other| other.domain == store.domain)?;
    let process = started.process.as_ref().filter(|process| process.is_alive())?;
    if started.spec.is_null() || !listens(&store.socket) {
        return None;
    }
    let keys = store_keys(&started.spec, store);
    (!keys.is_empty()).then_some((store.domain.as_str(), process.pid, keys))
}

/// How all VMs are, in the state's order.
pub(crate) async fn health(state: &State, directory: &Directory) -> Result<Vec<Health>, Failure> {
    let mut asked = JoinSet::new();
    for (n, vm) in state.vms.iter().cloned().enumerate() {
        let files = directory.vm(&vm.name);
        asked.spawn_local(async move { (n, vmm::health(&vm, &files).await) });
    }
    let mut health = vec![Health::Ended; state.vms.len()];
    while let Some(answer) = asked.join_next().await {
        let (n, answer) = answer.map_err(Failure::from_error)?;
        health[n] = answer;
    }
    Ok(health)
}
