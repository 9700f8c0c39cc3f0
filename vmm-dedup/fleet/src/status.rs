//! `fleet status`: what runs, what does not and why, and what dedup saves.

use crate::at::At;
use crate::process;
use crate::state::{Directory, State, VmState};
use crate::vmm::{self, Condition, Health};
use crate::{log, runtime};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use tokio::task::JoinSet;
use vmm_dedup_host::store::listens;
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::Vm;

/// Lines shown of the log of a VM that does not run.
const TAIL: usize = 5;

/// What a store says, or why nothing.
type Account = Result<(StoreStats, Vec<Vm>), Unheard>;

/// Why a store says nothing.
enum Unheard {
    /// Nobody listens.
    Gone,
    /// Its process is there, and gives no answer or a wrong one.
    Silent(Failure),
}

struct Status {
    state: State,
    health: Vec<Health>,
    /// By domain.
    accounts: BTreeMap<String, Account>,
}

/// Shows VMs, stores and savings, as JSON if asked to.
///
/// # Errors
/// A [`Failure`] if the fleet is not up, or not all is well.
pub fn status(at: &At, json: bool) -> Result<(), Failure> {
    let directory = at.directory()?;
    let name = at.name()?;
    let state = directory.state()?.ok_or_else(|| {
        let path = directory.path().display();
        Failure::new(format!(
            "fleet {name} is not up (nothing in {path}): start it with `vmm-dedup fleet up`"
        ))
    })?;
    at.check(&state)?;
    let status = runtime::block_on(Status::of(state, &directory))?;
    if json {
        let text = serde_json::to_string_pretty(&status.json(&directory)).map_err(Failure::from_error)?;
        println!("{text}");
    } else {
        status.print(&directory);
    }
    status.verdict()
}

impl Status {
    async fn of(state: State, directory: &Directory) -> Result<Self, Failure> {
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
        let accounts = state
            .stores
            .iter()
            .map(|store| (store.domain.clone(), account(&store.socket)));
        Ok(Self {
            accounts: accounts.collect(),
            health,
            state,
        })
    }

    fn vms(&self) -> impl Iterator<Item = (&VmState, &Health)> {
        self.state.vms.iter().zip(&self.health)
    }

    /// What a VM's service told its store.
    fn dedup_of(&self, vm: &VmState) -> Option<&Vm> {
        let (_, vms) = self.accounts.get(vm.store.as_ref()?)?.as_ref().ok()?;
        vms.iter()
            .find(|other| u64::try_from(vm.process.pid) == Ok(other.pid))
    }

    fn json(&self, directory: &Directory) -> Value {
        let stores = self.state.stores.iter().map(|store| {
            let account = self
                .accounts
                .get(&store.domain)
                .and_then(|account| account.as_ref().ok());
            json!({
                "domain": store.domain,
                "socket": store.socket,
                "state": match self.accounts.get(&store.domain) {
                    Some(Ok(_)) => "running",
                    Some(Err(Unheard::Silent(_))) => "silent",
                    _ => "gone",
                },
                "pid": store.process.as_ref().map(|process| process.pid),
                "account": account.map(|(stats, _)| account::store_json(stats)),
            })
        });
        let vms = self.vms().map(|(vm, health)| {
            let files = directory.vm(&vm.name);
            let (state, why) = describe(health);
            json!({
                "name": vm.name,
                "vmm": vm.vmm,
                "pid": vm.process.pid,
                "state": state,
                "why": why,
                "log": files.log(),
                "serial": files.serial(),
                "log_tail": if is_well(health) { Vec::new() } else { log::tail(&files.log(), TAIL) },
                "domain": vm.store,
                "dedup": self.dedup_of(vm).map(account::vm_json),
            })
        });
        json!({
            "fleet": self.state.fleet,
            "complete": self.state.complete,
            "directory": directory.path(),
            "stores": stores.collect::<Vec<_>>(),
            "vms": vms.collect::<Vec<_>>(),
        })
    }

    fn print(&self, directory: &Directory) {
        println!("fleet {} in {}", self.state.fleet, directory.path().display());
        for store in &self.state.stores {
            let text = match self.accounts.get(&store.domain) {
                Some(Ok((stats, _))) => {
                    let mib = account::saved_net(stats) as f64 / f64::from(1 << 20);
                    format!(
                        "running, {mib:.1} MiB saved net, {} pages sharing",
                        stats.pages_sharing
                    )
                }
                Some(Err(Unheard::Silent(why))) => format!(
                    "SILENT ({why}): guests go on, nothing merges; end it{}, then `vmm-dedup fleet up` starts it again",
                    (store.process.as_ref())
                        .map_or(String::new(), |process| format!(" (process {})", process.pid))
                ),
                _ => "GONE: guests go on, nothing merges; `vmm-dedup fleet up` starts it again".to_owned(),
            };
            println!("store {} ({}): {text}", store.domain, store.socket.display());
        }
        println!(
            "{:<24} {:<16} {:>8} {:<8} {:<13} {:>9} {:>8} {:>8} {:>8}",
            "vm", "vmm", "pid", "state", "dedup", "mapped", "zero", "breaks", "cpu s"
        );
        for (vm, health) in self.vms() {
            let (state, _) = describe(health);
            print!(
                "{:<24} {:<16} {:>8} {state:<8}",
                vm.name,
                vm.vmm.to_string(),
                vm.process.pid
            );
            match (self.dedup_of(vm), &vm.store) {
                (Some(dedup), _) => println!(" {}", dedup_columns(dedup)),
                (None, Some(_)) => println!(" not connected to its store"),
                (None, None) => println!(" dedup is off"),
            }
        }
        for (vm, health) in self.vms().filter(|(_, health)| !is_well(health)) {
            let files = directory.vm(&vm.name);
            let (state, why) = describe(health);
            println!(
                "\n{} {state} ({why}); the end of {}:",
                vm.name,
                files.log().display()
            );
            let mut tail = log::tail(&files.log(), TAIL);
            if tail.is_empty() {
                tail.push("(it wrote nothing)".into());
            }
            tail.iter().for_each(|line| println!("  {line}"));
        }
    }

    /// One line on what is not well.
    fn verdict(&self) -> Result<(), Failure> {
        let ill = self.health.iter().filter(|health| !is_well(health)).count();
        let unheard = self.accounts.values().filter(|account| account.is_err()).count();
        let fleet = &self.state.fleet;
        if !self.state.complete {
            return Err(Failure::new(format!(
                "fleet {fleet} is being started, or its start was killed: then run `vmm-dedup fleet down`"
            )));
        }
        if ill + unheard == 0 {
            return Ok(());
        }
        Err(Failure::new(format!(
            "fleet {fleet} is not all well: VMs that do not run: {ill}, stores that are gone or silent: {unheard}"
        )))
    }
}

fn account(socket: &Path) -> Account {
    account::of_store(socket).map_err(|why| match listens(socket) {
        true => Unheard::Silent(why),
        false => Unheard::Gone,
    })
}

/// What a service saves and costs, or why there is none.
fn dedup_columns(vm: &Vm) -> String {
    if let Some(reason) = vm.reason {
        return format!(
            "refused ({}): see `vmm-dedup explain {}`",
            reason.label(),
            vm.name
        );
    }
    let s = &vm.stats;
    format!(
        "{:<13} {:>9} {:>8} {:>8} {:>8.2}",
        account::state_name(s.state),
        s.pages_mapped,
        s.pages_zero,
        s.breaks_total(),
        s.cpu_ns.total() as f64 / 1e9
    )
}

fn is_well(health: &Health) -> bool {
    matches!(health, Health::Alive(Condition::Running | Condition::Paused))
}

/// A word for the state, and why.
fn describe(health: &Health) -> (&'static str, String) {
    match health {
        Health::Alive(Condition::Running) => ("running", String::new()),
        Health::Alive(Condition::Paused) => ("paused", String::new()),
        Health::Alive(Condition::Off) => ("off", "the VMM lives, its VM does not run".into()),
        Health::Silent(why) => ("silent", why.clone()),
        Health::Ended => ("ended", "in order".into()),
        Health::Crashed(Some(status)) => ("crashed", process::describe(*status)),
        Health::Crashed(None) => ("crashed", "exit status unknown".into()),
    }
}
