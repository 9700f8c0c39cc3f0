//! Cloud Hypervisor: its arguments, and its API.

use super::condition::Condition;
use crate::plan::VmPlan;
use crate::state::{HeldSocket, VmFiles};
use cloud_hypervisor_client::SocketBasedApiClient;
use cloud_hypervisor_client::apis::{DefaultApi, Error};
use cloud_hypervisor_client::models::console_config::ConsoleConfig;
use cloud_hypervisor_client::models::{ConsoleMode, SerialConfig, VmConfig, VmState};
use std::process::Command;
use std::time::Duration;

/// How often a starting VMM is asked whether it is there.
const RETRY: Duration = Duration::from_millis(10);

pub(crate) fn arguments(vm: &VmPlan, files: &VmFiles, command: &mut Command) {
    let mut socket = std::ffi::OsString::from("path=");
    socket.push(files.socket());
    command.arg("--api-socket").arg(socket).args(&vm.extra_args);
}

/// The API of a VMM whose socket is there.
struct Api {
    client: SocketBasedApiClient,
    /// What the client connects to.
    _socket: HeldSocket,
}

impl std::ops::Deref for Api {
    type Target = SocketBasedApiClient;

    fn deref(&self) -> &SocketBasedApiClient {
        &self.client
    }
}

fn api(files: &VmFiles) -> Result<Api, String> {
    let socket = files
        .hold_socket()
        .map_err(|e| format!("cannot reach its API: {e}"))?;
    Ok(Api {
        client: cloud_hypervisor_client::socket_based_api_client(socket.path()),
        _socket: socket,
    })
}

/// Creates the VM and boots it.
pub(crate) async fn boot(vm: &VmPlan, files: &VmFiles) -> Result<(), String> {
    // The socket is there some milliseconds after the process.
    let api = loop {
        match api(files) {
            Ok(api) => break api,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    };
    while let Err(error) = api.vmm_ping_get().await {
        if let Error::Api(_) | Error::Serde(_) = error {
            return Err(message("vmm.ping", &error));
        }
        tokio::time::sleep(RETRY).await;
    }
    let config = VmConfig {
        // Its standard output, which is the log: a file that it opens itself it does not write at the end, so that it could not be
        // emptied.
        serial: Some(SerialConfig::new(ConsoleMode::Tty)),
        console: Some(ConsoleConfig::new(ConsoleMode::Off)),
        ..vm.api.as_deref().cloned().unwrap_or_default()
    };
    api.create_vm(config)
        .await
        .map_err(|e| message("vm.create", &e))?;
    api.boot_vm().await.map_err(|e| message("vm.boot", &e))?;
    let info = api.vm_info_get().await.map_err(|e| message("vm.info", &e))?;
    match info.state {
        VmState::Running => Ok(()),
        state => Err(format!("vm.boot was accepted, but the VM is {state}")),
    }
}

pub(crate) async fn condition(files: &VmFiles) -> Result<Condition, String> {
    let info = api(files)?
        .vm_info_get()
        .await
        .map_err(|e| message("vm.info", &e))?;
    Ok(match info.state {
        VmState::Running => Condition::Running,
        VmState::Paused => Condition::Paused,
        VmState::Created | VmState::Shutdown => Condition::Off,
    })
}

pub(crate) async fn power_button(files: &VmFiles) -> Result<(), String> {
    api(files)?
        .power_button_vm()
        .await
        .map_err(|e| message("vm.power-button", &e))
}

pub(crate) async fn quit(files: &VmFiles) -> Result<(), String> {
    let api = api(files)?;
    api.shutdown_vm().await.map_err(|e| message("vm.shutdown", &e))?;
    api.shutdown_vmm().await.map_err(|e| message("vmm.shutdown", &e))
}

/// A call's error in one line. The API answers with a JSON list, the outermost error first.
fn message(call: &str, error: &Error) -> String {
    match error {
        Error::Api(error) => {
            let text = match serde_json::from_str::<Vec<String>>(&error.body) {
                Ok(chain) => chain.join(": "),
                Err(_) => error.body.split_whitespace().collect::<Vec<_>>().join(" "),
            };
            format!("{call}: {text} ({})", error.code)
        }
        other => format!("{call}: {other}"),
    }
}
