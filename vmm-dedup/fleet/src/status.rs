//! `fleet status`: what runs, what does not and why, and what dedup saves.

use crate::at::At;
use crate::changes::health;
use crate::process;
use crate::state::{Directory, State, StoreState, VmState};
use crate::stores::{self, Account, Unheard};
use crate::vmm::{Condition, Health};
use crate::{log, runtime};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vmm_dedup_host::table::{self, Column, Table};
use vmm_dedup_host::units::{mib, natural_order, pages_mib, quoted, short};
use vmm_dedup_host::{Failure, account, say};
use vmm_dedup_protocol::observer::Vm;

/// Lines shown of the log of a VM that does not run.
const TAIL: usize = 5;

/// How long a service may take to connect, once its VM runs or its store is there again; it tries each second.
const CONNECTS: Duration = Duration::from_secs(3);
/// How often stores are asked until then.
const LOOK: Duration = Duration::from_millis(50);

/// The state of a VM that ought to run and has no process.
const MISSING: &str = "missing";

const COLUMNS: [Column; 10] = [
    Column::name("VM"),
    Column::text("VMM", 7),
    Column::number("PID", 5),
    Column::text("STATE", 1),
    Column::text("DEDUP", 1),
    Column::number("LAST PASS", 4),
    Column::number("SAVED", 2),
    Column::number("SHARED", 6),
    Column::number("BREAKS", 8),
    Column::number("CPU S", 3),
];

struct Status {
    at: At,
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
            "fleet {name} is not up (nothing in {path}): start it with `{}`",
            at.command("up")
        ))
    })?;
    at.check(&state)?;
    let status = runtime::block_on(Status::of(at.clone(), state, &directory))?;
    if json {
        let text = serde_json::to_string_pretty(&status.json(&directory)).map_err(Failure::from_error)?;
        say!("{text}");
    } else {
        status.print(&directory);
    }
    status.verdict(directory.is_locked())
}

impl Status {
    async fn of(at: At, state: State, directory: &Directory) -> Result<Self, Failure> {
        let mut status = Self {
            at,
            health: health(&state, directory).await?,
            accounts: accounts(&state),
            state,
        };
        let deadline = Instant::now() + CONNECTS;
        while status.not_connected().next().is_some() && Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
            status.accounts = accounts(&status.state);
        }
        Ok(status)
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
        let missing = self.state.missing.iter().map(|(name, missing)| {
            json!({
                "name": name,
                "vmm": missing.vmm,
                "pid": Value::Null,
                "state": MISSING,
                "why": missing.why,
                "log": Value::Null,
                "serial": Value::Null,
                "log_tail": [],
                "domain": Value::Null,
                "dedup": Value::Null,
            })
        });
        let mut vms: Vec<Value> = vms.chain(missing).collect();
        let name = |vm: &Value| vm["name"].as_str().unwrap_or_default().to_owned();
        vms.sort_by(|a, b| natural_order(&name(a), &name(b)));
        json!({
            "fleet": self.state.fleet,
            "complete": self.state.complete,
            "directory": directory.path(),
            "stores": stores.collect::<Vec<_>>(),
            "vms": vms,
        })
    }

    fn print(&self, directory: &Directory) {
        say!("fleet {} in {}", self.state.fleet, directory.path().display());
        let width = table::width();
        for store in &self.state.stores {
            let which = format!("store {} ({}):", store.domain, store.socket.display());
            let text = match self.accounts.get(&store.domain) {
                Some(Ok((stats, _))) => {
                    let running = format!(
                        "{which} running, {} saved net, {} kept once, {} not kept again",
                        mib(account::saved_net(stats)),
                        pages_mib(stats.pages_shared),
                        pages_mib(stats.pages_sharing)
                    );
                    table::wrapped(&running, width.unwrap_or(usize::MAX))
                        .iter()
                        .for_each(|line| say!("{line}"));
                    continue;
                }
                Some(Err(Unheard::Silent(why))) => format!(
                    "SILENT: guests go on, nothing merges: {why}; else end it{}, then `{}` starts it again",
                    (store.process.as_ref())
                        .map_or(String::new(), |process| format!(" (process {})", process.pid)),
                    self.at.command("up")
                ),
                _ => format!(
                    "GONE: guests go on, nothing merges; `{}` starts it again",
                    self.at.command("up")
                ),
            };
            // In one line whatever the terminal: what is to be pasted stays whole.
            say!("{which} {text}");
        }
        self.table().lines(width).iter().for_each(|line| say!("{line}"));
        for (vm, health) in self.vms().filter(|(_, health)| !is_well(health)) {
            if *health == Health::Frozen {
                let (name, pid) = (&vm.name, vm.process.pid);
                say!("\n{name} frozen: its process is stopped: `kill -CONT {pid}` lets it go on");
                continue;
            }
            let files = directory.vm(&vm.name);
            let (state, why) = describe(health);
            let starts = match health {
                Health::Ended | Health::Crashed(_) => {
                    format!(": `{}` starts it again", self.at.command("up"))
                }
                _ => String::new(),
            };
            say!(
                "\n{} {state} ({why}){starts}; the end of {}:",
                vm.name,
                files.log().display()
            );
            let mut tail = log::tail(&files.log(), TAIL);
            if tail.is_empty() {
                tail.push("(it wrote nothing)".into());
            }
            tail.iter().for_each(|line| say!("  {line}"));
        }
        for (name, missing) in &self.state.missing {
            let up = self.at.command("up");
            say!("\n{name} {MISSING} ({}): `{up}` tries to start it", missing.why);
        }
        for vm in self.not_connected() {
            let log = directory.vm(&vm.name).log();
            say!(
                "{} is not connected to its store: {} tells why",
                vm.name,
                log.display()
            );
        }
        for (store, vm) in self.refused() {
            say!(
                "{} is not deduplicated ({}): `vmm-dedup doctor {} --store {}` tells what to change",
                vm.name,
                account::condition(vm),
                vm.name,
                quoted(&store.socket.to_string_lossy())
            );
        }
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&COLUMNS);
        for name in self.state.names() {
            let Some((vm, health)) = self.vms().find(|(vm, _)| vm.name == name) else {
                let vmm = self
                    .state
                    .missing
                    .get(name)
                    .map(|missing| missing.vmm.to_string());
                let mut row = [const { String::new() }; COLUMNS.len()];
                row[..2].clone_from_slice(&[name.to_owned(), vmm.unwrap_or_default()]);
                MISSING.clone_into(&mut row[3]);
                table.row(row);
                continue;
            };
            let (state, _) = describe(health);
            let dedup = self.dedup_of(vm);
            let told = |of: &dyn Fn(&Vm) -> String| dedup.map_or(String::new(), of);
            table.row([
                vm.name.clone(),
                vm.vmm.to_string(),
                vm.process.pid.to_string(),
                state.to_owned(),
                match (dedup, &vm.store) {
                    (Some(dedup), _) => account::condition(dedup).to_owned(),
                    // It has no process.
                    (None, Some(_)) if matches!(health, Health::Ended | Health::Crashed(_)) => String::new(),
                    (None, Some(domain)) => match self.accounts.get(domain) {
                        Some(Ok(_)) => "not connected".to_owned(),
                        Some(Err(Unheard::Silent(_))) => "store silent".to_owned(),
                        _ => "store gone".to_owned(),
                    },
                    (None, None) => "none".to_owned(),
                },
                told(&account::last_pass_text),
                told(&|vm| short(vm.saved_net_bytes)),
                told(&|vm| short(i64::try_from(account::shared_bytes(&vm.stats)).unwrap_or(i64::MAX))),
                told(&|vm| vm.stats.breaks_total().to_string()),
                told(&|vm| format!("{:.2}", vm.stats.cpu_ns.total() as f64 / 1e9)),
            ]);
        }
        table
    }

    /// VMs that run, and of which a store that answers knows nothing although they should be connected to it.
    fn not_connected(&self) -> impl Iterator<Item = &VmState> {
        let well = self.vms().filter(|(_, health)| is_well(health)).map(|(vm, _)| vm);
        well.filter(|vm| {
            let account = vm.store.as_ref().and_then(|domain| self.accounts.get(domain));
            account.is_some_and(Result::is_ok) && self.dedup_of(vm).is_none()
        })
    }

    /// VMs that run without dedup although they should not.
    fn refused(&self) -> impl Iterator<Item = (&StoreState, &Vm)> {
        let dedup = self
            .state
            .vms
            .iter()
            .filter_map(|vm| self.dedup_of(vm).map(|dedup| (vm, dedup)));
        dedup
            .filter(|(_, dedup)| dedup.reason.is_some())
            .filter_map(|(vm, dedup)| {
                let of_it = |store: &&StoreState| Some(&store.domain) == vm.store.as_ref();
                Some((self.state.stores.iter().find(of_it)?, dedup))
            })
    }

    /// One line on what is not well. `changing`: another command changes the fleet, which may be why.
    fn verdict(&self, changing: bool) -> Result<(), Failure> {
        let ill = self.health.iter().filter(|health| !is_well(health)).count() + self.state.missing.len();
        let unheard = self.accounts.values().filter(|account| account.is_err()).count();
        let fleet = &self.state.fleet;
        if !self.state.complete {
            return Err(Failure::new(format!(
                "fleet {fleet} is being started, or its start was killed: then run `{}`, or `{}`",
                self.at.command("up"),
                self.at.command("down")
            )));
        }
        let without = self.not_connected().count() + self.refused().count();
        let counts = [
            ("VMs that do not run", ill),
            ("stores that are gone or silent", unheard),
            ("VMs that run without their dedup", without),
        ];
        let counts = counts.iter().filter(|(_, count)| *count > 0);
        let told: Vec<String> = counts.map(|(what, count)| format!("{what}: {count}")).collect();
        if told.is_empty() {
            return Ok(());
        }
        let changing = match changing {
            true => "; another fleet command is at work, so look again",
            false => "",
        };
        let told = told.join(", ");
        Err(Failure::new(format!("fleet {fleet} is not all well: {told}{changing}")).of_host())
    }
}

fn accounts(state: &State) -> BTreeMap<String, Account> {
    let stores = state.stores.iter();
    stores
        .map(|store| {
            let account = stores::account(&store.socket, store.process.as_ref());
            (store.domain.clone(), account)
        })
        .collect()
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
        Health::Frozen => ("frozen", "its process is stopped; SIGCONT lets it go on".into()),
        Health::Ended => ("ended", "in order".into()),
        Health::Crashed(Some(status)) => ("crashed", process::describe(*status)),
        Health::Crashed(None) => ("crashed", "exit status unknown".into()),
    }
}
