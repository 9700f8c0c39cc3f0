//! `fleet restart` and `fleet scale`: VMs are ended and started on purpose.

use crate::at::At;
use crate::check;
use crate::choice::choose;
use crate::launch::Fleet;
use crate::plan::{MAX_VMS, Plan, VmPlan};
use crate::runtime;
use crate::state::{Locked, State};
use crate::up::{NOT_STARTED, start_some};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;
use vmm_dedup_host::units::{count, quoted};
use vmm_dedup_host::view::matches;
use vmm_dedup_host::{Failure, note, say};

/// Ends VMs and starts them as the file says now, so many at a time. No names: all VMs.
///
/// # Errors
/// A [`Failure`] if one cannot be ended or started; the ones after it stay as they are.
pub fn restart(at: &At, names: &[String], grace: Duration, parallel: usize) -> Result<(), Failure> {
    let (locked, state) = at.running()?;
    let (plan, kept) = at.plan(&state)?;
    let all: Vec<&str> = plan.vms.iter().map(|vm| vm.name.as_str()).collect();
    let is_planned = |word: &str| all.iter().any(|name| matches(word, name));
    let extra = |word: &&String| !is_planned(word) && state.names().iter().any(|name| matches(word, name));
    if let Some(word) = names.iter().find(extra) {
        return Err(Failure::new(format!(
            "{word} is not in the file any more, and cannot be started as it says: `{} {}` ends it",
            at.command("down"),
            quoted(word)
        )));
    }
    let chosen = choose(names, &all, &state)?;
    let vms: Vec<&VmPlan> = plan.vms.iter().filter(|vm| chosen.contains(&vm.name)).collect();
    let fleet = Rc::new(fleet(at, plan.clone(), state, locked, &vms)?);
    runtime::block_on(async {
        for some in chosen.chunks(parallel.max(1)) {
            // Guests' logs may have filled the folder since: an ended VM could not be started again.
            fleet.directory.check_room(some.len(), 0)?;
            for name in some {
                match fleet.end_wanted(name, grace, NOT_STARTED).await? {
                    true => note!("{name} has ended"),
                    false => note!("{name} did not run"),
                }
            }
            let places = places(&fleet.plan, some);
            if let Some(failure) = start_some(&fleet, &places).await?.into_iter().next() {
                return Err(failure);
            }
        }
        let (name, vms) = (&fleet.plan.name, count(chosen.len(), "VM", "VMs"));
        say!("fleet {name}: {vms} started anew");
        kept.iter().for_each(|line| say!("{line}"));
        Ok(())
    })
}

/// Lets an entry of the file have so many VMs, whatever the file says, until the fleet is down.
///
/// # Errors
/// A [`Failure`] if there is no such entry, or a VM cannot be started or ended.
pub fn scale(at: &At, entry: &str, vms: u32, grace: Duration) -> Result<(), Failure> {
    let (locked, mut state) = at.running()?;
    let (unscaled, _) = at.plan(&State::default())?;
    let of_entry = |vm: &&VmPlan| vm.entry == entry && vm.name != entry;
    let in_file = unscaled.vms.iter().filter(of_entry).count();
    if in_file == 0 {
        let mut entries: Vec<&str> = unscaled
            .vms
            .iter()
            .filter(|vm| vm.name != vm.entry)
            .map(|vm| vm.entry.as_str())
            .collect();
        entries.dedup();
        let there_are = match entries.is_empty() {
            true => "the file has none".to_owned(),
            false => format!("there are {}", entries.join(", ")),
        };
        return Err(Failure::new(format!(
            "no [[vm]] with a count is called {entry}: {there_are}"
        )));
    }
    if vms == 0 {
        let all = quoted(&format!("{entry}-*"));
        return Err(Failure::usage(format!(
            "an entry has at least one VM: `{} {all}` ends all, until the next `up`",
            at.command("down")
        )));
    }
    let (now, _) = at.plan(&state)?;
    let others = now.vms.iter().filter(|vm| !of_entry(vm)).count();
    let most = MAX_VMS.saturating_sub(others);
    if usize::try_from(vms).map_or(true, |vms| vms > most) {
        return Err(Failure::usage(format!(
            "{entry} can have {most} VMs at most, not {vms}: a fleet has up to {MAX_VMS}, others of this one: {others}"
        )));
    }
    state.scale.insert(entry.to_owned(), vms);
    if usize::try_from(vms) == Ok(in_file) {
        state.scale.remove(entry);
    }
    let (plan, _) = at.plan(&state)?;
    let has = |state: &State, name: &str| state.vms.iter().any(|vm| vm.name == name);
    let planned = |name: &str| plan.vms.iter().any(|vm| vm.name == name);
    let surplus = state
        .vms
        .iter()
        .filter(|vm| vm.entry == entry && !planned(&vm.name));
    let surplus: Vec<String> = surplus.map(|vm| vm.name.clone()).collect();
    // One that could not be started, and is not wanted now, is not missed.
    state.missing.retain(|name, _| planned(name));
    let missing: Vec<&VmPlan> = plan
        .vms
        .iter()
        .filter(|vm| vm.entry == entry && !has(&state, &vm.name))
        .collect();
    let names: Vec<String> = missing.iter().map(|vm| vm.name.clone()).collect();
    let fleet = Rc::new(fleet(at, plan.clone(), state, locked, &missing)?);
    runtime::block_on(async {
        fleet.record(|_| ())?;
        for name in &surplus {
            fleet.end_vm(name, grace).await?;
            note!("{name} has ended");
        }
        let failures = start_some(&fleet, &places(&fleet.plan, &names)).await?;
        if let Some(failure) = failures.into_iter().next() {
            return Err(failure);
        }
        let (name, all) = (
            &fleet.plan.name,
            count(fleet.state.borrow().vms.len(), "VM", "VMs"),
        );
        say!(
            "fleet {name}: {} started, {} ended, {all} now",
            names.len(),
            surplus.len()
        );
        Ok(())
    })
}

/// A fleet of which these VMs are to be started, which is looked at before.
fn fleet(at: &At, plan: Plan, state: State, directory: Locked, vms: &[&VmPlan]) -> Result<Fleet, Failure> {
    let replaced = state
        .vms
        .iter()
        .filter(|old| vms.iter().any(|vm| vm.name == old.name));
    let leftovers: Vec<PathBuf> = replaced.clone().flat_map(|vm| vm.files.clone()).collect();
    // Names are taken in the store by those that are replaced.
    let fresh: Vec<&VmPlan> = vms
        .iter()
        .filter(|vm| !replaced.clone().any(|old| old.name == vm.name))
        .copied()
        .collect();
    // Before one is ended of which the next could not be started.
    check::files(vms, &directory, &leftovers)?;
    check::stores_answer(&plan, &state, vms, &at.command("up"))?;
    check::starts(&plan, &fresh, &[], &directory, &leftovers)?;
    let tools = crate::program::Tools::find(&plan)?;
    Ok(Fleet {
        plan,
        tools,
        directory,
        state: RefCell::new(state),
    })
}

fn places(plan: &Plan, names: &[String]) -> Vec<usize> {
    (0..plan.vms.len())
        .filter(|at| names.contains(&plan.vms[*at].name))
        .collect()
}
