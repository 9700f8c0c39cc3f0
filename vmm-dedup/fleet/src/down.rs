//! `fleet down`: ends what `up` started, by process and not by name, and leaves nothing behind.

use crate::at::At;
use crate::state::{Locked, State};
use crate::{runtime, stores, vmm};
use std::path::Path;
use std::time::Duration;
use tokio::task::JoinSet;
use vmm_dedup_host::{Failure, account};

/// Ends all VMs and the stores that [`up()`](crate::up()) started, and removes their files. May be repeated.
///
/// `grace`: how long guests get to shut down by themselves once their power button is pressed; zero: it is not pressed. The
/// reference VMM has none.
///
/// # Errors
/// A [`Failure`] if something cannot be ended; it stays in the state.
pub fn down(at: &At, grace: Duration) -> Result<(), Failure> {
    let name = at.name()?;
    let locked = at.directory()?.lock()?;
    let state = locked
        .as_ref()
        .map(|locked| locked.state())
        .transpose()?
        .flatten();
    let (Some(locked), Some(state)) = (&locked, state) else {
        locked.iter().for_each(Locked::remove_remains);
        println!("fleet {name} is not up: nothing to do");
        return Ok(());
    };
    at.check(&state)?;
    runtime::block_on(async move {
        let vms = state.vms.len();
        stop(locked, &state, grace).await?;
        println!("fleet {name}: {vms} VMs ended");
        Ok(())
    })
}

/// Ends the VMs, all at a time, then the stores, and removes all files. What cannot be ended stays in the state.
pub(crate) async fn stop(directory: &Locked, state: &State, grace: Duration) -> Result<(), Failure> {
    let mut ends = JoinSet::new();
    for vm in state.vms.iter().cloned() {
        let files = directory.vm(&vm.name);
        ends.spawn_local(async move { vmm::end(&vm, &files, grace).await });
    }
    let mut result = Ok(());
    while let Some(ended) = ends.join_next().await {
        result = result.and(ended.map_err(Failure::from_error).and_then(|ended| ended));
    }
    result?;
    for store in &state.stores {
        if store.process.is_some()
            && let Some(others) = others_on(&store.socket, state)
        {
            eprintln!(
                "the store of domain {:?} stays: {others} VMs of others are connected; end it with SIGTERM",
                store.domain
            );
            continue;
        }
        stores::stop(store).await?;
    }
    directory.remove(state)
}

/// How many VMs are connected to a store that are not the fleet's; `None` for none, or without a store.
fn others_on(socket: &Path, state: &State) -> Option<usize> {
    let (_, vms) = account::of_store(socket).ok()?;
    let is_ours = |pid: u64| {
        state
            .vms
            .iter()
            .any(|vm| u64::try_from(vm.process.pid) == Ok(pid))
    };
    let others = vms.iter().filter(|vm| !is_ours(vm.pid)).count();
    (others > 0).then_some(others)
}
