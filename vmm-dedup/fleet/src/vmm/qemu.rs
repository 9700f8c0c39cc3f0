//! QEMU: its arguments, and its monitor (QMP: one JSON object a line).

use super::condition::Condition;
use super::http::readable;
use crate::plan::VmPlan;
use crate::state::VmFiles;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// How often a starting VMM is asked whether it is there.
const RETRY: Duration = Duration::from_millis(10);

pub(crate) fn arguments(vm: &VmPlan, files: &VmFiles, command: &mut Command) {
    command
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            "q35,accel=kvm",
            "-cpu",
            "host",
        ])
        .args([
            "-name",
            &vm.name,
            "-m",
            &format!("{}M", vm.memory_mib),
            "-smp",
            &vm.cpus.to_string(),
        ])
        .arg("-chardev")
        .arg(option(
            "file,id=fleet-serial,path=",
            &files.serial(),
            ",append=on",
        ))
        .args(["-serial", "chardev:fleet-serial"])
        .arg("-qmp")
        .arg(option("unix:", &files.socket(), ",server=on,wait=off"))
        .arg("-pidfile")
        .arg(files.pid())
        .arg("-kernel")
        .arg(&vm.kernel)
        .args(["-append", &vm.cmdline]);
    if let Some(initramfs) = &vm.initramfs {
        command.arg("-initrd").arg(initramfs);
    }
    command.args(&vm.extra_args);
}

/// A path within an option, where a comma is doubled.
fn option(before: &str, path: &Path, after: &str) -> OsString {
    let mut bytes = before.as_bytes().to_vec();
    for byte in path.as_os_str().as_bytes() {
        bytes.push(*byte);
        if *byte == b',' {
            bytes.push(b',');
        }
    }
    bytes.extend_from_slice(after.as_bytes());
    OsString::from_vec(bytes)
}

/// A connection to a monitor.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    async fn open(files: &VmFiles) -> Result<Self, String> {
        let unreachable = |e: std::io::Error| format!("QMP: {e}");
        let socket = files.hold_socket().map_err(unreachable)?;
        let stream = UnixStream::connect(socket.path()).await.map_err(unreachable)?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.receive().await?; // the greeting
        monitor.ask("qmp_capabilities").await?;
        Ok(monitor)
    }

    async fn receive(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.0.read_line(&mut line).await {
            Ok(0) => Err("QMP: QEMU closed the connection".into()),
            Ok(_) => serde_json::from_str(&line).map_err(|e| format!("QMP: {e}")),
            Err(e) => Err(format!("QMP: {e}")),
        }
    }

    /// Runs a command without arguments.
    async fn ask(&mut self, command: &str) -> Result<Value, String> {
        self.ask_with(command, json!({})).await
    }

    async fn ask_with(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let request = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.0
            .get_mut()
            .write_all(request.as_bytes())
            .await
            .map_err(|e| format!("QMP: {e}"))?;
        loop {
            let mut answer = self.receive().await?;
            if let Some(error) = answer.get("error") {
                return Err(format!(
                    "{command}: {}",
                    error["desc"].as_str().unwrap_or("failed")
                ));
            }
            // What else comes is an event.
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }
}

/// Waits until the VM runs.
pub(crate) async fn boot(files: &VmFiles) -> Result<(), String> {
    loop {
        if let Ok(Condition::Running) = condition(files).await {
            return Ok(());
        }
        tokio::time::sleep(RETRY).await;
    }
}

pub(crate) async fn condition(files: &VmFiles) -> Result<Condition, String> {
    let status = Monitor::open(files).await?.ask("query-status").await?;
    Ok(match status["status"].as_str().unwrap_or_default() {
        "running" => Condition::Running,
        "shutdown" | "guest-panicked" | "internal-error" => Condition::Off,
        _ => Condition::Paused,
    })
}

pub(crate) async fn power_button(files: &VmFiles) -> Result<(), String> {
    Monitor::open(files)
        .await?
        .ask("system_powerdown")
        .await
        .map(drop)
}

pub(crate) async fn quit(files: &VmFiles) -> Result<(), String> {
    Monitor::open(files).await?.ask("quit").await.map(drop)
}

/// Runs a command as somebody writes it; returns the answer, set out for people.
pub(crate) async fn command(files: &VmFiles, command: &str, arguments: &str) -> Result<String, String> {
    let arguments = serde_json::from_str(arguments).map_err(|e| format!("the arguments are no JSON: {e}"))?;
    let answer = Monitor::open(files).await?.ask_with(command, arguments).await?;
    match answer.as_object().is_some_and(serde_json::Map::is_empty) {
        true => Ok(String::new()),
        false => Ok(readable(&answer.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(
            option("unix:", Path::new("/a,b"), ",server=on"),
            "unix:/a,,b,server=on"
        );
    }
}
