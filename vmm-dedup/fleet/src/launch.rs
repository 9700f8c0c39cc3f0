//! Starting stores and VMs of a fleet, each noted down before it runs.

use crate::plan::{Plan, StorePlan, VmPlan};
use crate::program::Tools;
use crate::state::{self, Locked, State, StoreState, VmFiles};
use crate::{log, rights, stores, vmm};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use vmm_dedup_host::store::listens;
use vmm_dedup_host::units::natural_order;
use vmm_dedup_host::{Failure, note};

/// Lines of a failed VM's log that are shown.
const TAIL: usize = 10;

/// A fleet that is being changed.
pub(crate) struct Fleet {
    pub(crate) plan: Plan,
    pub(crate) tools: Tools,
    pub(crate) directory: Locked,
    /// What was started until now, as in the file.
    pub(crate) state: RefCell<State>,
}

/// VMs that are being started, by their place in the plan; each ends with what to tell, or with the VM's name and why not.
pub(crate) type Starts = JoinSet<Result<String, (String, Failure)>>;

impl Fleet {
    /// Changes the state, and writes it down.
    pub(crate) fn record(&self, change: impl FnOnce(&mut State)) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        change(&mut state);
        self.directory.write(&state)
    }

    /// Starts stores that do not run yet. One of the fleet's own that nobody can reach any more, as its socket has gone, is ended
    /// before: two would be one too many, and only the new one is noted down.
    pub(crate) async fn start_stores(&self, stores: &[&StorePlan]) -> Result<(), Failure> {
        for store in stores {
            if let Ok(folder) = vmm_dedup_host::runtime::folder()
                && store.socket.starts_with(&folder)
            {
                state::make(&folder, 0o755)?;
            }
            let old = (self.state.borrow().stores.iter())
                .find(|old| old.domain == store.domain)
                .cloned();
            if let Some(old) = old.filter(|old| !listens(&old.socket)) {
                stores::stop(&old).await?;
            }
            let started = |started: StoreState| {
                self.record(|state| {
                    state.stores.retain(|other| other.domain != started.domain);
                    state.stores.push(started);
                })
            };
            let users = rights::members(&self.plan, store)?;
            stores::ensure(store, &users, &self.directory, started).await?;
            note!(
                "store of domain {:?} listens on {}",
                store.domain,
                store.socket.display()
            );
        }
        Ok(())
    }

    /// Begins to start VMs, by their places in the plan, some at a time.
    pub(crate) fn start_vms(self: &Rc<Self>, places: &[usize], starts: &mut Starts) {
        let parallel = Rc::new(Semaphore::new(self.plan.parallel));
        for place in places.iter().copied() {
            let (fleet, parallel) = (self.clone(), parallel.clone());
            starts.spawn_local(async move {
                let _place = parallel.acquire().await;
                let vm = &fleet.plan.vms[place];
                fleet
                    .start_vm(vm)
                    .await
                    .map_err(|failure| (vm.name.clone(), failure))
            });
        }
    }

    /// Starts one VM and waits until it runs; returns what to tell.
    pub(crate) async fn start_vm(&self, vm: &VmPlan) -> Result<String, Failure> {
        let mut child = vmm::start(&self.plan, vm, &self.tools, &self.directory, |started| {
            self.record(|state| {
                state.vms.retain(|other| other.name != started.name);
                state.missing.remove(&started.name);
                state.vms.push(started);
                state.vms.sort_by(|a, b| natural_order(&a.name, &b.name));
            })
        })?;
        let pid = child.id();
        let files = self.directory.vm(&vm.name);
        match vmm::boot(vm, &files, &mut child, self.plan.start_limit).await {
            Ok(()) => {
                self.record(|state| {
                    let started = state.vms.iter_mut().find(|started| started.name == vm.name);
                    started.into_iter().for_each(|started| started.starting = false);
                })?;
                Ok(format!("{} runs ({}, process {pid})", vm.name, vm.vmm))
            }
            Err(failure) => {
                show_tail(&vm.name, &files);
                Err(failure)
            }
        }
    }

    /// Ends a VM that is not wanted any more, whatever it does, and removes its files and its note.
    pub(crate) async fn end_vm(&self, name: &str, grace: Duration) -> Result<(), Failure> {
        self.end_process(name, grace).await?;
        self.record(|state| {
            state.vms.retain(|other| other.name != name);
            state.missing.remove(name);
        })
    }

    /// Ends a VM that ought to run, if it has a process, and removes its files; that it is missing, and why, is noted down.
    /// Whether there was anything to end.
    pub(crate) async fn end_wanted(&self, name: &str, grace: Duration, why: &str) -> Result<bool, Failure> {
        let lived = self.end_process(name, grace).await?;
        let planned = self.plan.vms.iter().find(|vm| vm.name == name);
        self.record(|state| {
            state.vms.retain(|other| other.name != name);
            planned.into_iter().for_each(|vm| state.miss(vm, why));
        })?;
        Ok(lived)
    }

    async fn end_process(&self, name: &str, grace: Duration) -> Result<bool, Failure> {
        let found = self.state.borrow().vms.iter().find(|vm| vm.name == name).cloned();
        let Some(vm) = found else { return Ok(false) };
        let lives = vm.process.is_alive();
        vmm::end(&vm, &self.directory.vm(name), grace).await?;
        self.directory.remove_vm(&vm)?;
        Ok(lives)
    }
}

/// Shows the end of a log now, since it goes with all the rest.
pub(crate) fn show_tail(name: &str, files: &VmFiles) {
    for line in log::tail(&files.log(), TAIL) {
        note!("{name}: {line}");
    }
}

/// Signals that end this command, in order.
pub(crate) struct Signals([Signal; 3]);

impl Signals {
    const KINDS: [fn() -> SignalKind; 3] = [SignalKind::interrupt, SignalKind::terminate, SignalKind::hangup];

    pub(crate) fn watch() -> Result<Self, Failure> {
        let [interrupt, terminate, hangup] =
            Self::KINDS.map(|kind| signal(kind()).map_err(Failure::from_error));
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// The number of the next one.
    pub(crate) async fn next(&mut self) -> i32 {
        let [interrupt, terminate, hangup] = &mut self.0;
        let which = tokio::select! {
            _ = interrupt.recv() => 0,
            _ = terminate.recv() => 1,
            _ = hangup.recv() => 2,
        };
        Self::KINDS[which]().as_raw_value()
    }
}
