//! `fleet api`: a VMM's own interface, by the name of its VM.

use crate::at::At;
use crate::choice::none_called;
use crate::file::Vmm;
use crate::process::Life;
use crate::runtime;
use crate::vmm;
use std::time::Duration;
use vmm_dedup_host::{Failure, say};

/// Longer than any answer takes, but for a migration or a snapshot.
const ANSWER_LIMIT: Duration = Duration::from_secs(600);

/// Asks a VM's VMM something and prints the answer. Cloud Hypervisor: `words` are METHOD, CALL and, if it takes one, the body as
/// JSON; QEMU: a command of its monitor and, if it takes some, the arguments as JSON.
///
/// # Errors
/// A [`Failure`] with what the VMM says.
pub fn api(at: &At, name: &str, words: &[String]) -> Result<(), Failure> {
    let directory = at.directory()?;
    let state = directory.state()?.ok_or_else(|| {
        Failure::new(format!(
            "the fleet is not up: start it with `{}`",
            at.command("up")
        ))
    })?;
    at.check(&state)?;
    if let Some(missing) = state.missing.get(name) {
        let up = at.command("up");
        return Err(Failure::new(format!(
            "VM {name:?} does not run ({}): `{up}` tries to start it",
            missing.why
        )));
    }
    let vm = state.vms.iter().find(|vm| vm.name == name);
    let vm = vm.ok_or_else(|| none_called(name, &[], &state))?;
    // It would answer when it goes on, which may be never.
    if vm.process.life() == Life::Stopped {
        let pid = vm.process.pid;
        return Err(Failure::new(format!(
            "VM {name:?}: its process {pid} is stopped and cannot answer: `kill -CONT {pid}` lets it go on"
        )));
    }
    let files = directory.vm(name);
    let answer = runtime::block_on(async {
        let asked = async {
            match (vm.vmm, words) {
                (Vmm::CloudHypervisor, [method, call]) => vmm::http(&files, method, call, "").await,
                (Vmm::CloudHypervisor, [method, call, body]) => vmm::http(&files, method, call, body).await,
                (Vmm::Qemu, [command]) => vmm::qmp(&files, command, "{}").await,
                (Vmm::Qemu, [command, arguments]) => vmm::qmp(&files, command, arguments).await,
                (Vmm::CloudHypervisor, _) => {
                    Err("give a method and a call, e.g. GET vm.info, and a body if it takes one".into())
                }
                (Vmm::Qemu, _) => Err(
                    "give a command, e.g. query-status, and its arguments as JSON if it takes some".into(),
                ),
                (Vmm::Reference, _) => Err("the reference VMM has no API".into()),
            }
        };
        let answer = tokio::time::timeout(ANSWER_LIMIT, asked).await;
        let answer = answer.unwrap_or_else(|_| Err("no answer within ten minutes".into()));
        answer.map_err(|e| Failure::new(format!("VM {name:?}: {}: {e}", vm.vmm)))
    })?;
    if !answer.is_empty() {
        say!("{answer}");
    }
    Ok(())
}
