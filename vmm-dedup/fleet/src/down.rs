//! `fleet down`: ends what `up` started, by process and not by name, and leaves nothing behind.

use crate::at::At;
use crate::choice::choose;
use crate::plan::Plan;
use crate::state::{Locked, State, StoreState};
use crate::stores::Accounts;
use crate::{runtime, stores, vmm};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use vmm_dedup_host::process::{self, Stat};
use vmm_dedup_host::units::{count, natural_order};
use vmm_dedup_host::{Failure, account, note, say};

/// How long a store may take to notice that a VM has ended. What is connected then, and has no process here, is one of another PID
/// namespace.
const NOTICE_LIMIT: Duration = Duration::from_secs(5);

/// Ends all VMs and the stores that [`up()`](crate::up()) started, and removes their files. May be repeated.
///
/// `grace`: how long guests get to shut down by themselves once their power button is pressed; zero: it is not pressed. The
/// reference VMM has none.
///
/// # Errors
/// A [`Failure`] if something cannot be ended; it stays in the state.
pub fn down(at: &At, grace: Duration) -> Result<(), Failure> {
    let name = at.name()?;
    let (locked, state) = lock(at)?;
    let (Some(locked), Some(state)) = (&locked, state) else {
        locked.iter().for_each(Locked::remove_remains);
        say!("fleet {name} is not up: nothing to do");
        return Ok(());
    };
    at.check(&state)?;
    runtime::block_on(async move {
        let vms = state.vms.len();
        stop(locked, &state, grace).await?;
        say!("fleet {name}: {} ended", count(vms, "VM", "VMs"));
        Ok(())
    })
}

/// Ends some VMs; the fleet stays up without them, and the next `up` starts them again. May be repeated. `names` may be patterns.
///
/// # Errors
/// A [`Failure`] if there is no such VM, or one cannot be ended; it stays in the state.
pub fn down_vms(at: &At, names: &[String], grace: Duration) -> Result<(), Failure> {
    let (locked, state) = lock(at)?;
    let (Some(locked), Some(mut state)) = (locked, state) else {
        let (plan, _) = at.plan(&State::default())?;
        choose(names, &vm_names(&plan), &State::default())?;
        say!("fleet {} is not up: nothing to do", plan.name);
        return Ok(());
    };
    at.check(&state)?;
    // Those that are down already are in the file only, unless that cannot be read any more.
    let planned = at.plan(&state).ok();
    let planned = planned.iter().flat_map(|(plan, _)| vm_names(plan));
    let planned: Vec<String> = planned.map(str::to_owned).collect();
    let mut known = state.names();
    known.extend(planned.iter().map(String::as_str));
    known.sort_by(|a, b| natural_order(a, b));
    known.dedup();
    let (chosen, down): (Vec<String>, Vec<String>) = choose(names, &known, &state)?
        .into_iter()
        .partition(|name| state.names().contains(&name.as_str()));
    // A pattern means those that are there, if there are any.
    let named = |name: &&String| chosen.is_empty() || names.contains(name);
    down.iter()
        .filter(named)
        .for_each(|name| say!("{name} is down already"));
    if chosen.is_empty() {
        return Ok(());
    }
    // Of those that are missing there is nothing to end.
    let missed = state.missing.len();
    state.missing.retain(|name, _| !chosen.contains(name));
    if state.missing.len() < missed {
        locked.write(&state)?;
    }
    runtime::block_on(async move {
        let mut ends = JoinSet::new();
        for vm in state.vms.iter().filter(|vm| chosen.contains(&vm.name)).cloned() {
            let files = locked.vm(&vm.name);
            ends.spawn_local(async move { vmm::end(&vm, &files, grace).await.map(|()| vm) });
        }
        let mut result = Ok(());
        while let Some(ended) = ends.join_next().await {
            match ended.map_err(Failure::from_error)? {
                Ok(vm) => {
                    locked.remove_vm(&vm)?;
                    state.vms.retain(|other| other.name != vm.name);
                    locked.write(&state)?;
                }
                Err(failure) => result = result.and(Err(failure)),
            }
        }
        result?;
        let left = count(state.vms.len(), "VM is", "VMs are");
        say!(
            "fleet {}: {} ended, {left} left",
            state.fleet,
            count(chosen.len(), "VM", "VMs")
        );
        Ok(())
    })
}

/// The directory, if there is one, and what runs in it.
fn lock(at: &At) -> Result<(Option<Locked>, Option<State>), Failure> {
    let locked = at.directory()?.lock()?;
    let state = locked.as_ref().map(|locked| locked.state()).transpose()?;
    Ok((locked, state.flatten()))
}

fn vm_names(plan: &Plan) -> Vec<&str> {
    plan.vms.iter().map(|vm| vm.name.as_str()).collect()
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
    let accounts = Accounts::of(state.stores.iter().map(StoreState::asked));
    for store in &state.stores {
        if store.process.is_some()
            && accounts.of_domain(&store.domain).is_some_and(Result::is_ok)
            && let Some(others) = others_on(&store.socket, state).await
        {
            note!(
                "the store of domain {:?} stays: {} of others connected; end it with SIGTERM",
                store.domain,
                count(others, "VM", "VMs")
            );
            continue;
        }
        stores::stop(store).await?;
    }
    if let Some(keeper) = &state.log_keeper {
        let ended = keeper.end(NOTICE_LIMIT).await;
        ended.map_err(|e| {
            Failure::new(format!(
                "process {}, which keeps logs short, cannot be ended: {e}",
                keeper.pid
            ))
        })?;
    }
    directory.remove(state)
}

/// How many VMs are connected to a store that are not the fleet's; `None` for none, or without a store. A VM that was taken down
/// just before is connected until the store has noticed its end, which is waited for.
async fn others_on(socket: &Path, state: &State) -> Option<usize> {
    let is_ours = |pid: u64| state.vms.iter().any(|vm| vm.process.is_called(pid));
    let lives = |pid: u64| {
        process::number(pid)
            .and_then(Stat::of)
            .is_some_and(|stat| !stat.has_ended())
    };
    let deadline = Instant::now() + NOTICE_LIMIT;
    loop {
        let (_, vms) = account::of_store(socket).ok()?;
        let others: Vec<u64> = vms.iter().map(|vm| vm.pid).filter(|pid| !is_ours(*pid)).collect();
        if others.is_empty() {
            return None;
        }
        if others.iter().any(|pid| lives(*pid)) || Instant::now() > deadline {
            return Some(others.len());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
