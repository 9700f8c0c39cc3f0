//! `fleet ls`: the fleets of this user.

use crate::at::At;
use crate::runtime;
use crate::state::{Directory, State, directories};
use crate::status::{CONNECTS, Status, logs};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;
use vmm_dedup_host::table::{self, Column, Table};
use vmm_dedup_host::{Failure, say};

const COLUMNS: [Column; 5] = [
    Column::name("FLEET"),
    Column::number("VMS", 1),
    Column::number("RUN", 1),
    Column::text("STORES", 2),
    Column::text("FILE", 3),
];

/// A fleet, and whether all is well with it.
struct Fleet {
    directory: PathBuf,
    status: Status,
    verdict: Result<(), Failure>,
}

/// Shows the fleets in the runtime folder, as JSON if asked to.
///
/// # Errors
/// A [`Failure`] if not all is well with one, as `status` tells it, or its folder cannot be used; all others are shown before.
pub fn list(json: bool) -> Result<(), Failure> {
    let folder = vmm_dedup_host::runtime::folder()?;
    if let Some(failure) = vmm_dedup_host::runtime::unreadable(&folder, "fleets") {
        return Err(failure);
    }
    // One that is somebody else's hides no other.
    let (fleets, mut failures) = looked_at(directories(&folder));
    let verdicts = fleets.iter().filter_map(|fleet| fleet.verdict.as_ref().err());
    failures.extend(verdicts.map(ToString::to_string));
    if json {
        let fleets: Vec<Value> = fleets.iter().map(told).collect();
        let text = serde_json::to_string_pretty(&fleets).map_err(Failure::from_error)?;
        say!("{text}");
        return whole(&failures);
    }
    if fleets.is_empty() {
        // Of folders that may not be looked into nobody knows.
        if failures.is_empty() {
            say!("no fleet is up in {}", folder.display());
        }
        return whole(&failures);
    }
    let mut table = Table::new(&COLUMNS);
    for Fleet { status, .. } in &fleets {
        let state = status.state();
        table.row([
            state.fleet.clone(),
            state.names().len().to_string(),
            status.running().to_string(),
            format!("{} of {}", status.stores_running(), state.stores.len()),
            state
                .file
                .as_ref()
                .map_or(String::new(), |file| file.display().to_string()),
        ]);
    }
    table.lines(table::width()).iter().for_each(|line| say!("{line}"));
    whole(&failures)
}

/// The fleets in the runtime folder whose logs nobody keeps short, each with what to do. One that may not be looked at has none.
#[must_use]
pub fn unkept_logs() -> Vec<(String, String)> {
    let folders = vmm_dedup_host::runtime::folder().map(|folder| directories(&folder));
    let states = folders
        .into_iter()
        .flatten()
        .filter_map(|folder| Directory::new(folder).state().ok()?);
    let unkept = states.filter_map(|state| {
        let what_to_do = logs(&state, &of(&state))?;
        Some((state.fleet, what_to_do))
    });
    unkept.collect()
}

/// How commands name a fleet that is up.
fn of(state: &State) -> At {
    At {
        file: state.file.clone().unwrap_or_default(),
        runtime_dir: None,
    }
}

/// The fleets in these folders, all looked at at a time; and why others cannot be.
fn looked_at(folders: Vec<PathBuf>) -> (Vec<Fleet>, Vec<String>) {
    let deadline = Instant::now() + CONNECTS;
    let looked: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = folders
            .into_iter()
            .map(|folder| scope.spawn(move || look(folder, deadline)))
            .collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    });
    let (mut fleets, mut failures) = (Vec::new(), Vec::new());
    for looked in looked {
        match looked {
            Ok(fleet) => fleets.extend(fleet),
            Err(failure) => failures.push(failure.to_string()),
        }
    }
    (fleets, failures)
}

/// The fleet in a folder, if one is up there.
fn look(folder: PathBuf, deadline: Instant) -> Result<Option<Fleet>, Failure> {
    let directory = Directory::new(folder.clone());
    let Some(state) = directory.state()? else {
        return Ok(None);
    };
    let status = runtime::block_on(Status::of(of(&state), state, &directory, deadline))?;
    Ok(Some(Fleet {
        verdict: status.verdict(directory.is_locked()),
        directory: folder,
        status,
    }))
}

/// Fails if some folder could not be used, or a fleet is not well.
fn whole(failures: &[String]) -> Result<(), Failure> {
    match failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(failures.join("; "))),
    }
}

fn told(fleet: &Fleet) -> Value {
    let state = fleet.status.state();
    json!({
        "fleet": state.fleet,
        "directory": fleet.directory,
        "file": state.file,
        "complete": state.complete,
        "vms": state.names().len(),
        "running": fleet.status.running(),
        "stores": state.stores.len(),
        "stores_running": fleet.status.stores_running(),
        "well": fleet.verdict.is_ok(),
    })
}
