//! What `up` has to do so that the fleet is as its file says.

use crate::plan::{Plan, StorePlan, VmPlan};
use crate::spec::{Difference, spec};
use crate::state::{Directory, State, VmState};
use crate::vmm::{self, Condition, Health};
use tokio::task::JoinSet;
use vmm_dedup_host::Failure;
use vmm_dedup_host::store::listens;
use vmm_dedup_protocol::control::Settings;

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
    /// VMs that the file does not have any more.
    extra: Vec<String>,
    /// VMs that run, and with which something is wrong.
    ill: Vec<(&'a str, String)>,
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
        let mut changes = Self {
            stores: plan
                .stores
                .iter()
                .filter(|store| !listens(&store.socket))
                .collect(),
            ..Self::default()
        };
        let health = health(state, directory).await?;
        for vm in &plan.vms {
            let running = state
                .vms
                .iter()
                .zip(&health)
                .find(|(other, _)| other.name == vm.name);
            match running {
                None => changes.starts.push((vm, "missing")),
                Some((old, health)) => changes.of_vm(vm, old, health),
            }
        }
        let is_planned = |vm: &&VmState| plan.vms.iter().any(|planned| planned.name == vm.name);
        let extra = state.vms.iter().filter(|vm| !is_planned(vm));
        changes.extra = extra.map(|vm| vm.name.clone()).collect();
        Ok(changes)
    }

    fn of_vm(&mut self, vm: &'a VmPlan, old: &VmState, health: &Health) {
        match health {
            Health::Crashed(_) => return self.starts.push((vm, "crashed")),
            Health::Ended => return self.starts.push((vm, "ended")),
            Health::Alive(Condition::Off) => return self.starts.push((vm, "off")),
            // Its start was killed: nobody knows how far it is. One that has run is left alone, whatever it does now.
            Health::Silent(_) if old.starting => return self.starts.push((vm, "not started completely")),
            Health::Silent(why) => self.ill.push((&vm.name, format!("does not answer ({why})"))),
            Health::Frozen => self.ill.push((&vm.name, "is stopped by a signal".into())),
            Health::Alive(Condition::Running | Condition::Paused) => {}
        }
        if old.spec.is_null() {
            return; // noted down by an older release
        }
        let difference = Difference::between(&old.spec, &spec(vm));
        if difference.is_none() {
            return;
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

    /// Whether there is anything to do. What is only told is no work.
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
        let live = self
            .live
            .iter()
            .map(|live| format!("~ {}: {}", live.vm.name, live.keys.join(", ")));
        stores.chain(starts).chain(live).collect()
    }

    /// What `up` leaves to whoever runs it. `command`: a fleet command, to be pasted.
    pub(crate) fn told(&self, command: impl Fn(&str) -> String) -> Vec<String> {
        let restarts = self.restarts.iter().map(|(name, keys)| {
            format!(
                "! {name}: {} changed: `{} {name}`",
                keys.join(", "),
                command("restart")
            )
        });
        let extra = self.extra.iter().map(|name| {
            format!(
                "! {name} is not in the file any more: `{} {name}` ends it",
                command("down")
            )
        });
        let ill = self
            .ill
            .iter()
            .map(|(name, how)| format!("! {name} {how}: `{} {name}` starts it anew", command("restart")));
        restarts.chain(extra).chain(ill).collect()
    }
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
