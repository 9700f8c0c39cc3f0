//! `fleet up`: makes the fleet what its file says. The first time it starts all of it, or nothing; later what is missing.

use crate::at::At;
use crate::changes::{Changes, Live};
use crate::check;
use crate::launch::{Fleet, Signals, Starts, show_tail};
use crate::log_keeper::{self, Fault};
use crate::plan::{Plan, VmPlan};
use crate::program::Tools;
use crate::spec::spec;
use crate::state::{Directory, Locked, State};
use crate::vmm::{self, Health};
use crate::{dedup_file, down, log, process, runtime};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};
use vmm_dedup_host::store::listens;
use vmm_dedup_host::units::count;
use vmm_dedup_host::view::address;
use vmm_dedup_host::{Failure, account, note, say, silence};
use vmm_dedup_protocol::observer::Observer;

/// Starts the stores and VMs of the file that do not run, and gives running services the settings that they can take over.
/// Of a fleet that is not up yet all is started, or nothing. `plan_only`: says what would be done, looks at all that could
/// keep it from being done, and does nothing.
///
/// # Errors
/// A [`Failure`] that tells what kept it from being done. One of exit code 3 if the fleet is up, and something could not be done or
/// is left to whoever runs it.
pub fn up(at: &At, plan_only: bool) -> Result<(), Failure> {
    if plan_only {
        return would_do(at);
    }
    if let Some(locked) = at.directory()?.lock()?
        && let Some(state) = locked.state()?
    {
        at.check(&state)?;
        return runtime::block_on(complete(at, state, locked));
    }
    first(at)
}

/// What `up` would do.
fn would_do(at: &At) -> Result<(), Failure> {
    let directory = at.directory()?;
    let state = directory.state()?;
    state.as_ref().map_or(Ok(()), |state| at.check(state))?;
    let is_up = state.is_some();
    let state = state.unwrap_or_default();
    let (plan, kept) = at.plan(&state)?;
    runtime::block_on(async {
        let mut changes = Changes::between(&plan, &state, &directory).await?;
        // Who starts all of a fleet is not told of that.
        changes.logs = changes.logs.filter(|_| is_up);
        let told = changes.told(|command| at.command(command));
        let needs: Vec<String> = kept.into_iter().chain(told).collect();
        if !changes.is_none() {
            // What would not be done is not told.
            check_starts(&plan, &changes, &state, &directory)?;
        }
        let work = changes.work();
        if work.is_empty() && needs.is_empty() {
            say!("fleet {}: nothing to do", plan.name);
        }
        work.iter().chain(&needs).for_each(|line| say!("{line}"));
        left(&plan.name, needs.len())
    })
}

/// Fails if something is left to whoever runs `up`: so many lines have said what.
fn left(fleet: &str, lines: usize) -> Result<(), Failure> {
    let say = match lines {
        0 => return Ok(()),
        1 => "the line with ! says".to_owned(),
        n => format!("{n} lines with ! say"),
    };
    Err(Failure::in_part(format!(
        "fleet {fleet} is not as its file says: {say} what is left to you"
    )))
}

/// Fails with what would keep the changes from being made.
fn check_starts(
    plan: &Plan,
    changes: &Changes<'_>,
    state: &State,
    directory: &Directory,
) -> Result<Tools, Failure> {
    let starts: Vec<&VmPlan> = changes.starts.iter().map(|(vm, _)| *vm).collect();
    let starting = |name: &str| starts.iter().any(|vm| vm.name == name);
    let old = state.vms.iter().filter(|vm| starting(&vm.name));
    let leftovers: Vec<PathBuf> = old.flat_map(|vm| vm.files.clone()).collect();
    check::starts(plan, &starts, &changes.stores, directory, &leftovers)
}

/// Starts all of it, or nothing.
fn first(at: &At) -> Result<(), Failure> {
    let (plan, _) = at.plan(&State::default())?;
    let vms: Vec<&VmPlan> = plan.vms.iter().collect();
    let stores: Vec<_> = plan.stores.iter().collect();
    // Locked before anything is looked at: what another `up` makes meanwhile would look like somebody else's.
    let locked = at.directory()?.create()?;
    if let Some(state) = locked.state()? {
        at.check(&state)?;
        return runtime::block_on(complete(at, state, locked));
    }
    locked.check_empty()?;
    let tools = match check::starts(&plan, &vms, &stores, &locked, &[]) {
        Ok(tools) => tools,
        Err(failure) => {
            locked.remove_remains();
            return Err(failure);
        }
    };
    let begun = Instant::now();
    let fleet = Rc::new(Fleet {
        state: RefCell::new(State {
            fleet: plan.name.clone(),
            file: Some(at.file()?),
            ..State::default()
        }),
        directory: locked,
        plan,
        tools,
    });
    runtime::block_on(async {
        let mut signals = Signals::watch()?;
        let mut starts = Starts::new();
        let result = tokio::select! {
            result = start_all(&fleet, &mut starts) => result,
            signal = signals.next() => Err(Failure::interrupted(signal)),
        };
        let unkept = match result {
            Ok(unkept) => unkept,
            Err(failure) => {
                note!("stopping what was started");
                starts.shutdown().await;
                let state = fleet.state.borrow().clone();
                return Err(match down::stop(&fleet.directory, &state, Duration::ZERO).await {
                    Ok(()) => failure,
                    Err(second) => failure.and(&second),
                });
            }
        };
        say_running(&fleet, begun);
        outcome(&fleet.plan.name, &Vec::from_iter(unkept), 1, 0)
    })
}

fn say_running(fleet: &Fleet, begun: Instant) {
    let (vms, seconds) = (fleet.plan.vms.len(), begun.elapsed().as_secs_f64());
    let run = if vms == 1 { "runs" } else { "run" };
    say!(
        "fleet {}: {} {run}, after {seconds:.1} s",
        fleet.plan.name,
        count(vms, "VM", "VMs")
    );
}

/// Starts all. That nobody keeps its logs short, and why, is returned: it ends no VM.
async fn start_all(fleet: &Rc<Fleet>, starts: &mut Starts) -> Result<Option<Failure>, Failure> {
    fleet.record(|_| ())?;
    let stores: Vec<_> = fleet.plan.stores.iter().collect();
    fleet.start_stores(&stores).await?;
    let all: Vec<usize> = (0..fleet.plan.vms.len()).collect();
    fleet.start_vms(&all, starts);
    let mut running = 0;
    while let Some(started) = starts.join_next().await {
        let line = started
            .map_err(Failure::from_error)?
            .map_err(|(_, failure)| failure)?;
        running += 1;
        note!("[{running}/{}] {line}", all.len());
    }
    check_crashed(fleet).await?;
    check_stores(fleet)?;
    let unkept = log_keeper::start(&fleet.directory, &mut fleet.state.borrow_mut()).err();
    fleet.record(|state| state.complete = true)?;
    Ok(unkept)
}

/// Fails if a VM has crashed while others started. One that has powered off is no failure.
async fn check_crashed(fleet: &Fleet) -> Result<(), Failure> {
    let vms = fleet.state.borrow().vms.clone();
    for vm in vms.iter().filter(|vm| !vm.process.is_alive()) {
        let files = fleet.directory.vm(&vm.name);
        if let Health::Crashed(status) = vmm::health(vm, &files).await {
            let how = status.map_or("an unknown status".into(), process::describe);
            show_tail(&vm.name, &files);
            return Err(Failure::new(format!(
                "VM {:?}: {}: it ended with {how} soon after its start: {}",
                vm.name,
                vm.vmm,
                log::last_line(&files.log())
            )));
        }
    }
    Ok(())
}

/// Fails if a store has ended while VMs started.
fn check_stores(fleet: &Fleet) -> Result<(), Failure> {
    let state = fleet.state.borrow();
    match state.stores.iter().find(|store| !listens(&store.socket)) {
        None => Ok(()),
        Some(store) => Err(Failure::new(format!(
            "the store of domain {:?} ended soon after its start: {}",
            store.domain,
            log::last_line(&fleet.directory.store_log(&store.domain))
        ))),
    }
}

/// Brings a fleet that was started before to what the file says, as far as that touches no running VM.
async fn complete(at: &At, mut state: State, locked: Locked) -> Result<(), Failure> {
    let (plan, mut needs) = at.plan(&state)?;
    let changes = Changes::between(&plan, &state, &locked).await?;
    let mut failures = Vec::new();
    // Whatever keeps VMs from starting, those that run write on.
    if changes.logs == Some(Fault::Gone) {
        failures.extend(log_keeper::start(&locked, &mut state).err());
    }
    needs.extend(changes.told(|command| at.command(command)));
    // What the file does not have any more is not missed.
    let is_planned = |name: &String| plan.vms.iter().any(|vm| vm.name == *name);
    let given_up = state.missing.keys().any(|name| !is_planned(name));
    state.missing.retain(|name, _| is_planned(name));
    let work = changes.work();
    if changes.is_none() {
        if !state.complete || given_up {
            locked.write(&State {
                complete: true,
                ..state
            })?;
        }
        if work.is_empty() && needs.is_empty() {
            say!("fleet {}: nothing to do", plan.name);
        }
        work.iter().chain(&needs).for_each(|line| say!("{line}"));
        return outcome(&plan.name, &failures, work.len(), needs.len());
    }
    let tools = check_starts(&plan, &changes, &state, &locked)?;
    let starting = |name: &str| changes.starts.iter().any(|(vm, _)| vm.name == name);
    let places: Vec<usize> = (0..plan.vms.len())
        .filter(|at| starting(&plan.vms[*at].name))
        .collect();
    let stores: Vec<String> = changes.stores.iter().map(|store| store.domain.clone()).collect();
    let live: Vec<(usize, _)> = changes
        .live
        .iter()
        .map(|live| (place(&plan.vms, live), live.settings))
        .collect();
    let begun = Instant::now();
    let fleet = Rc::new(Fleet {
        state: RefCell::new(state),
        directory: locked,
        plan,
        tools,
    });
    work.iter().for_each(|line| say!("{line}"));
    let before = fleet.state.borrow().complete;
    fleet.record(|state| {
        state.complete = false;
        for vm in places.iter().map(|place| &fleet.plan.vms[*place]) {
            if !state.vms.iter().any(|old| old.name == vm.name) {
                state.miss(vm, NOT_STARTED);
            }
        }
    })?;
    let domains = stores;
    let stores = fleet.plan.stores.iter();
    let stores = stores.filter(|store| domains.contains(&store.domain));
    let started = match fleet.start_stores(&stores.collect::<Vec<_>>()).await {
        Ok(()) => start_some(&fleet, &places).await,
        Err(failure) => Err(failure),
    };
    match started {
        Ok(of_vms) => failures.extend(of_vms),
        Err(failure) => {
            // This command is not at work any more.
            fleet.record(|state| state.complete = before)?;
            return Err(failure);
        }
    }
    for (place, settings) in live {
        failures.extend(take_over(&fleet, &fleet.plan.vms[place], settings).err());
    }
    fleet.record(|state| state.complete = true)?;
    needs.iter().for_each(|line| say!("{line}"));
    if failures.is_empty() && needs.is_empty() {
        say_running(&fleet, begun);
    }
    outcome(&fleet.plan.name, &failures, work.len(), needs.len())
}

/// How `up` of a fleet that is up ends: with what could not be done of so much work, else with so many lines that are left.
fn outcome(fleet: &str, failures: &[Failure], work: usize, needs: usize) -> Result<(), Failure> {
    if failures.is_empty() {
        return left(fleet, needs);
    }
    failures.iter().for_each(|failure| note!("vmm-dedup: {failure}"));
    Err(Failure::in_part(format!(
        "fleet {fleet}: not done: {} of {work}",
        failures.len()
    )))
}

fn place(vms: &[VmPlan], live: &Live<'_>) -> usize {
    vms.iter().position(|vm| vm.name == live.vm.name).unwrap_or(0)
}

/// Why a VM is missing whose start did not come to an end.
pub(crate) const NOT_STARTED: &str = "it is being started, or its start was interrupted";

/// Starts VMs of a fleet that is up. Those that cannot start are ended again, and told of; the others stay.
pub(crate) async fn start_some(fleet: &Rc<Fleet>, places: &[usize]) -> Result<Vec<Failure>, Failure> {
    let names: Vec<String> = places
        .iter()
        .map(|place| fleet.plan.vms[*place].name.clone())
        .collect();
    for name in &names {
        fleet.end_wanted(name, Duration::ZERO, NOT_STARTED).await?;
    }
    let mut signals = Signals::watch()?;
    let mut starts = Starts::new();
    fleet.start_vms(places, &mut starts);
    let (mut running, mut failures) = (Vec::new(), Vec::new());
    let interrupted = loop {
        let started = tokio::select! {
            started = starts.join_next() => started,
            signal = signals.next() => break Some(Failure::interrupted(signal)),
        };
        match started {
            None => break None,
            Some(started) => match started.map_err(Failure::from_error)? {
                Ok(line) => {
                    running.push(line.split(' ').next().unwrap_or_default().to_owned());
                    note!("[{}/{}] {line}", running.len(), names.len());
                }
                Err((name, failure)) => {
                    let why = failure.to_string();
                    let why = why.strip_prefix(&format!("VM {name:?}: ")).unwrap_or(&why);
                    fleet.end_wanted(&name, Duration::ZERO, why).await?;
                    failures.push(failure);
                }
            },
        }
    };
    if let Some(failure) = interrupted {
        note!("stopping what was being started");
        starts.shutdown().await;
        for name in names.iter().filter(|name| !running.contains(name)) {
            fleet.end_wanted(name, Duration::ZERO, NOT_STARTED).await?;
        }
        return Err(failure);
    }
    Ok(failures)
}

/// Gives a running service settings of the file.
fn take_over(
    fleet: &Fleet,
    vm: &VmPlan,
    settings: vmm_dedup_protocol::control::Settings,
) -> Result<(), Failure> {
    let fail = |why: Failure| Failure::new(format!("VM {:?}: its settings stay as they are: {why}", vm.name));
    let found = fleet
        .state
        .borrow()
        .vms
        .iter()
        .find(|old| old.name == vm.name)
        .cloned();
    let (Some(running), Some(store)) = (found, fleet.plan.store_of(vm)) else {
        return Ok(());
    };
    let (_, connected) = account::of_store(&store.socket).map_err(fail)?;
    let service = connected
        .iter()
        .find(|other| running.process.is_called(other.pid));
    let service = service.ok_or_else(|| fail(Failure::new("it is not connected to its store")))?;
    if account::is_frozen(service) {
        return Err(fail(Failure::new("its process is stopped")));
    }
    let set =
        Observer::connect(&store.socket).and_then(|mut observer| observer.set(&address(service), settings));
    set.map_err(|error| fail(silence::failure(&store.socket, None, error)))?;
    if let Some(dedup) = &vm.dedup {
        // For who reads it; the service has taken over what is live.
        dedup_file::write(dedup, &fleet.directory.vm(&vm.name).dedup())?;
    }
    fleet.record(|state| {
        let noted = state.vms.iter_mut().find(|old| old.name == vm.name);
        if let Some(noted) = noted {
            take_over_spec(&mut noted.spec, &spec(vm));
        }
    })?;
    note!("{} has its new settings", vm.name);
    Ok(())
}

/// Of the settings that a VM was started with, those that it has taken over since.
fn take_over_spec(old: &mut serde_json::Value, new: &serde_json::Value) {
    for key in ["cpu_percent", "enabled", "pass_period_ms", "stop_target_us"] {
        old["dedup"][key] = new["dedup"][key].clone();
    }
    if new["dedup"]["breaks"]["mode"] == old["dedup"]["breaks"]["mode"] {
        let reserve = new["dedup"]["breaks"]["reserve_pages"].clone();
        if !reserve.is_null() {
            old["dedup"]["breaks"]["reserve_pages"] = reserve;
        }
    }
}
