//! The stores of a fleet: found running, or started as processes of their own.

use crate::log;
use crate::plan::StorePlan;
use crate::process::{self, Process};
use crate::spec::store_spec;
use crate::state::{self, Asked, Directory, StoreState, VmState};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup_host::store::listens;
use vmm_dedup_host::{Failure, silence};
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::{Observer, Vm};

/// How long a store may take to listen.
const START_LIMIT: Duration = Duration::from_secs(30);
/// How long it may take to end when asked, and when killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// What a store says, or why nothing.
pub(crate) type Account = Result<(StoreStats, Vec<Vm>), Unheard>;

/// Why a store says nothing.
pub(crate) enum Unheard {
    /// Nobody listens.
    Gone,
    /// Its process is there, and gives no answer or a wrong one.
    Silent(Failure),
}

/// What stores say, by their domains.
pub(crate) struct Accounts(BTreeMap<String, Account>);

impl Accounts {
    /// Asks stores, all at a time: each that hangs takes its five seconds.
    pub(crate) fn of<'a>(asked: impl IntoIterator<Item = Asked<'a>>) -> Self {
        std::thread::scope(|scope| {
            let ask = |(domain, socket, process): Asked<'a>| {
                (domain.to_owned(), scope.spawn(move || account(socket, process)))
            };
            let asked: Vec<_> = asked.into_iter().map(ask).collect();
            let answer = |asked: std::thread::ScopedJoinHandle<'_, Account>| {
                asked.join().unwrap_or(Err(Unheard::Gone))
            };
            let answers = asked.into_iter();
            Self(answers.map(|(domain, asked)| (domain, answer(asked))).collect())
        })
    }

    /// What a store says, if it was asked.
    pub(crate) fn of_domain(&self, domain: &str) -> Option<&Account> {
        self.0.get(domain)
    }

    /// What a VM's service told its store.
    pub(crate) fn service(&self, vm: &VmState) -> Option<&Vm> {
        let (_, vms) = self.0.get(vm.store.as_ref()?)?.as_ref().ok()?;
        vms.iter().find(|other| vm.process.is_called(other.pid))
    }

    /// How many have not answered.
    pub(crate) fn unheard(&self) -> usize {
        self.0.values().filter(|account| account.is_err()).count()
    }
}

/// Asks a store. `process`: it, as far as it is known.
fn account(socket: &Path, process: Option<&Process>) -> Account {
    let asked = Observer::connect(socket).and_then(|mut observer| observer.stats());
    let pid = process.and_then(|process| process.pid.try_into().ok());
    asked.map_err(|error| match listens(socket) {
        true => Unheard::Silent(silence::failure(socket, pid, error)),
        false => Unheard::Gone,
    })
}

/// Starts a store, unless one runs. `users`: who may join it besides who starts it. `started` notes it down; the store runs only then.
pub(crate) async fn ensure(
    store: &StorePlan,
    users: &[u32],
    directory: &Directory,
    started: impl FnOnce(StoreState) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (domain, socket) = (store.domain.clone(), store.socket.clone());
    if listens(&store.socket) {
        return started(StoreState {
            domain,
            socket,
            process: None,
            spec: Value::Null,
        });
    }
    let log_path = directory.store_log(&domain);
    let fail = |e: std::io::Error| Failure::new(format!("cannot start the store of domain {domain:?}: {e}"));
    let metrics = store
        .metrics
        .map_or("none".to_owned(), |address| address.to_string());
    let mut command = Command::new(std::env::current_exe().map_err(fail)?);
    command
        .args([
            "store",
            "--metrics",
            &metrics,
            "--max-mib",
            &store.max_mib.to_string(),
            "--domain",
            &domain,
        ])
        .args(store.ordered.then_some("--ordered"))
        .args(store.secure.then_some("--secure"))
        .args(joining(users))
        .arg("--socket")
        .arg(&socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log::begin(&log_path).map_err(fail)?)
        .current_dir("/");
    let record = |process| {
        started(StoreState {
            domain: domain.clone(),
            socket,
            process: Some(process),
            spec: store_spec(store),
        })
    };
    let mut child = process::spawn(command, record, fail)?;
    let deadline = Instant::now() + START_LIMIT;
    while !listens(&store.socket) {
        if let Some(status) = child.try_wait().map_err(fail)? {
            let last = log::last_line(&log_path);
            let how = process::describe(status);
            return Err(Failure::new(format!(
                "the store of domain {domain:?} ended with {how}: {last}"
            )));
        }
        if Instant::now() > deadline {
            return Err(Failure::new(format!(
                "the store of domain {domain:?} does not listen after {START_LIMIT:?}: {}",
                log::last_line(&log_path)
            )));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// The options of a store that these users may join: everybody can reach its socket, and is sent away unless on the list.
fn joining(users: &[u32]) -> Vec<String> {
    if users.is_empty() {
        return Vec::new();
    }
    let list: Vec<String> = users.iter().map(ToString::to_string).collect();
    ["--socket-mode", "0666", "--join-user", &list.join(",")]
        .map(str::to_owned)
        .into()
}

/// Ends a store that the fleet started.
pub(crate) async fn stop(store: &StoreState) -> Result<(), Failure> {
    let Some(process) = &store.process else {
        return Ok(());
    };
    let ended = process.end(STOP_LIMIT).await;
    // A store that was killed leaves its socket, unless another has replaced it.
    let removed = ended.and_then(|()| match listens(&store.socket) {
        true => Ok(()),
        false => state::remove_file(&store.socket),
    });
    removed.map_err(|e| {
        let (domain, pid) = (&store.domain, process.pid);
        Failure::new(format!(
            "the store of domain {domain:?} (process {pid}) cannot be ended: {e}"
        ))
    })
}
