//! VMs that run as a user of their own: who that is, and whether it may use what its VM is made of.

use crate::plan::{Plan, StorePlan, VmPlan};
use crate::program::Tools;
use rustix::fs::{Access, access};
use std::fs::File;
use std::path::Path;
use vmm_dedup_host::users::Identity;
use vmm_dedup_host::{Failure, kvm, userfaultfd};
use vmm_dedup_protocol::observer::Observer;

/// Who a VM's VMM is to run as; `None`: as who starts it.
///
/// # Errors
/// What is wrong with the user, and what to do.
pub(crate) fn identity(vm: &VmPlan) -> Result<Option<Identity>, String> {
    let Some(user) = &vm.user else { return Ok(None) };
    let identity = Identity::of(user, &vm.groups)?;
    let own = rustix::process::geteuid();
    if identity.uid == 0 {
        return Err("user is root: leave it out for a VMM with all rights, or name another user".into());
    }
    if !own.is_root() && own.as_raw() != identity.uid {
        return Err(format!(
            "only root starts VMs as other users: run this as root, or leave user = {user:?} out"
        ));
    }
    Ok(Some(identity))
}

/// The users, by number, whose VMs are to join a store and would not be let in as who starts it.
///
/// # Errors
/// What is wrong with a user, and what to do.
pub(crate) fn members(plan: &Plan, store: &StorePlan) -> Result<Vec<u32>, Failure> {
    let own = rustix::process::geteuid().as_raw();
    let mut members = Vec::new();
    for vm in plan.vms.iter().filter(|vm| merges_in(vm, store)) {
        let identity = identity(vm).map_err(|e| Failure::new(format!("VM {:?}: {e}", vm.name)))?;
        members.extend(identity.map(|identity| identity.uid).filter(|uid| *uid != own));
    }
    members.sort_unstable();
    members.dedup();
    Ok(members)
}

fn merges_in(vm: &VmPlan, store: &StorePlan) -> bool {
    vm.dedup.is_some() && vm.domain == store.domain
}

/// Does something with the rights of a VM's user, if it has one.
pub(crate) fn act<T: Send>(
    identity: Option<&Identity>,
    act: impl FnOnce() -> Result<T, String> + Send,
) -> Result<T, String> {
    let Some(identity) = identity else { return act() };
    let user = &identity.name;
    let acted = identity.act(act);
    acted
        .map_err(|e| format!("its processes cannot have the rights of user {user}: {e}"))?
        .map_err(|e| format!("as user {user}: {e}"))
}

/// Fails with the first thing that a VM's user needs and may not use, but for what its VM is started from. `folder`: the fleet's.
pub(crate) fn check(plan: &Plan, vm: &VmPlan, tools: &Tools, folder: &Path) -> Result<(), String> {
    let identity = identity(vm)?;
    let Some(user) = &identity else { return Ok(()) };
    let store = plan.store_of(vm);
    act(Some(user), || {
        kvm::open().map_err(|e| {
            format!("cannot open /dev/kvm ({e}): name its group in `groups`, e.g. groups = [\"kvm\"], and give that group access by the udev rule of the package")
        })?;
        if store.is_some() {
            userfaultfd::usable().map_err(|e| {
                format!("cannot open /dev/userfaultfd ({e}): give the group of /dev/kvm read access by the udev rule of the package")
            })?;
        }
        can_execute(tools.program(vm.vmm))?;
        if let Some(library) = tools.library_for(vm.vmm).filter(|_| store.is_some()) {
            // The loader goes on without a library that it cannot read.
            let opened = File::open(library);
            opened.map_err(|e| format!("cannot read the library {}: {e}", library.display()))?;
        }
        can_enter(there(folder))?;
        if let Some(socket) = vm.vsock() {
            let parent = socket.parent().unwrap_or(Path::new("/"));
            access(parent, Access::WRITE_OK | Access::EXEC_OK).map_err(|e| {
                format!(
                    "cannot make the vsock socket in {} ({e}): have it in a folder of this user's",
                    parent.display()
                )
            })?;
        }
        Ok(())
    })
}

/// Fails if a store that runs lets the user of one of these VMs not in.
pub(crate) fn check_join(store: &StorePlan, vms: &[&VmPlan]) -> Result<(), String> {
    let mut asked = Vec::new();
    for vm in vms.iter().filter(|vm| merges_in(vm, store)) {
        let Some(user) = identity(vm)?.filter(|user| !asked.contains(&user.uid)) else {
            continue;
        };
        let joined = act(Some(&user), || {
            Observer::connect(&store.socket)
                .map(drop)
                .map_err(|e| e.to_string())
        });
        joined.map_err(|e| {
            format!("{e}: let this user in by its --join-user, --socket-mode and --socket-group; if this fleet started it, end the store, and `up` starts it anew for the users that VMs have now")
        })?;
        asked.push(user.uid);
    }
    Ok(())
}

fn can_execute(program: &Path) -> Result<(), String> {
    let may = access(program, Access::EXEC_OK | Access::READ_OK);
    may.map_err(|e| format!("cannot execute {}: {e}", program.display()))
}

fn can_enter(folder: &Path) -> Result<(), String> {
    let may = access(folder, Access::EXEC_OK);
    may.map_err(|e| {
        format!(
            "cannot enter {} ({e}): choose a --runtime-dir that others can reach",
            folder.display()
        )
    })
}

/// The nearest folder that is there already and is not the fleet's own, which is made so that its users can enter.
fn there(folder: &Path) -> &Path {
    let mut above = folder.ancestors().skip(1);
    above.find(|folder| folder.exists()).unwrap_or(Path::new("/"))
}

/// What the environment of a user's processes has in place of that of who starts them.
pub(crate) fn environment(command: &mut std::process::Command, identity: &Identity) {
    command
        .env_remove("XDG_RUNTIME_DIR")
        .env("USER", &identity.name)
        .env("LOGNAME", &identity.name);
    command.env("HOME", identity.home.as_deref().unwrap_or("/"));
}
