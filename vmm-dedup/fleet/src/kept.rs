//! What a fleet that is up keeps of what it was started with, although its file says otherwise since.

use crate::plan::Plan;
use crate::state::State;
use vmm_dedup_host::Failure;

/// Lets a plan of a fleet that is up keep the fleet's name, by which its directory is called, and the sockets of its stores,
/// which running VMs connect to. Returns a line for each change of the file that waits for another start. `again`: the commands
/// of that.
///
/// # Errors
/// A [`Failure`] if a domain of the file would get the socket that another one keeps.
pub(crate) fn keep(plan: &mut Plan, state: &State, again: &str) -> Result<Vec<String>, Failure> {
    let mut told = Vec::new();
    if !state.fleet.is_empty() && state.fleet != plan.name {
        told.push(format!(
            "! name changed to {}: this fleet stays {} until it is down: {again}",
            plan.name, state.fleet
        ));
        plan.name.clone_from(&state.fleet);
    }
    for store in &mut plan.stores {
        let started = state.stores.iter().find(|other| other.domain == store.domain);
        let Some(started) = started.filter(|started| started.socket != store.socket) else {
            continue;
        };
        told.push(format!(
            "! store of domain {:?}: socket changed to {}: it stays {} until the fleet is down: {again}",
            store.domain,
            store.socket.display(),
            started.socket.display()
        ));
        store.socket.clone_from(&started.socket);
    }
    for (n, store) in plan.stores.iter().enumerate() {
        let other = plan.stores[..n].iter().find(|other| other.socket == store.socket);
        if let Some(other) = other {
            return Err(Failure::new(format!(
                "domains {:?} and {:?} would share the socket {}, which one of them keeps until the fleet is down: {again}",
                other.domain,
                store.domain,
                store.socket.display()
            )));
        }
    }
    Ok(told)
}
