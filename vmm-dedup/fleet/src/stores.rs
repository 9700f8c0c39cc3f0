//! The stores of a fleet: found running, or started as processes of their own.

use crate::log;
use crate::plan::StorePlan;
use crate::process::{self, Process};
use crate::spec::store_spec;
use crate::state::{self, Directory, StoreState};
use serde_json::Value;
use std::fs::File;
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

/// Asks a store. `process`: it, as far as it is known.
pub(crate) fn account(socket: &Path, process: Option<&Process>) -> Account {
    let asked = Observer::connect(socket).and_then(|mut observer| observer.stats());
    let pid = process.and_then(|process| process.pid.try_into().ok());
    asked.map_err(|error| match listens(socket) {
        true => Unheard::Silent(silence::failure(socket, pid, error)),
        false => Unheard::Gone,
    })
}

/// Starts a store, unless one runs. `started` notes it down; the store runs only then.
pub(crate) async fn ensure(
    store: &StorePlan,
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
    let log = directory.store_log(&domain);
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
        .arg("--socket")
        .arg(&socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&log).map_err(fail)?)
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
            let last = log::last_line(&log);
            let how = process::describe(status);
            return Err(Failure::new(format!(
                "the store of domain {domain:?} ended with {how}: {last}"
            )));
        }
        if Instant::now() > deadline {
            return Err(Failure::new(format!(
                "the store of domain {domain:?} does not listen after {START_LIMIT:?}: {}",
                log::last_line(&log)
            )));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
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
