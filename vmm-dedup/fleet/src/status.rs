//! `fleet status`: what runs, what does not and why, and what dedup saves.

use crate::at::At;
use crate::changes::{Changes, health};
use crate::file::Vmm;
use crate::log_keeper::{self, Fault};
use crate::process;
use crate::state::{Directory, State, StoreState, VmState};
use crate::stores::{Accounts, Unheard};
use crate::vmm::{Condition, Health};
use crate::{log, runtime};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use vmm_dedup_host::account::Trouble;
use vmm_dedup_host::table::{self, Column, Table};
use vmm_dedup_host::units::{mib, natural_order, pages_mib, quoted, short};
use vmm_dedup_host::{Failure, account, say};
use vmm_dedup_protocol::observer::Vm;

/// Lines shown of the log of a VM that does not run.
const TAIL: usize = 5;

/// How long a service may take to connect, once its VM runs or its store is there again; it tries each second.
pub(crate) const CONNECTS: Duration = Duration::from_secs(3);
/// How often stores are asked until then.
const LOOK: Duration = Duration::from_millis(50);

/// The state of a VM that ought to run and has no process.
const MISSING: &str = "missing";
/// The state of a VM of the file that is not of those that ought to run.
const DOWN: &str = "down";

/// Who VMs run as, where that is not who started them.
const USER: &str = "USER";

const COLUMNS: [Column; 11] = [
    Column::name("VM"),
    Column::text("VMM", 7),
    Column::text(USER, 9),
    Column::number("PID", 5),
    Column::text("STATE", 1),
    Column::text("DEDUP", 1),
    Column::number("LAST PASS", 4),
    Column::number("SAVED", 2),
    Column::number("SHARED", 6),
    Column::number("BREAKS", 8),
    Column::number("CPU S", 3),
];

/// How a fleet is.
pub(crate) struct Status {
    at: At,
    state: State,
    health: Vec<Health>,
    accounts: Accounts,
    /// VMs of the file that nobody has started, or that were taken down.
    down: Vec<(String, Vmm)>,
    /// Where it runs otherwise than its file says, as `up` tells it.
    differs: Vec<String>,
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
    let deadline = Instant::now() + CONNECTS;
    let mut status = runtime::block_on(Status::of(at.clone(), state, &directory, deadline))?;
    status.compare();
    if json {
        let text = serde_json::to_string_pretty(&status.json(&directory)).map_err(Failure::from_error)?;
        say!("{text}");
    } else {
        status.print(&directory);
    }
    status.verdict(directory.is_locked())
}

impl Status {
    /// Looks at a fleet; services have until the deadline to connect. It is not compared with its file yet.
    pub(crate) async fn of(
        at: At,
        state: State,
        directory: &Directory,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let accounts = |state: &State| Accounts::of(state.stores.iter().map(StoreState::asked));
        let mut status = Self {
            at,
            health: health(&state, directory).await?,
            accounts: accounts(&state),
            state,
            down: Vec::new(),
            differs: Vec::new(),
        };
        while status.not_connected().next().is_some() && Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
            status.accounts = accounts(&status.state);
        }
        Ok(status)
    }

    /// Compares it with what its file says now.
    fn compare(&mut self) {
        let (plan, kept) = match self.at.plan(&self.state) {
            Ok(planned) => planned,
            Err(failure) => {
                self.differs
                    .push(format!("! it cannot be compared with its file: {failure}"));
                return;
            }
        };
        let changes = Changes::seen(&plan, &self.state, &self.health, &self.accounts);
        let of_file = changes.other_than_in_the_file(|command| self.at.command(command));
        self.differs = changes.live().chain(kept).chain(of_file).collect();
        // As long as it is being started, nobody knows.
        if self.state.complete {
            let names = self.state.names();
            let down = plan.vms.iter().filter(|vm| !names.contains(&vm.name.as_str()));
            self.down = down.map(|vm| (vm.name.clone(), vm.vmm)).collect();
        }
    }

    /// How many VMs run.
    pub(crate) fn running(&self) -> usize {
        self.health.iter().filter(|health| is_well(health)).count()
    }

    /// How many stores answer.
    pub(crate) fn stores_running(&self) -> usize {
        self.state.stores.len() - self.accounts.unheard()
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    fn vms(&self) -> impl Iterator<Item = (&VmState, &Health)> {
        self.state.vms.iter().zip(&self.health)
    }

    fn json(&self, directory: &Directory) -> Value {
        let stores = self.state.stores.iter().map(|store| {
            let account = self
                .accounts
                .of_domain(&store.domain)
                .and_then(|account| account.as_ref().ok());
            json!({
                "domain": store.domain,
                "socket": store.socket,
                "state": match self.accounts.of_domain(&store.domain) {
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
                "user": user(vm),
                "pid": vm.process.pid,
                "state": state,
                "why": why,
                "log": files.log(),
                "serial": files.serial(),
                "log_tail": if is_well(health) { Vec::new() } else { log::tail(&files.log(), TAIL) },
                "domain": vm.store,
                "dedup": self.accounts.service(vm).map(account::vm_json),
            })
        });
        let without_process = |name: &str, vmm: Vmm, state: &str, why: &str| {
            json!({
                "name": name,
                "vmm": vmm,
                "user": Value::Null,
                "pid": Value::Null,
                "state": state,
                "why": why,
                "log": Value::Null,
                "serial": Value::Null,
                "log_tail": [],
                "domain": Value::Null,
                "dedup": Value::Null,
            })
        };
        let missing = self.state.missing.iter();
        let missing =
            missing.map(|(name, missing)| without_process(name, missing.vmm, MISSING, &missing.why));
        let down = self.down.iter();
        let down = down.map(|(name, vmm)| without_process(name, *vmm, DOWN, ""));
        let mut vms: Vec<Value> = vms.chain(missing).chain(down).collect();
        let name = |vm: &Value| vm["name"].as_str().unwrap_or_default().to_owned();
        vms.sort_by(|a, b| natural_order(&name(a), &name(b)));
        json!({
            "fleet": self.state.fleet,
            "complete": self.state.complete,
            "directory": directory.path(),
            "logs_kept_short": self.logs().is_none(),
            "stores": stores.collect::<Vec<_>>(),
            "vms": vms,
            "differs": self.differs,
        })
    }

    fn print(&self, directory: &Directory) {
        say!("fleet {} in {}", self.state.fleet, directory.path().display());
        let width = table::width();
        for store in &self.state.stores {
            let which = format!("store {} ({}):", store.domain, store.socket.display());
            let text = match self.accounts.of_domain(&store.domain) {
                Some(Ok((stats, _))) => {
                    let full = match account::is_full(stats) {
                        true => format!(", FULL: refused {}", account::refused_full(stats)),
                        false => String::new(),
                    };
                    let securely = match account::is_secure(stats) {
                        true => ", shares securely",
                        false => "",
                    };
                    let running = format!(
                        "{which} running{securely}, {} saved net, {} kept once, {} not kept again{full}",
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
        for (name, _) in &self.down {
            let up = self.at.command("up");
            say!("\n{name} {DOWN}: `{up}` starts it");
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
        if let Some(what_to_do) = self.logs() {
            say!("\nlogs are not kept short, and grow: {what_to_do}");
        }
        if !self.differs.is_empty() {
            let up = self.at.command("up");
            say!("\nother than its file says (`{up}` changes what begins with ~):");
        }
        self.differs.iter().for_each(|line| say!("{line}"));
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&COLUMNS);
        let down = self.down.iter().map(|(name, vmm)| (name.as_str(), *vmm, DOWN));
        let missing = self.state.missing.iter();
        let missing = missing.map(|(name, missing)| (name.as_str(), missing.vmm, MISSING));
        let without_process: Vec<_> = down.chain(missing).collect();
        let mut names = self.state.names();
        names.extend(self.down.iter().map(|(name, _)| name.as_str()));
        names.sort_by(|a, b| natural_order(a, b));
        for name in names {
            let Some((vm, health)) = self.vms().find(|(vm, _)| vm.name == name) else {
                let found = without_process.iter().find(|(other, _, _)| *other == name);
                let Some((_, vmm, state)) = found else { continue };
                let mut row = [const { String::new() }; COLUMNS.len()];
                row[..2].clone_from_slice(&[name.to_owned(), vmm.to_string()]);
                (*state).clone_into(&mut row[4]);
                table.row(row);
                continue;
            };
            let (state, _) = describe(health);
            let dedup = self.accounts.service(vm);
            let told = |of: &dyn Fn(&Vm) -> String| dedup.map_or(String::new(), of);
            table.row([
                vm.name.clone(),
                vm.vmm.to_string(),
                user(vm).unwrap_or_default().to_owned(),
                vm.process.pid.to_string(),
                state.to_owned(),
                match (dedup, &vm.store) {
                    (Some(dedup), _) => account::condition(dedup).to_owned(),
                    // It has no process.
                    (None, Some(_)) if matches!(health, Health::Ended | Health::Crashed(_)) => String::new(),
                    (None, Some(domain)) => match self.accounts.of_domain(domain) {
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
        table.leave_out_if_empty(USER);
        table
    }

    /// VMs that run, and of which a store that answers knows nothing although they should be connected to it.
    fn not_connected(&self) -> impl Iterator<Item = &VmState> {
        let well = self.vms().filter(|(_, health)| is_well(health)).map(|(vm, _)| vm);
        well.filter(|vm| {
            let account = vm
                .store
                .as_ref()
                .and_then(|domain| self.accounts.of_domain(domain));
            account.is_some_and(Result::is_ok) && self.accounts.service(vm).is_none()
        })
    }

    /// VMs that run without dedup although they should not.
    fn refused(&self) -> impl Iterator<Item = (&StoreState, &Vm)> {
        let dedup = self
            .state
            .vms
            .iter()
            .filter_map(|vm| self.accounts.service(vm).map(|dedup| (vm, dedup)));
        dedup
            .filter(|(_, dedup)| dedup.reason.is_some())
            .filter_map(|(vm, dedup)| {
                let of_it = |store: &&StoreState| Some(&store.domain) == vm.store.as_ref();
                Some((self.state.stores.iter().find(of_it)?, dedup))
            })
    }

    /// One line on what is not well, with what to do. `changing`: another command changes the fleet, which may be why.
    pub(crate) fn verdict(&self, changing: bool) -> Result<(), Failure> {
        let (fleet, command) = (&self.state.fleet, |command| self.at.command(command));
        if !self.state.complete {
            return Err(Failure::new(format!(
                "fleet {fleet} is being started, or its start was killed: then run `{}`, or `{}`",
                command("up"),
                command("down")
            )));
        }
        let ended = |health: &Health| {
            matches!(
                health,
                Health::Ended | Health::Crashed(_) | Health::Alive(Condition::Off)
            )
        };
        let of_health = |is: &dyn Fn(&Health) -> bool| self.health.iter().filter(|health| is(health)).count();
        let frozen: Vec<String> = (self.vms())
            .filter(|(_, health)| **health == Health::Frozen)
            .map(|(vm, _)| vm.process.pid.to_string())
            .collect();
        let counts = [
            (
                "VMs that do not run",
                of_health(&ended) + self.state.missing.len(),
                format!(
                    "`{}` shows what they wrote, `{}` starts them",
                    command("logs"),
                    command("up")
                ),
            ),
            (
                "VMs that are frozen",
                frozen.len(),
                format!("`kill -CONT {}` lets them go on", frozen.join(" ")),
            ),
            (
                "VMs that do not answer",
                of_health(&|health| matches!(health, Health::Silent(_))),
                format!("`{}` shows what they wrote", command("logs")),
            ),
            (
                "stores that are gone or silent",
                self.accounts.unheard(),
                format!("`{}` starts those that are gone", command("up")),
            ),
            (
                "VMs that run without their dedup",
                self.not_connected().count() + self.refused().count(),
                "`vmm-dedup doctor` tells what to change".to_owned(),
            ),
            (
                "stores that are full",
                self.full(),
                "`vmm-dedup doctor` tells how they get room".to_owned(),
            ),
            (
                "VMs without a pass for long",
                self.stuck(),
                "`vmm-dedup doctor` tells what to do".to_owned(),
            ),
        ];
        let counts = counts.iter().filter(|(_, count, _)| *count > 0);
        let mut told: Vec<String> = counts
            .map(|(what, count, advice)| format!("{what}: {count} ({advice})"))
            .collect();
        let logs = self.logs();
        told.extend(logs.map(|what_to_do| format!("logs are not kept short ({what_to_do})")));
        if told.is_empty() {
            return Ok(());
        }
        let changing = match changing {
            true => "; another fleet command is at work, so look again",
            false => "",
        };
        Err(Failure::new(format!(
            "fleet {fleet} is not all well: {}{changing}",
            told.join(", ")
        )))
    }
}

/// What is not well although all of it runs.
impl Status {
    /// How many stores answer and have no room.
    fn full(&self) -> usize {
        let accounts = self.state.stores.iter();
        let accounts = accounts.filter_map(|store| self.accounts.of_domain(&store.domain)?.as_ref().ok());
        accounts.filter(|(stats, _)| account::is_full(stats)).count()
    }

    /// How many VMs run whose services do not.
    fn stuck(&self) -> usize {
        let services = self.state.vms.iter().filter_map(|vm| self.accounts.service(vm));
        let stuck = |vm: &&Vm| matches!(account::trouble(vm), Some(Trouble::Stuck(_)));
        services.filter(stuck).count()
    }

    /// What lets somebody keep logs short, if nobody does.
    fn logs(&self) -> Option<String> {
        logs(&self.state, &self.at)
    }
}

/// What lets somebody keep the logs of a fleet short, if nobody does. As long as it is being started, nobody has to.
pub(crate) fn logs(state: &State, at: &At) -> Option<String> {
    let fault = log_keeper::fault(state).filter(|_| state.complete)?;
    Some(match fault {
        Fault::Gone => format!("`{}` starts the process that does that", at.command("up")),
        Fault::Stopped(pid) => format!("`kill -CONT {pid}` lets the process go on that does that"),
    })
}

/// Who a VM was started as; `None`: as who started it.
fn user(vm: &VmState) -> Option<&str> {
    vm.spec["user"].as_str()
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
