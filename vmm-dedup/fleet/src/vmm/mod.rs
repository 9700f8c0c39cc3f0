//! A VMM's process, whichever VMM it is: started, asked, ended.

mod cloud_hypervisor;
mod condition;
mod http;
mod qemu;
mod reference;

use crate::dedup_file;
use crate::file::Vmm;
use crate::log;
use crate::plan::{Plan, VmPlan};
use crate::process::{self, Life, Process};
use crate::program::Tools;
use crate::rights;
use crate::spec::spec;
use crate::state::{Locked, VmFiles, VmState};
pub(crate) use condition::Condition;
pub(crate) use http::call as http;
pub(crate) use qemu::command as qmp;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use vmm_dedup::AgentSocket;
use vmm_dedup_host::Failure;

/// How long a VMM may take to answer a question.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long it may take to end, for each way of asking.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How a VM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Alive(Condition),
    /// The process lives and does not answer.
    Silent(String),
    /// The process was stopped by a signal: its guest stands still.
    Frozen,
    /// In order: the guest powered off, or somebody told the VMM to end.
    Ended,
    Crashed(Option<ExitStatus>),
}

/// Starts a VM's VMM in its directory, once `record` has noted it down.
pub(crate) fn start(
    plan: &Plan,
    vm: &VmPlan,
    tools: &Tools,
    directory: &Locked,
    record: impl FnOnce(VmState) -> Result<(), Failure>,
) -> Result<Child, Failure> {
    let files = directory.make_vm(&vm.name)?;
    let fail = |e: std::io::Error| Failure::new(format!("VM {:?}: cannot start {}: {e}", vm.name, vm.vmm));
    let identity = rights::identity(vm).map_err(|e| Failure::new(format!("VM {:?}: {e}", vm.name)))?;
    let log = log::begin(&files.log()).map_err(fail)?;
    let output = match vm.vmm {
        // Its guest's serial port.
        Vmm::CloudHypervisor => log::begin(&files.serial()).map_err(fail)?,
        Vmm::Qemu | Vmm::Reference => log.try_clone().map_err(fail)?,
    };
    let mut command = Command::new(tools.program(vm.vmm));
    command
        .current_dir(&plan.folder)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(log);
    // Left over from the user's environment they would make a library merge although dedup is off.
    for variable in ["", "_STORE", "_NAME", "_CONFIG", "_AGENT"] {
        command.env_remove(format!("VMM_DEDUP{variable}"));
    }
    let store = plan.store_of(vm);
    if let Some(dedup) = &vm.dedup {
        dedup_file::write(dedup, &files.dedup())?;
    }
    match vm.vmm {
        Vmm::CloudHypervisor => cloud_hypervisor::arguments(vm, &files, &mut command),
        Vmm::Qemu => qemu::arguments(vm, &files, &mut command),
        Vmm::Reference => reference::arguments(vm, store, &files, &mut command),
    }
    if let (Some(store), Some(library)) = (store, tools.library_for(vm.vmm)) {
        let mut preload = library.as_os_str().to_owned();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        command
            .env("LD_PRELOAD", preload)
            .env("VMM_DEDUP_STORE", &store.socket)
            .env("VMM_DEDUP_NAME", &vm.name)
            .env("VMM_DEDUP_CONFIG", files.dedup());
        if let Some(agent) = &vm.agent {
            command.env("VMM_DEDUP_AGENT", agent.to_string());
        }
    }
    if let Some(identity) = identity {
        directory.give_vm(&files, &identity).map_err(fail)?;
        rights::environment(&mut command, &identity);
        #[allow(unsafe_code)] // std changes the user, and leaves groups and capabilities
        // SAFETY: the closure runs between fork and exec; it makes system calls only, and neither allocates nor locks.
        unsafe {
            command.pre_exec(move || identity.assume());
        }
    }
    let record = |process| {
        record(VmState {
            name: vm.name.clone(),
            vmm: vm.vmm,
            process,
            store: store.map(|store| store.domain.clone()),
            files: sockets(vm).collect(),
            entry: vm.entry.clone(),
            spec: spec(vm),
            starting: true,
        })
    };
    process::spawn(command, record, fail)
}

/// Sockets that may be left when a VM has ended.
fn sockets(vm: &VmPlan) -> impl Iterator<Item = PathBuf> {
    let agents = vm.agent.as_ref().and_then(AgentSocket::service_socket);
    vm.vsock().map(Into::into).into_iter().chain(agents)
}

/// Waits until a VM that was just started runs.
pub(crate) async fn boot(
    vm: &VmPlan,
    files: &VmFiles,
    child: &mut Child,
    limit: Duration,
) -> Result<(), Failure> {
    let fail = |e: String| Failure::new(format!("VM {:?}: {}: {e}", vm.name, vm.vmm));
    let booted = async {
        match vm.vmm {
            Vmm::CloudHypervisor => cloud_hypervisor::boot(vm, files).await,
            Vmm::Qemu => qemu::boot(files).await,
            Vmm::Reference => reference::boot(files).await,
        }
    };
    let result = tokio::select! {
        result = booted => result,
        status = ended(child) => Err(describe_end(status, files)),
        () = tokio::time::sleep(limit) => {
            Err(format!("not running after {} s: {}", limit.as_secs(), log::last_line(&files.log())))
        }
    };
    match result {
        Ok(()) => Ok(()),
        // A VMM that ends breaks its API's connection first: the end says more.
        Err(_) if let Some(status) = ended_soon(child).await => Err(fail(describe_end(status, files))),
        Err(e) => Err(fail(e)),
    }
}

fn describe_end(status: ExitStatus, files: &VmFiles) -> String {
    format!(
        "it ended with {}: {}",
        process::describe(status),
        log::last_line(&files.log())
    )
}

async fn ended(child: &mut Child) -> ExitStatus {
    loop {
        // An error means that it was waited for already, which nobody else does.
        if let Ok(Some(status)) = child.try_wait() {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn ended_soon(child: &mut Child) -> Option<ExitStatus> {
    tokio::time::timeout(Duration::from_millis(200), ended(child))
        .await
        .ok()
}

/// How a VM is.
pub(crate) async fn health(vm: &VmState, files: &VmFiles) -> Health {
    let life = vm.process.life();
    if let Life::Ended(status) = life {
        // Each VMM removes its file when it ends in order, and only then.
        let left = match vm.vmm {
            Vmm::CloudHypervisor => files.socket(),
            Vmm::Qemu | Vmm::Reference => files.pid(),
        };
        return match left.exists() {
            true => Health::Crashed(status),
            false => Health::Ended,
        };
    }
    if life == Life::Stopped {
        return Health::Frozen;
    }
    let asked = async {
        match vm.vmm {
            Vmm::CloudHypervisor => cloud_hypervisor::condition(files).await,
            Vmm::Qemu => qemu::condition(files).await,
            Vmm::Reference => Ok(Condition::Running),
        }
    };
    match tokio::time::timeout(ANSWER_LIMIT, asked).await {
        Ok(Ok(condition)) => Health::Alive(condition),
        Ok(Err(e)) => Health::Silent(e),
        Err(_) => Health::Silent(format!("no answer within {} s", ANSWER_LIMIT.as_secs())),
    }
}

/// Ends a VM: by its power button if the guest is given time, by its API, by SIGTERM, by SIGKILL.
pub(crate) async fn end(vm: &VmState, files: &VmFiles, grace: Duration) -> Result<(), Failure> {
    let fail = |e: std::io::Error| {
        Failure::new(format!(
            "VM {:?} (process {}) cannot be ended: {e}",
            vm.name, vm.process.pid
        ))
    };
    if !grace.is_zero() {
        let pressed = async {
            match vm.vmm {
                Vmm::CloudHypervisor => cloud_hypervisor::power_button(files).await.is_ok(),
                Vmm::Qemu => qemu::power_button(files).await.is_ok(),
                Vmm::Reference => false,
            }
        };
        if ends_after(&vm.process, pressed, grace).await {
            return Ok(());
        }
    }
    let told = async {
        match vm.vmm {
            Vmm::CloudHypervisor => cloud_hypervisor::quit(files).await.is_ok(),
            Vmm::Qemu => qemu::quit(files).await.is_ok(),
            Vmm::Reference => false,
        }
    };
    if ends_after(&vm.process, told, END_LIMIT).await {
        return Ok(());
    }
    vm.process.end(END_LIMIT).await.map_err(fail)
}

/// Asks a process to end, and waits if it took the request.
async fn ends_after(process: &Process, request: impl Future<Output = bool>, limit: Duration) -> bool {
    if process.life() != Life::Running {
        return !process.is_alive();
    }
    match tokio::time::timeout(ANSWER_LIMIT, request).await {
        Ok(true) => process.ends_within(limit).await,
        _ => false,
    }
}
