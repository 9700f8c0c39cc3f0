//! Everything that can be known to fail is looked at before anything starts.

use crate::plan::{Plan, StorePlan, VmPlan};
use crate::program::Tools;
use crate::rights;
use crate::state::{Directory, State};
use crate::stores::{Accounts, Unheard};
use std::fs::{File, OpenOptions};
use std::net::TcpListener;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmm_dedup_host::store::listens;
use vmm_dedup_host::{Failure, account, kvm};

/// How long a store may take to notice that a VM has ended, whose name is to be used again.
const NOTICED: Duration = Duration::from_secs(1);
/// Longest path of a Unix socket: sockaddr_un holds 108 bytes with the terminating zero.
const SOCKET_PATH: usize = 107;

/// Finds the programs; fails with the first thing that would keep these VMs and stores of a plan from starting. `leftovers`:
/// files of VMs that have ended, which go before.
pub(crate) fn starts(
    plan: &Plan,
    vms: &[&VmPlan],
    stores: &[&StorePlan],
    directory: &Directory,
    leftovers: &[PathBuf],
) -> Result<Tools, Failure> {
    kvm::need()?;
    let tools = Tools::find(plan)?;
    directory.check_room(vms.len(), stores.len())?;
    files(vms, directory, leftovers)?;
    for vm in vms {
        let checked = rights::check(plan, vm, &tools, directory.path());
        checked.map_err(|e| Failure::new(format!("VM {:?}: {e}", vm.name)))?;
    }
    for store in stores {
        check_store(store)?;
    }
    for store in &plan.stores {
        check_names(store, vms)?;
        if listens(&store.socket) {
            rights::check_join(store, vms).map_err(|e| fail(store, &e))?;
        }
    }
    Ok(tools)
}

/// What these VMs are started from is there, and what they will make is not.
pub(crate) fn files(vms: &[&VmPlan], directory: &Directory, leftovers: &[PathBuf]) -> Result<(), Failure> {
    vms.iter().try_for_each(|vm| {
        let checked = rights::identity(vm)
            .and_then(|user| rights::act(user.as_ref(), || check_inputs(vm)))
            .and_then(|()| check_vm(vm, directory, leftovers));
        checked.map_err(|e| Failure::new(format!("VM {:?}: {e}", vm.name)))
    })
}

/// What a VM is started from is there, and may be opened.
fn check_inputs(vm: &VmPlan) -> Result<(), String> {
    readable("kernel", &vm.kernel)?;
    if let Some(initramfs) = &vm.initramfs {
        readable("initramfs", initramfs)?;
    }
    for (disk, readonly) in vm.disks() {
        let opened = OpenOptions::new().read(true).write(!readonly).open(disk);
        opened.map_err(|e| format!("cannot open the disk {}: {e}", disk.display()))?;
    }
    Ok(())
}

fn check_vm(vm: &VmPlan, directory: &Directory, leftovers: &[PathBuf]) -> Result<(), String> {
    if let Some(socket) = vm.vsock() {
        socket_path(socket)?;
        if socket.exists() && !leftovers.iter().any(|left| left == socket) {
            return Err(format!(
                "the vsock socket {} exists: remove it, or choose another",
                socket.display()
            ));
        }
    }
    let socket = directory.vm(&vm.name).socket();
    // Cloud Hypervisor splits its arguments at commas.
    if socket.as_os_str().as_encoded_bytes().contains(&b',') {
        return Err(format!(
            "there is a comma in {}: choose another --runtime-dir",
            socket.display()
        ));
    }
    socket_path(&socket).map_err(|e| format!("{e}, e.g. with --runtime-dir"))
}

fn readable(what: &str, path: &Path) -> Result<(), String> {
    let file = File::open(path).map_err(|e| format!("cannot open the {what} {}: {e}", path.display()))?;
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(()),
        _ => Err(format!("the {what} {} is not a file", path.display())),
    }
}

fn socket_path(path: &Path) -> Result<(), String> {
    match path.as_os_str().len() {
        ..=SOCKET_PATH => Ok(()),
        len => Err(format!(
            "the socket path {} has {len} bytes, {SOCKET_PATH} are possible: choose a shorter one",
            path.display()
        )),
    }
}

fn fail(store: &StorePlan, text: &str) -> Failure {
    Failure::new(format!("the store of domain {:?}: {text}", store.domain))
}

/// The names of these VMs are free in a store that runs, or soon are: of VMs that have just ended.
fn check_names(store: &StorePlan, vms: &[&VmPlan]) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let Some(name) = taken_name(store, vms) else {
            return Ok(());
        };
        if begun.elapsed() > NOTICED {
            let text = format!("a VM {name:?} is connected to it already: choose another name");
            return Err(fail(store, &text));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A name of these VMs that one has which is connected to the store.
fn taken_name<'a>(store: &StorePlan, vms: &[&'a VmPlan]) -> Option<&'a str> {
    let (_, connected) = account::of_store(&store.socket).ok()?;
    let merge_there = vms
        .iter()
        .filter(|vm| vm.dedup.is_some() && vm.domain == store.domain);
    let mut names = merge_there.map(|vm| vm.name.as_str());
    names.find(|name| connected.iter().any(|other| other.name == *name))
}

/// The stores that these VMs need are there. `up`: the command that starts one.
pub(crate) fn stores_answer(plan: &Plan, state: &State, vms: &[&VmPlan], up: &str) -> Result<(), Failure> {
    let is_needed = |store: &&StorePlan| {
        vms.iter()
            .any(|vm| vm.dedup.is_some() && vm.domain == store.domain)
    };
    let needed: Vec<&StorePlan> = plan.stores.iter().filter(is_needed).collect();
    let accounts = Accounts::of(state.asked(needed.iter().copied()));
    needed
        .iter()
        .try_for_each(|store| match accounts.of_domain(&store.domain) {
            Some(Ok(_)) => Ok(()),
            Some(Err(Unheard::Silent(why))) => Err(Failure::new(format!("domain {:?}: {why}", store.domain))),
            _ => Err(fail(store, &format!("it does not run: `{up}` starts it"))),
        })
}

/// Either a store of this release runs there, or one can be started.
fn check_store(store: &StorePlan) -> Result<(), Failure> {
    let fail = |e: String| fail(store, &e);
    socket_path(&store.socket).map_err(fail)?;
    if listens(&store.socket) {
        let answers = account::of_store(&store.socket).map(drop);
        return answers.map_err(|e| fail(format!("{e}; end it, or choose another socket")));
    }
    let folder = store.socket.parent().unwrap_or(Path::new("/"));
    // The folder of all fleets is made when it is missing.
    if !folder.is_dir() && !vmm_dedup_host::runtime::folder().is_ok_and(|run| run == folder) {
        return Err(fail(format!(
            "the directory {} does not exist: create it",
            folder.display()
        )));
    }
    if store
        .socket
        .metadata()
        .is_ok_and(|file| !file.file_type().is_socket())
    {
        return Err(fail(format!(
            "{} exists and is not a socket: choose another",
            store.socket.display()
        )));
    }
    if let Some(address) = store.metrics {
        TcpListener::bind(address).map_err(|e| {
            fail(format!(
                "cannot serve metrics on {address} ({e}): choose another address, or \"none\""
            ))
        })?;
    }
    Ok(())
}
