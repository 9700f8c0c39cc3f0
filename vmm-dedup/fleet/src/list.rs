//! `fleet ls`: the fleets of this user.

use crate::changes::health;
use crate::state::{Directory, State, StoreState, directories};
use crate::vmm::{Condition, Health};
use crate::{runtime, stores};
use serde_json::{Value, json};
use std::path::PathBuf;
use vmm_dedup_host::table::{self, Column, Table};
use vmm_dedup_host::{Failure, say};

const COLUMNS: [Column; 5] = [
    Column::name("FLEET"),
    Column::number("VMS", 1),
    Column::number("RUN", 1),
    Column::text("STORES", 2),
    Column::text("FILE", 3),
];

struct Fleet {
    directory: PathBuf,
    state: State,
    running: usize,
    stores: usize,
}

/// Shows the fleets in the runtime folder, as JSON if asked to.
///
/// # Errors
/// A [`Failure`] if a folder cannot be used; the other fleets are shown before.
pub fn list(json: bool) -> Result<(), Failure> {
    let folder = vmm_dedup_host::runtime::folder()?;
    let (mut fleets, mut failures) = (Vec::new(), Vec::new());
    for path in directories(&folder) {
        let directory = Directory::new(path.clone());
        // One that is somebody else's hides no other.
        let state = directory.state().unwrap_or_else(|failure| {
            failures.push(failure.to_string());
            None
        });
        if let Some(state) = state {
            let health = runtime::block_on(health(&state, &directory))?;
            let runs =
                |health: &&Health| matches!(health, Health::Alive(Condition::Running | Condition::Paused));
            fleets.push(Fleet {
                directory: path,
                running: health.iter().filter(runs).count(),
                stores: state.stores.iter().filter(|store| answers(store)).count(),
                state,
            });
        }
    }
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
    for fleet in &fleets {
        table.row([
            fleet.state.fleet.clone(),
            fleet.state.names().len().to_string(),
            fleet.running.to_string(),
            format!("{} of {}", fleet.stores, fleet.state.stores.len()),
            fleet
                .state
                .file
                .as_ref()
                .map_or(String::new(), |file| file.display().to_string()),
        ]);
    }
    table.lines(table::width()).iter().for_each(|line| say!("{line}"));
    whole(&failures)
}

/// Whether a store runs: one that is stopped listens, too.
fn answers(store: &StoreState) -> bool {
    stores::account(&store.socket, store.process.as_ref()).is_ok()
}

/// Fails if some folder could not be used.
fn whole(failures: &[String]) -> Result<(), Failure> {
    match failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(failures.join("; "))),
    }
}

fn told(fleet: &Fleet) -> Value {
    json!({
        "fleet": fleet.state.fleet,
        "directory": fleet.directory,
        "file": fleet.state.file,
        "complete": fleet.state.complete,
        "vms": fleet.state.names().len(),
        "running": fleet.running,
        "stores": fleet.state.stores.len(),
        "stores_running": fleet.stores,
    })
}
