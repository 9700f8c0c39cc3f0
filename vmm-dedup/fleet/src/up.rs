//! `fleet up`: all of it, or nothing.

use crate::at::At;
use crate::check;
use crate::plan::{Plan, VmPlan};
use crate::program::Tools;
use crate::state::{self, Locked, State, StoreState, VmFiles};
use crate::vmm::{self, Health};
use crate::{down, log, process, runtime, stores};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use vmm_dedup_host::Failure;
use vmm_dedup_host::store::listens;

/// Lines of a failed VM's log that are shown.
const TAIL: usize = 10;

/// Starts the stores that do not run yet, and all VMs; if one cannot start, none is left running. For a fleet that is up:
/// starts stores that have gone again.
///
/// # Errors
/// A [`Failure`] that tells what kept it from starting.
pub fn up(at: &At) -> Result<(), Failure> {
    let plan = at.plan()?;
    if let Some(locked) = at.directory()?.lock()?
        && let Some(state) = locked.state()?
    {
        at.check(&state)?;
        return runtime::block_on(again(&plan, state, &locked));
    }
    let tools = check::all(&plan, &at.directory()?)?;
    let locked = at.directory()?.create()?;
    locked.check_empty()?;
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
        let mut starts = JoinSet::new();
        let result = tokio::select! {
            result = start(&fleet, &mut starts) => result,
            signal = signals.next() => Err(Failure::interrupted(signal)),
        };
        if let Err(failure) = result {
            eprintln!("stopping what was started");
            starts.shutdown().await;
            let state = fleet.state.borrow().clone();
            return Err(match down::stop(&fleet.directory, &state, Duration::ZERO).await {
                Ok(()) => failure,
                Err(second) => failure.and(&second),
            });
        }
        let (vms, seconds) = (fleet.plan.vms.len(), begun.elapsed().as_secs_f64());
        println!("fleet {}: {vms} VMs run, after {seconds:.1} s", fleet.plan.name);
        Ok(())
    })
}

struct Fleet {
    plan: Plan,
    tools: Tools,
    directory: Locked,
    /// What was started until now, as in the file.
    state: RefCell<State>,
}

impl Fleet {
    fn record(&self, change: impl FnOnce(&mut State)) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        change(&mut state);
        self.directory.write(&state)
    }
}

async fn start(fleet: &Rc<Fleet>, starts: &mut JoinSet<Result<String, Failure>>) -> Result<(), Failure> {
    fleet.record(|_| ())?;
    start_stores(&fleet.plan, &fleet.directory, |store| {
        fleet.record(|state| state.stores.push(store))
    })
    .await?;
    let places = Rc::new(Semaphore::new(fleet.plan.parallel));
    for index in 0..fleet.plan.vms.len() {
        let (fleet, places) = (fleet.clone(), places.clone());
        starts.spawn_local(async move {
            let _place = places.acquire().await;
            start_vm(&fleet, &fleet.plan.vms[index]).await
        });
    }
    let (mut running, all) = (0, fleet.plan.vms.len());
    while let Some(started) = starts.join_next().await {
        let line = started.map_err(Failure::from_error)??;
        running += 1;
        eprintln!("[{running}/{all}] {line}");
    }
    check_crashed(fleet).await?;
    check_stores(fleet)?;
    fleet.record(|state| state.complete = true)
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

/// Shows the end of a log now, since it goes with all the rest.
fn show_tail(name: &str, files: &VmFiles) {
    for line in log::tail(&files.log(), TAIL) {
        eprintln!("{name}: {line}");
    }
}

async fn start_stores(
    plan: &Plan,
    directory: &Locked,
    mut started: impl FnMut(StoreState) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for store in &plan.stores {
        if let Ok(folder) = state::run_folder()
            && store.socket.starts_with(&folder)
        {
            state::make(&folder, 0o755)?;
        }
        stores::ensure(store, directory, &mut started).await?;
        eprintln!(
            "store of domain {:?} listens on {}",
            store.domain,
            store.socket.display()
        );
    }
    Ok(())
}

/// Starts one VM and waits until it runs; returns what to tell.
async fn start_vm(fleet: &Fleet, vm: &VmPlan) -> Result<String, Failure> {
    let mut child = vmm::start(&fleet.plan, vm, &fleet.tools, &fleet.directory, |started| {
        fleet.record(|state| state.vms.push(started))
    })?;
    let pid = child.id();
    let files = fleet.directory.vm(&vm.name);
    match vmm::boot(vm, &files, &mut child, fleet.plan.start_limit).await {
        Ok(()) => Ok(format!("{} runs ({}, process {pid})", vm.name, vm.vmm)),
        Err(failure) => {
            show_tail(&vm.name, &files);
            Err(failure)
        }
    }
}

/// `up` of a fleet that is up: brings back the stores that have gone, and refuses if none has.
async fn again(plan: &Plan, mut state: State, directory: &Locked) -> Result<(), Failure> {
    let path = directory.path().display();
    if !state.complete || !state.vms.iter().any(|vm| vm.process.is_alive()) {
        let what = if state.complete {
            "has ended"
        } else {
            "was not started completely"
        };
        return Err(Failure::new(format!(
            "{path} is left over from a fleet that {what}: run `vmm-dedup fleet down` first"
        )));
    }
    let gone: Vec<_> = state
        .stores
        .iter()
        .filter(|store| !listens(&store.socket))
        .cloned()
        .collect();
    if gone.is_empty() {
        return Err(Failure::new(format!(
            "fleet {} is up already, in {path}: see `vmm-dedup fleet status`, or stop it with `vmm-dedup fleet down`",
            state.fleet
        )));
    }
    for store in gone {
        let planned = plan
            .stores
            .iter()
            .find(|s| s.domain == store.domain && s.socket == store.socket);
        let planned = planned.ok_or_else(|| {
            Failure::new(format!(
                "the store of domain {:?} on {} is gone, and the file has no such store any more",
                store.domain,
                store.socket.display()
            ))
        })?;
        stores::ensure(planned, directory, |started| {
            state.stores.retain(|s| s.domain != started.domain);
            state.stores.push(started);
            directory.write(&state)
        })
        .await?;
        println!(
            "the store of domain {:?} was gone and runs again; its VMs find it by themselves",
            planned.domain
        );
    }
    Ok(())
}

/// Signals that end this command, in order.
struct Signals([Signal; 3]);

impl Signals {
    const KINDS: [fn() -> SignalKind; 3] = [SignalKind::interrupt, SignalKind::terminate, SignalKind::hangup];

    fn watch() -> Result<Self, Failure> {
        let [interrupt, terminate, hangup] =
            Self::KINDS.map(|kind| signal(kind()).map_err(Failure::from_error));
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// The number of the next one.
    async fn next(&mut self) -> i32 {
        let [interrupt, terminate, hangup] = &mut self.0;
        let which = tokio::select! {
            _ = interrupt.recv() => 0,
            _ = terminate.recv() => 1,
            _ = hangup.recv() => 2,
        };
        Self::KINDS[which]().as_raw_value()
    }
}
